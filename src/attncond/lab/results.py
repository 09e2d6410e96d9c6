"""Runs as they lie on disk: finished, diverged, still running, cut short or damaged.

A run is a folder with config.json, metrics.jsonl, history.jsonl and, once it has ended,
result.json; ``runs/RECIPE/FORM/VARIANT/seed0`` by default. Nothing about a run may be lost in
silence, so whatever could not be read is in its notes, and whoever shows runs shows them too.
"""

from __future__ import annotations

import glob
import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from attncond.errors import ConditioningError
from attncond.files import dumps as as_json
from attncond.lab.curves import Curves
from attncond.lab.folder import taken
from attncond.lab.runs import ResultsError, Run, State, number

__all__ = ["Progress", "collect", "dumps", "load_runs", "status"]

FAMILY = "attncond.lab.runs/"
SCHEMA = f"{FAMILY}1"
TWICE = "the same run is also in"
OTHERWISE = ": it ended otherwise, at "
UNREAD = "it has no test accuracy: the test set was left unread"
RUNNING = 600.0  # seconds: who has written nothing for longer is taken for stopped


def load_runs(
    paths: Iterable[str | os.PathLike[str]] = ("runs",), *, once: bool = True
) -> list[Run]:
    """Read runs from their folders, folders above them, patterns (``runs/vit*``) and collections.

    The same run met twice, as recipes share variants, counts once: the one that has come furthest
    stays. ``once=False`` gives all there are.

    Raises:
        ResultsError: A path does not exist, or there is no run in any of them.
    """
    found: dict[tuple[str, int], dict[tuple[str, str], Run]] = {}
    texts = [os.fspath(path) for path in paths]
    for place in _places(texts):
        for run in _collection(place) if place.is_file() else [_folder(place)]:
            alike = once and run.state != "broken"
            key = (run.experiment if alike else f"{run.source} {run.name}", run.seed)
            found.setdefault(key, {}).setdefault((run.source, run.name), run)
    if not found:
        raise ResultsError(
            f"no runs in {', '.join(texts)}: looked for folders with a config.json or result.json, "
            "and for files that `attncond lab collect` wrote. `attncond lab run NAME` makes runs."
        )
    runs = (_one_of(list(same.values())) for same in found.values())
    return sorted(runs, key=lambda r: (r.recipe, r.form, r.variant, r.seed, r.source))


@dataclass(frozen=True)
class Progress:
    """How far the runs of one variant are, or of one point of a grid."""

    recipe: str
    form: str
    variant: str
    runs: tuple[Run, ...]

    def count(self, state: State) -> int:
        return sum(run.state == state for run in self.runs)


def status(runs: Sequence[Run]) -> list[Progress]:
    """An overview by recipe, form and variant, or point of a grid."""
    groups: dict[tuple[str, str, str], list[Run]] = {}
    for run in runs:
        folder = Path(run.source).parent.name
        variant = folder if folder.startswith(f"{run.variant}@") else run.variant
        groups.setdefault((run.recipe, run.form, variant), []).append(run)
    return [Progress(*key, tuple(group)) for key, group in groups.items()]


def collect(runs: Sequence[Run], command: str) -> dict[str, Any]:
    """Runs as one record that is small enough to be committed; `load_runs` reads its file.

    Versions and hardware of the first stand at the top, those of each with it.
    """
    shared: dict[str, Any] = {}
    for key in ("versions", "hardware"):
        known = [(run.result or {}).get(key) for run in runs]
        shared[key] = next((value for value in known if value), {})
    return {
        "schema": SCHEMA,
        "command": command,
        **shared,
        "runs": [run.to_dict() for run in runs],
    }


def dumps(record: Mapping[str, Any]) -> str:
    """A collection as JSON with a line for each run, so that a diff shows what changed."""
    head = as_json({k: v for k, v in record.items() if k != "runs"})
    lines = [as_json(run) for run in record["runs"]]
    return head[:-1] + ', "runs": [\n' + ",\n".join(lines) + "\n]}\n"


def _places(paths: Sequence[str]) -> list[Path]:
    """Folders of runs, and files of collected ones."""
    places: dict[Path, None] = {}
    for text in paths:
        exact = Path(text)
        matches = [exact] if exact.exists() else [Path(p) for p in sorted(glob.glob(text))]
        if not matches:
            raise ResultsError(
                f"there is no folder or file '{text}': `attncond lab run NAME --out DIR` makes runs"
            )
        for match in matches:
            for place in [match] if match.is_file() else _below(match):
                places[place.resolve() if place.is_symlink() else place] = None
    return list(places)


def _below(root: Path) -> list[Path]:
    found, seen = [], set()
    for folder, below, files in os.walk(root, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen:  # links may lead in a ring
            below.clear()
            continue
        seen.add(real)
        below.sort()
        if "config.json" in files or "result.json" in files:
            found.append(Path(folder))
            below.clear()  # checkpoints and the like
        else:
            found += [Path(folder) / f for f in sorted(files) if _is_collection(Path(folder) / f)]
    return found


def _is_collection(path: Path) -> bool:
    if path.suffix != ".json":
        return False
    with open(path, "rb") as file:
        return FAMILY.encode() in file.read(200)


def _collection(path: Path) -> list[Run]:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        schema = record.get("schema") if isinstance(record, dict) else None
        if schema != SCHEMA and str(schema).startswith(FAMILY):
            raise ResultsError(
                f"{path} was collected by another version of attncond (its schema is {schema}, "
                f"this version reads {SCHEMA}): use that version, or `attncond lab collect` again"
            )
        if schema != SCHEMA:
            raise ValueError(f"its schema is not {SCHEMA}")
        return [
            _known(
                Run(
                    os.fspath(path),
                    run["config"],
                    tuple({**point} for point in run["metrics"]),
                    run["result"] and {**run["result"]},
                    # Nobody goes on with what was collected.
                    "stopped" if run["state"] == "running" else run["state"],
                    tuple(map(str, run["notes"])),
                    Curves.from_dict(run["curves"]),
                    tuple(run.get("shared", ())),
                )
            )
            for run in record["runs"]
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ResultsError(
            f"{path} is no file of collected runs: {error}. Give folders of runs, or what "
            "`attncond lab collect` wrote."
        ) from error


def _folder(folder: Path) -> Run:
    notes: list[str] = []
    result = _json(folder / "result.json", notes)
    config = _json(folder / "config.json", notes)
    inner = (result or {}).get("config")
    if config is None and isinstance(inner, dict):
        config = inner  # committed runs may come without the file
    if config is None:
        note = f"{folder} has no readable config.json: what was run is not known"
        return Run(os.fspath(folder), {}, (), result, "broken", (*notes, note))
    metrics = _metrics(folder / "metrics.jsonl", notes)
    state = _state(folder, result, metrics)
    if state == "finished" and number((result or {}).get("test_accuracy")) is None:
        notes.append(UNREAD)
    return _known(Run(os.fspath(folder), config, metrics, result, state, tuple(notes)))


def _known(run: Run) -> Run:
    """A run that says of itself what this version does not understand is broken: uncompared."""
    note = ""
    try:
        _ = run.methods
    except (ConditioningError, TypeError) as error:
        note = f"its methods cannot be read: {error}"
    for key, default in (
        ("schedule.epochs", None),
        ("optim.qkv_lr", 1.0),
        ("optim.output_lr", 1.0),
    ):
        value = run.get(key, default)
        if not number(value):
            note = f"its {key} should be a number above 0, and is {json.dumps(value)}"
    return replace(run, state="broken", notes=(*run.notes, note)) if note else run


def _state(
    folder: Path, result: Mapping[str, Any] | None, metrics: Sequence[Mapping[str, Any]]
) -> State:
    if result is not None:
        failed = result.get("diverged") or result.get("status") == "diverged"
        return "diverged" if failed else "finished"
    last = metrics[-1] if metrics else {}
    if "train_loss" in last and number(last["train_loss"]) is None:
        return "diverged"
    lock = folder / ".lock"
    if lock.exists():
        return "running" if _locked(lock) else "stopped"
    return "running" if _fresh(folder) else "stopped"


def _locked(path: Path) -> bool:
    """Whether the process that holds a run's folder is alive; it may be on another machine."""
    try:
        with open(path) as file:
            free = taken(file, shared=True)
    except OSError:
        return True
    return _fresh(path.parent) if free is None else not free


def _fresh(folder: Path) -> bool:
    written = [p.stat().st_mtime for p in folder.iterdir() if p.exists()]
    return time.time() - max(written, default=0.0) < RUNNING


def _json(path: Path, notes: list[str]) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        notes.append(f"{path.name} could not be read: {error}")
        return None
    if not isinstance(found, dict):
        notes.append(f"{path.name} should hold one JSON object")
        return None
    return found


def _metrics(path: Path, notes: list[str]) -> tuple[Mapping[str, Any], ...]:
    if not path.exists():
        return ()
    by_epoch: dict[float, Mapping[str, Any]] = {}
    lines = path.read_bytes().split(b"\n")
    for place, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            point = json.loads(line)
            by_epoch[float(point["epoch"])] = point  # the last word on an epoch counts
        except (ValueError, TypeError, KeyError):
            cut = place == len(lines)
            notes.append(
                "the last line of metrics.jsonl was cut short and left out"
                if cut
                else f"line {place} of metrics.jsonl could not be read and was left out"
            )
    return tuple(by_epoch[epoch] for epoch in sorted(by_epoch))


def _one_of(met: Sequence[Run]) -> Run:
    """Of a run that was met several times, what has come furthest; then what was watched least.

    Watching costs time, so that step times are those of the one, and curves those of another.
    """
    kept, *others = sorted(
        met,
        key=lambda r: (
            *(r.state in ("finished", "diverged"), _end(r) is not None),
            *(len(r.metrics), -len(r.curves.steps)),
        ),
        reverse=True,
    )
    if not others:
        return kept
    ended = _end(kept)
    notes = (
        f"{TWICE} {left.source}, which was left out"
        + ("" if _end(left) in (None, ended) else f"{OTHERWISE}{_end(left)}")
        for left in others
    )
    curves = max((run.curves for run in met), key=lambda curves: len(curves.steps))
    recipes = dict.fromkeys(name for run in others for name in (run.recipe, *run.shared))
    return replace(
        kept, notes=(*kept.notes, *notes), collected=curves, shared=(*kept.shared, *recipes)
    )


def _end(run: Run) -> str | None:
    """What a run came to, as far as it has ended and read its test."""
    accuracy = run.accuracy()
    return "divergence" if run.state == "diverged" else None if accuracy is None else f"{accuracy}"
