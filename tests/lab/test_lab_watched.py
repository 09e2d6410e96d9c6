"""Figures over training: which runs they are drawn from, and what is said of them."""

import json

import pytest
from fabricate import STEPS, Fake, study

from attncond.lab.compare import group
from attncond.lab.results import load_runs
from attncond.lab.runs import ResultsError
from attncond.lab.watched import (
    condition_numbers,
    is_called,
    jacobian,
    nothing,
    overview,
    seeds_text,
    separate,
)


@pytest.fixture(scope="module")
def vit(tmp_path_factory):
    """Five seeds each; baseline, spectral and precondition are watched for three."""
    return group(load_runs([study(tmp_path_factory.mktemp("runs"), ("vit-cifar10",))]))


def labels(ax):
    return ax.get_legend_handles_labels()[1]


def caption(image):
    return " ".join(image._supxlabel.get_text().split())


def title(image):
    return " ".join(image._suptitle.get_text().split())


def test_an_overview_has_stored_effective_and_the_jacobian(vit):
    image = overview("2", "ViT-B")(vit, None)
    sigma, kappa, last = image.axes
    assert title(image) == "Figure 2 (paper: ViT-B): spectra over training, spectral"
    roles = ("$W_Q$", "$W_K$", "$W_V$")
    assert labels(kappa) == [f"{r}, {g}" for g in ("baseline", "spectral") for r in roles]
    assert [line.get_linestyle() for line in sigma.lines] == ["--"] * 3 + ["-"] * 3
    assert len(last.lines) == 4
    said = caption(image)
    assert said.startswith("vit_small32 on CIFAR-10 (JPEG copy), form small, 20 epochs: ")
    assert "baseline 3 seeds, spectral 3 seeds." in said  # those that were watched
    assert "not a bound" in said


def test_curves_are_means_over_the_seeds_by_epoch(vit):
    (ax,) = jacobian("8", "ViT-B")(vit, None).axes
    line = ax.lines[0]
    assert list(line.get_xdata()) == list(range(21))
    runs = [run for run in vit[0].baseline.runs if run.curves.steps]
    values = [run.curves.points("jacobian_kappa")[7 * STEPS] for run in runs]
    assert len(values) == 3
    product = values[0] * values[1] * values[2]
    assert line.get_ydata()[7] == pytest.approx(product ** (1 / 3))  # of κ the geometric mean
    assert ax.get_xlabel() == "epoch"


@pytest.mark.parametrize("quantity", ["sigma_min", "sigma_max", "kappa"])
def test_one_quantity_on_two_scales(vit, quantity):
    left, right = separate("5", "ViT-B", quantity)(vit, None).axes
    assert (len(left.lines), len(right.lines)) == (6, 3)
    assert "stored" in left.get_title()
    assert "effective" in right.get_title()
    if quantity == "kappa":
        for ax in (left, right):
            values = [v for line in ax.lines for v in line.get_ydata()]
            wide = max(values) > 20 * min(values)
            assert ax.get_yscale() == ("log" if wide else "linear")
    else:
        assert left.get_ylim()[0] == right.get_ylim()[0] == 0


def test_outputs_prefer_the_method_that_is_about_them(vit):
    image = condition_numbers(vit, None)
    assert labels(image.axes[0]) == ["baseline", "precondition"]
    assert labels(condition_numbers(vit, "spectral").axes[0]) == ["baseline", "spectral"]


def test_a_variant_that_nobody_watched_is_refused_with_a_command(vit):
    said = r"figure 8 needs ViT-B with gap, watched .* jacobian_kappa is known.*attncond lab run"
    with pytest.raises(ResultsError, match=said):
        jacobian("8", "ViT-B")(vit, "gap")
    with pytest.raises(ResultsError, match="These runs have baseline; precondition; spectral; try"):
        jacobian("8", "ViT-B")(vit, "spectrl")
    with pytest.raises(ResultsError, match=r"figure 3 needs XCiT-M with a.* have none; try"):
        overview("3", "XCiT-M")(vit, None)


@pytest.mark.parametrize("level", [0.0, 2.0])
def test_curves_that_hardly_change_do_not_touch_the_border(tmp_path, level):
    folder = Fake("spectral", methods=("spectral",), watch=True).write(tmp_path)
    lines = (folder / "history.jsonl").read_text().splitlines()
    for place, line in enumerate(lines):
        record = json.loads(line)
        for row in record.get("rows", ()):
            for name in row["values"].keys() & {"q_sigma_max", "k_sigma_max", "v_sigma_max"}:
                row["values"][name] = level * (1 + 1e-3 * place)
        lines[place] = json.dumps(record)
    (folder / "history.jsonl").write_text("\n".join(lines) + "\n")
    _, ax = separate("6", "ViT-B", "sigma_max")(group(load_runs([tmp_path])), None).axes
    bottom, top = ax.get_ylim()
    highest = max(max(line.get_ydata()) for line in ax.lines)
    assert bottom == 0
    assert top > 1.04 * highest


def test_a_curve_without_any_value_is_told(tmp_path):
    folder = Fake(watch=True, lam=0.0).write(tmp_path)
    Fake("spectral", methods=("spectral",), watch=True).write(tmp_path)
    lines = (folder / "history.jsonl").read_text().splitlines()
    for place, line in enumerate(lines):
        record = json.loads(line)
        for row in record.get("rows", ()):
            del row["values"]["jacobian_kappa"]  # as it is where float64 does not resolve it
        lines[place] = json.dumps(record)
    (folder / "history.jsonl").write_text("\n".join(lines) + "\n")
    found = group(load_runs([tmp_path]))
    for draw in (overview("2", "ViT-B"), jacobian("8", "ViT-B")):
        image = draw(found, None)
        assert "κ, baseline" not in labels(image.axes[-1])
        assert "baseline 1 seed, spectral 1 seed." in caption(image)
        assert "float64 cannot resolve" in caption(image)
        assert "Without any value: κ, baseline." in caption(image)
    assert "Without" not in caption(separate("5", "ViT-B", "kappa")(found, None))


def test_a_record_that_cannot_be_read_is_told(tmp_path):
    Fake(watch=True).write(tmp_path)
    for seed in (0, 1):
        folder = Fake("spectral", seed, methods=("spectral",), watch=True).write(tmp_path)
    path = folder / "history.jsonl"
    path.write_text(path.read_text() + "garbage\n" * 2)
    Fake("gap", methods=("gap",)).write(tmp_path)  # not watched
    found = group(load_runs([tmp_path]))
    said = caption(overview("2", "ViT-B")(found, None))
    assert "baseline 1 seed, spectral 1 seed." in said
    assert f"Leftout:{path},line" in said.replace(" ", "")  # a caption breaks paths
    assert "Monitor was off" not in said
    with pytest.raises(ResultsError, match=r"Left out: .*history\.jsonl, line .* have baseline"):
        overview("2", "ViT-B")(found, "gap")


def test_one_seed_and_no_baseline_is_still_a_figure(tmp_path):
    Fake("spectral", methods=("spectral",), watch=True).write(tmp_path)
    image = overview("2", "ViT-B")(group(load_runs([tmp_path])), None)
    assert len(image.axes[0].lines) == 3
    assert "spectral 1 seed." in caption(image)
    assert not image.axes[0].collections  # no band of one


def test_the_setting_with_a_baseline_is_taken(tmp_path):
    Fake("spectral", methods=("spectral",), watch=True, epochs=40).write(tmp_path / "long")
    for name in ("baseline", "spectral"):
        Fake(name, methods=() if name == "baseline" else (name,), watch=True).write(tmp_path / "b")
    found = caption(overview("2", "ViT-B")(group(load_runs([tmp_path])), None))
    assert "20 epochs: baseline 1 seed, spectral 1 seed." in found


def test_diverged_runs_are_not_drawn(tmp_path):
    for seed, state in enumerate(("finished", "diverged")):
        Fake("spectral", seed, methods=("spectral",), watch=True, state=state).write(tmp_path)
    assert "spectral 1 seed." in caption(overview("2", "ViT-B")(group(load_runs([tmp_path])), None))


def test_steps_where_epochs_are_not_known(tmp_path):
    folder = Fake("spectral", methods=("spectral",), watch=True).write(tmp_path)
    (folder / "metrics.jsonl").write_text("")
    result = json.loads((folder / "result.json").read_text())
    (folder / "result.json").write_text(json.dumps({**result, "steps": None}))
    ax = overview("2", "ViT-B")(group(load_runs([tmp_path])), None).axes[0]
    assert ax.get_xlabel() == "step"
    assert list(ax.lines[0].get_xdata())[-1] == 20 * STEPS


def test_names(vit):
    (tuned,) = [g for g in vit[0].groups if g.is_tuned]
    assert is_called(tuned, "tuned")  # as the recipe says
    assert is_called(tuned, tuned.label)  # as the tables do
    assert not is_called(tuned, "baseline")
    assert (seeds_text(1), seeds_text(0)) == ("1 seed", "0 seeds")
    error = nothing("9", "spectra", "this")
    assert str(error).endswith("try: attncond lab run spectra --form small --seeds 5")
