"""How figures are drawn: bands by hand, panels, legends, and what is said where nothing is."""

import math
import statistics
import sys

import pytest

from attncond.lab import drawing
from attncond.lab.runs import ResultsError


@pytest.fixture
def ax():
    return drawing.canvas(1, 1, 4, 3)[1][0]


def test_panels_that_are_too_many_for_their_rows_are_blank():
    image, axes = drawing.canvas(4, 3, 4.0, 3.0)
    assert len(axes) == 4
    assert [a.axison for a in image.axes] == [True] * 4 + [False] * 2
    assert tuple(image.get_size_inches()) == (12.0, 6.7)
    assert not axes[0].spines["top"].get_visible()


def test_without_matplotlib_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ResultsError, match=r"matplotlib.*pip install 'attncond\[lab\]'"):
        drawing.canvas(1, 1, 4, 3)


def test_a_band_of_condition_numbers_is_geometric(ax):
    drawing.band(ax, [{0: 10.0, 1: 5.0}, {0: 1000.0, 2: 5.0}], "k", "-", "x", ratio=True)
    (line,) = ax.lines
    assert list(line.get_xdata()) == [0]  # where both have a value
    assert line.get_ydata()[0] == pytest.approx(100.0)
    (patch,) = ax.collections
    low, high = patch.get_datalim(ax.transData).intervaly
    std = math.log(100) / math.sqrt(2)
    assert (low, high) == pytest.approx((100 * math.exp(-std), 100 * math.exp(std)))


def test_any_other_band_is_arithmetic(ax):
    values = (1.0, 2.0, 6.0)
    drawing.band(ax, [{3: v, 1: 3.0} for v in values], "k", "--", "x", ratio=False)
    (line,) = ax.lines
    assert list(line.get_xdata()) == [1, 3]
    assert line.get_ydata()[1] == pytest.approx(3.0)
    low, high = ax.collections[0].get_datalim(ax.transData).intervaly
    std = statistics.stdev(values)
    assert (low, high) == pytest.approx((3 - std, 3 + std))


def test_one_run_has_no_band_and_few_points_are_marked(ax):
    drawing.band(ax, [{0: 1.0, 1: 2.0}], "k", "-", "few", ratio=False)
    drawing.band(ax, [dict.fromkeys(range(4), 1.0)], "k", "-", "many", ratio=False)
    assert not ax.collections
    assert [line.get_marker() for line in ax.lines] == ["o", "None"]


@pytest.mark.parametrize("points", [[], [{}], [{0: 1.0}, {1: 1.0}]], ids=str)
def test_nothing_in_common_draws_nothing_and_says_so(ax, points):
    drawing.band(ax, points, "k", "-", "x", ratio=True)
    assert not ax.lines
    drawing.legend(ax, 2)
    assert [t.get_text() for t in ax.texts] == ["nothing was recorded"]
    assert ax.get_legend() is None


def test_a_legend_is_below_the_axes(ax):
    drawing.band(ax, [{0: 1.0}], "k", "-", "curve", ratio=False)
    drawing.legend(ax, 2)
    assert [t.get_text() for t in ax.get_legend().get_texts()] == ["curve"]
    ax.figure.canvas.draw()
    box, panel = ax.get_legend().get_window_extent(), ax.get_window_extent()
    assert box.y1 < panel.y0
    assert not ax.texts


@pytest.mark.parametrize("curves", [1, 3])
def test_a_legend_of_long_names_is_no_wider_than_its_panel(curves):
    name = "tuned, spectral:roles=qk,kappa=1.25 + spectral:roles=v,kappa=3 initialisation"
    image, axes = drawing.canvas(3, 3, 4.9, 4.6)
    for ax in axes:
        for label in ["baseline", *[name] * curves]:
            drawing.band(ax, [{0: 1.0, 1: 2.0}], "k", "-", label, ratio=False)
        ax.set_xlabel("epoch")
        drawing.legend(ax, 2)
    image.draw_without_rendering()
    for ax in axes:
        legend = ax.get_legend().get_window_extent()
        assert legend.width < image.bbox.width / 3
        assert legend.y1 < ax.xaxis.label.get_window_extent().y0
        assert ax.bbox.width > image.bbox.width / 5


def test_whether_a_panel_needs_a_logarithmic_scale(ax):
    assert not drawing.spans(ax, 20)
    ax.plot([0, 1, 2], [-5.0, 1.0, 19.0])  # what is not positive has no logarithm
    assert not drawing.spans(ax, 20)
    ax.plot([0], [21.0])
    assert drawing.spans(ax, 20)


def test_title_and_caption_are_wrapped_to_the_width():
    image, _ = drawing.canvas(1, 1, 4, 3)
    assert drawing.finish(image, "title " * 20, "caption " * 30) is image
    title, caption = image._suptitle.get_text(), image._supxlabel.get_text()
    assert max(map(len, title.splitlines())) <= 36
    assert max(map(len, caption.splitlines())) <= 58
    assert title.split() == ["title"] * 20
    assert caption.split() == ["caption"] * 30


def test_colours_are_told_apart():
    assert len(set(drawing.COLOURS)) == len(drawing.COLOURS)
    assert drawing.GREY not in drawing.COLOURS  # the baseline's


def test_epochs_are_whole(ax):
    ax.plot([0, 1], [0, 1])
    drawing.whole_numbers(ax)
    assert all(float(tick).is_integer() for tick in ax.get_xticks())
