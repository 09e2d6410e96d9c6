"""Histories: there and back without loss, and no accident to a file costs what was whole in it."""

import json
import math
import sys

import pytest
from full_disk import Full

from attncond.errors import DiagnosisError
from attncond.monitor import history as module
from attncond.monitor.history import History, Journal, Record, Row


def record(step, loss=None, **values):
    values = {"q_kappa": 2.5, **values}
    rows = (Row(0, "blocks.0.attn", None, values), Row(0, "blocks.0.attn", 1, {"q_kappa": 3.0}))
    return Record(step, rows, loss)


def steps(path):
    return [r.step for r in History.read(path)]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.jsonl"


@pytest.fixture
def journal(path):
    made = Journal(path, "Model", 0)
    for step in range(3):
        made.add(record(step))
    return made


def same(a, b):
    return a == b or (math.isnan(a) and math.isnan(b))


@pytest.mark.parametrize("value", [0.1 + 0.2, 1e-320, math.inf, -math.inf, math.nan, None])
def test_every_number_comes_back(tmp_path, value):
    made = History("m", [record(0, loss=value, k_kappa=value)])
    file = made.to_json(tmp_path / "h.json")
    json.loads(file.read_text(), parse_constant=pytest.fail)  # JSON that everything reads
    found = History.read(file)[0]
    for number in (found.loss, found.rows[0].values["k_kappa"]):
        assert number is None if value is None else same(number, value)
    assert found.rows[1] == made[0].rows[1]


def test_a_history_is_a_sequence():
    made = History("m", [record(0), record(4)])
    assert (len(made), made[-1].step, [r.step for r in made]) == (2, 4, [0, 4])
    assert History.from_dict(made.to_dict()) == made


def test_the_table_has_a_row_for_each_step_and_head():
    pytest.importorskip("pandas")
    made = History("m", [record(0), record(4, loss=1.5, entropy=None)])
    frame = made.frame
    assert list(frame.columns) == ["step", "loss", "layer", "path", "head", "entropy", "q_kappa"]
    assert frame["head"].isna().tolist() == [True, False, True, False]
    assert frame["loss"].tolist()[2:] == [1.5, 1.5]
    assert math.isnan(frame["entropy"][2])
    assert len(History("m").frame) == 0


def test_without_pandas_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match=r"pip install 'attncond\[report\]'.*history\.records"):
        History("m").frame


def test_the_page_has_the_numbers(tmp_path):
    page = History("m", [record(0, q_kappa=12345.678)]).to_html(tmp_path / "page.html")
    assert "12345.678" in page.read_text(encoding="utf-8")


def test_each_record_is_on_disk_at_once(journal, path):
    assert steps(path) == [0, 1, 2]
    lines = path.read_text().splitlines()
    assert json.loads(lines[0]) == {"schema": "attncond.history/1", "model": "Model"}
    assert len(lines) == 4


def test_a_last_line_that_was_cut_short_is_left_out(journal, path):
    text = path.read_bytes()
    last = text.splitlines()[-1]
    for cut in (1, 2, len(last) // 2, len(last)):
        path.write_bytes(text[: -cut - 1])
        assert steps(path) == [0, 1]
    path.write_bytes(text[:-1])  # only its end of line is missing
    assert steps(path) == [0, 1, 2]
    Journal(path, "Model", 2).add(record(3))
    assert steps(path) == [0, 1, 2, 3]


def test_anything_else_that_is_damaged_is_told(journal, path):
    head, first, second, *_ = path.read_bytes().split(b"\n")
    infinite = first.replace(b'"step": 0', b'"step": 1e999')
    for lines, message in (
        ([head, first[:-20], second, b""], r"run\.jsonl, line 2, is not JSON"),
        ([head, b"\xff\xfe", second, b""], r"line 2, is not JSON"),
        ([head, first, first, b""], "step 0 comes after step 0; did two runs"),
        ([head, b"{}", b""], "damaged: KeyError"),
        ([head, b"7", b""], "damaged: TypeError"),
        ([head, infinite, b""], "damaged: OverflowError"),
        ([b'{"schema": "other/2"}', b""], r"schema is 'other/2', wanted is 'attncond\.history/1'"),
        ([b"[]", b""], "schema is None"),
        ([json.dumps(History("m").to_dict()).encode(), first, b""], "line 2 should not be there"),
        ([b""], "empty, or cut short"),
        ([head[:10]], "empty, or cut short"),
    ):
        path.write_bytes(b"\n".join(lines))
        with pytest.raises(DiagnosisError, match=message):
            History.read(path)


def test_going_on_drops_what_lies_behind_the_checkpoint(journal, path):
    again = Journal(path, "Model", 1)
    assert [r.step for r in again.records] == [0, 1]
    assert steps(path) == [0, 1]
    again.add(record(2, loss=9.0))
    assert History.read(path)[2].loss == 9.0


def test_another_run_is_not_written_over(journal, path):
    before = path.read_bytes()
    with pytest.raises(DiagnosisError, match=r"up to step 2 already.*pass start="):
        Journal(path, "Model", 0)
    with pytest.raises(DiagnosisError, match=r"is of Model, not of Other: choose another file"):
        Journal(path, "Other", 2)
    assert path.read_bytes() == before


def test_a_file_that_is_no_history_is_not_written_over(path):
    for text in ("my notes", "my notes\n", '{"mine": 1}\n', '{"schema": "other'):
        path.write_text(text)
        with pytest.raises(DiagnosisError):
            Journal(path, "Model", 0)
        assert path.read_text() == text


@pytest.mark.parametrize("length", [0, 1, 10, 40])
def test_a_first_line_that_was_cut_short_is_begun_anew(journal, path, length):
    path.write_bytes(path.read_bytes()[:length])
    Journal(path, "Model", 0).add(record(0))
    assert steps(path) == [0]


def test_what_could_not_be_written_comes_with_the_next(journal, path, monkeypatch):
    opened = open

    monkeypatch.setattr(module, "open", lambda *a: Full(opened(*a)), raising=False)
    for step in (3, 4):
        with pytest.raises(OSError, match="No space left"):
            journal.add(record(step))
    assert steps(path) == [0, 1, 2]
    monkeypatch.undo()
    journal.add(record(5))
    assert steps(path) == [0, 1, 2, 3, 4, 5]


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError):
        History.read(tmp_path / "nowhere.jsonl")
