"""How every command tells a mistake: one line, an exit code, a traceback only where asked for."""

import pytest

pytest.importorskip("typer")

import typer

from attncond.cli.common import examples, mistakes
from attncond.errors import ConditioningError, UnsupportedAttentionError


@pytest.mark.parametrize("error", [ConditioningError, UnsupportedAttentionError])
def test_a_mistake_is_one_line_and_exit_code_2(error, capsys):
    with pytest.raises(typer.Exit) as caught, mistakes(debug=False):
        raise error("[bold]no[/bold] such " + "long " * 50)
    assert caught.value.exit_code == 2
    out, err = capsys.readouterr()
    assert (out, err) == ("", "attncond: [bold]no[/bold] such " + "long " * 50 + "\n")
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__  # no traceback of ours


def test_debug_shows_where(capsys):
    with pytest.raises(ConditioningError, match="why"), mistakes(debug=True):
        raise ConditioningError("why")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("debug", [False, True])
def test_ctrl_c_is_exit_code_130_and_silent(debug, capsys):
    with pytest.raises(typer.Exit) as caught, mistakes(debug):
        raise KeyboardInterrupt
    assert caught.value.exit_code == 130
    assert capsys.readouterr().err == ""


def test_mistakes_of_ours_are_not_hidden():
    with pytest.raises(ZeroDivisionError), mistakes(debug=False):
        1 / 0


def test_an_exit_of_the_command_passes():
    with pytest.raises(typer.Exit) as caught, mistakes(debug=False):
        raise typer.Exit(1)
    assert caught.value.exit_code == 1


def test_examples_are_paragraphs_of_their_own():
    assert examples("attncond a", "attncond b") == "Examples:\n\nattncond a\n\nattncond b"
