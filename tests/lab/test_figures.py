"""Figures: they are drawn from what there is, say what it is, and refuse by name what is not."""

import errno
import itertools
import math
import os
from pathlib import Path

import pytest
from fabricate import Fake, study, sweep

from attncond.lab.compare import group
from attncond.lab.figures import FIGURES, _spread, figure
from attncond.lab.results import load_runs
from attncond.lab.runs import ResultsError


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    study(root / "study", ("vit-cifar10", "xcit-cifar10"))
    sweep(root / "sweep", seeds=2)
    return load_runs([root])


def drawn(name, runs, variant=None):
    return FIGURES[name](group(runs), variant)


def texts(image):
    found = [image._suptitle.get_text(), image._supxlabel.get_text()]
    for ax in image.axes:
        found += [ax.get_title(), ax.get_ylabel(), ax.get_xlabel()]
        legend = ax.get_legend()
        found += [t.get_text() for t in legend.get_texts()] if legend else []
        found += [t.get_text() for t in ax.texts]
    return found


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_is_drawn_and_names_model_data_and_seeds(tmp_path, runs, name):
    path = figure(name, runs, tmp_path / "figure.png")
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert [p.name for p in tmp_path.iterdir()] == ["figure.png"]
    image = drawn(name, runs)
    said = " ".join(texts(image))
    for word in ("small32", "CIFAR-10 (JPEG copy)", "small", "20 epochs", "seeds", "std"):
        assert word in said
    assert image.get_facecolor()[:3] == (1.0, 1.0, 1.0)
    assert all(ax.lines for ax in image.axes if ax.axison)


@pytest.mark.parametrize("ending", ["svg", "pdf"])
def test_vector_graphics(tmp_path, runs, ending):
    assert figure(2, runs, tmp_path / f"f.{ending}").stat().st_size > 5000


def test_figure_2_has_raw_corrected_and_the_bound(runs):
    image = drawn("2", runs)
    sigma, kappa, jacobian = image.axes
    assert [len(ax.lines) for ax in image.axes] == [6, 6, 4]
    assert len(sigma.collections) == 6  # bands
    labels = jacobian.get_legend_handles_labels()[1]
    assert labels[0] == "κ, baseline"
    assert any("Thm 3.4" in label for label in labels)
    assert all(ax.get_yscale() == "log" for ax in (sigma, kappa, jacobian))
    caption = image._supxlabel.get_text()
    assert "baseline 3 seeds, spectral 3 seeds" in caption
    assert "Not finite and left out: 3 values" in caption  # certificates of one layer
    stock, corrected = kappa.lines[0], kappa.lines[3]
    assert min(stock.get_ydata()) > max(corrected.get_ydata())


def test_epochs_are_epochs(runs):
    line = drawn("8", runs).axes[0].lines[0]
    assert list(line.get_xdata()) == list(range(21))
    assert drawn("8", runs).axes[0].get_xlabel() == "epoch"


def test_a_variant_can_be_chosen(runs):
    image = drawn("pre3", runs)
    assert "precondition" in image._suptitle.get_text()
    chosen = drawn("2", runs, "precondition")
    assert "precondition" in chosen._suptitle.get_text()
    with pytest.raises(ResultsError, match=r"figure 2 needs ViT-B with nothing.*attncond lab run"):
        drawn("2", runs, "nothing")


def test_dots_stand_where_the_baseline_is_met(runs):
    image = drawn("pre2", runs)
    (setting, *_) = group(runs)
    spectral = next(g for g in setting.groups if g.label == "spectral")
    reached = setting.epochs_to_level(spectral)
    dots = [line for line in image.axes[0].lines if list(line.get_xdata()) == [sum(reached) / 5]]
    assert dots
    assert dots[0].get_ydata()[0] == setting.level


def test_what_else_was_changed_besides_the_method_is_drawn_if_it_is_named(tmp_path):
    Fake().write(tmp_path)
    Fake("spectral", methods=("spectral",)).write(tmp_path)
    Fake("out", methods=("spectral",), changes={"model.init": "output"}).write(tmp_path)
    found = load_runs([tmp_path])
    assert "spectral" in texts(drawn("pre2", found))
    assert "spectral, output initialisation" not in texts(drawn("pre2", found))
    assert "spectral, output initialisation" in texts(drawn("pre2", found, "out"))
    said = "have baseline; spectral; spectral, output initialisation; try: attncond lab run"
    with pytest.raises(ResultsError, match=said):
        drawn("pre2", found, "output")


def test_panels_of_one_model_are_told_apart(tmp_path):
    for epochs in (20, 40):
        for variant in ("baseline", "spectral"):
            methods = () if variant == "baseline" else (variant,)
            Fake(variant, methods=methods, epochs=epochs).write(tmp_path / str(epochs))
    titles = [ax.get_title() for ax in drawn("pre2", load_runs([tmp_path])).axes]
    assert [title.split(", ")[-1] for title in titles] == ["20 epochs", "40 epochs"]


def test_labels_of_the_first_epoch_lie_beside_the_axis(tmp_path):
    Fake(accuracy=60.0).write(tmp_path)
    Fake("spectral", accuracy=80.0, speed=20, methods=("spectral",)).write(tmp_path)
    image = drawn("pre2", load_runs([tmp_path]))
    image.canvas.draw()
    (ax,) = image.axes
    (label,) = ax.texts
    assert label.get_text() == "1.0"
    assert label.get_window_extent().x0 > ax.bbox.x0


def test_a_collapse_does_not_flatten_the_curve(runs):
    ax = drawn("lambda", runs).axes[0]
    assert ax.get_ylim()[0] > 60
    assert any(t.get_text().startswith("30.") for t in ax.texts)  # the paper's λ, told in numbers


def test_panels_over_lambda_have_one_axis_with_ticks_that_do_not_overlap(tmp_path):
    Fake(watch=True, lam=0.0).write(tmp_path)
    for lam, watch in ((0.1, True), (0.5, True), (1, True), (10, False)):
        methods = (f"spectral:lam={lam},preserve_norm=false",)
        Fake(f"l{lam}", methods=methods, watch=watch, lam=lam / 0.6).write(tmp_path)
    image = drawn("lambda", load_runs([tmp_path]))
    image.canvas.draw()
    assert len({ax.get_xlim() for ax in image.axes}) == 1
    for ax in image.axes:
        ticks = [*ax.get_xticklabels(), *ax.get_xticklabels(minor=True)]
        boxes = sorted(t.get_window_extent().extents.tolist() for t in ticks if t.get_text())
        assert len(boxes) > 2
        assert all(a[2] < b[0] for a, b in itertools.pairwise(boxes))


def test_a_record_that_the_curve_over_lambda_lacks_is_told(tmp_path):
    sweep(tmp_path, seeds=1)
    (tmp_path / "vit-lambda/small/lam4-kept/seed0/history.jsonl").write_text("")
    said = " ".join(texts(drawn("lambda", load_runs([tmp_path]))))
    assert "lam4-kept/seed0/history.jsonlholdsnohistory" in "".join(said.split())


def test_the_spread_of_a_condition_number_is_a_factor():
    low, high = _spread([1.5, 24.0], ratio=True)
    factor = math.exp(math.log(16) / math.sqrt(2))
    assert (6 - low, 6 + high) == pytest.approx((6 / factor, 6 * factor))
    assert _spread([1.0, 3.0], ratio=False) == pytest.approx((math.sqrt(2), math.sqrt(2)))
    assert _spread([5.0], ratio=True) == (0.0, 0.0)


def test_without_the_monitor_the_panels_say_so(tmp_path):
    Fake().write(tmp_path)
    for kappa in (1.5, 2, 3):
        Fake(f"k{kappa}", methods=(f"spectral:kappa={kappa}",)).write(tmp_path)
    image = drawn("lambda", load_runs([tmp_path]))
    assert sum("no record of the Monitor" in text for text in texts(image)) == 3


@pytest.mark.parametrize("name", FIGURES)
def test_no_runs_for_it_is_an_error_with_a_command(tmp_path, name):
    Fake(state="stopped").write(tmp_path)
    with pytest.raises(ResultsError, match=f"figure {name} needs .*attncond lab run"):
        figure(name, load_runs([tmp_path]), tmp_path / "f.png")
    assert not (tmp_path / "f.png").exists()


def test_mistakes_are_told(tmp_path, runs):
    with pytest.raises(ResultsError, match="no figure 4 here; there are 2, 3, 5"):
        figure(4, runs, tmp_path / "f.png")
    with pytest.raises(ResultsError, match="a finished baseline and nosuch beside it"):
        figure("pre2", runs, tmp_path / "f.png", "nosuch")
    with pytest.raises(ResultsError, match=r"should end in \.png"):
        figure(2, runs, tmp_path / "f.gif")
    with pytest.raises(ResultsError, match="there is no folder"):
        figure(2, runs, tmp_path / "nowhere" / "f.png")


def test_a_figure_that_fails_leaves_the_old_one(tmp_path, runs, monkeypatch):
    path = tmp_path / "f.png"
    path.write_text("old")

    class Broken:
        def savefig(self, draft, dpi):
            draft.write_text("half")
            raise OSError("no space left on device")

    monkeypatch.setitem(FIGURES, "2", lambda study, variant: Broken())
    with pytest.raises(ResultsError, match="no space left"):
        figure(2, runs, path)
    assert path.read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_drive_that_takes_no_writes_is_told(tmp_path, runs, monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), "draft")

    class Drawn:
        savefig = staticmethod(refuse)

    monkeypatch.setitem(FIGURES, "2", lambda study, variant: Drawn())
    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(ResultsError, match=r"f\.png cannot be written: Read-only file system$"):
        figure(2, runs, tmp_path / "f.png")
