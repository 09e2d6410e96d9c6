"""Runs that belong together: seeds of one experiment, and experiments that may be compared."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from attncond.lab.runs import Run, flat, number
from attncond.lab.stats import Difference, Sample, difference, paired
from attncond.methods import Spectral
from attncond.methods.parse import method_name

__all__ = ["Group", "Setting", "Study", "group"]

_SETTING = ("form", "model.name", "model.kwargs", "data.", "schedule.epochs", "train.batch_size")
_RATES = {"optim.qkv_lr": "W_QKV", "optim.output_lr": "W_O"}
_TOLD = ("recipe", "variant", "methods", "model.init", "model.norm", *_RATES)


@dataclass(frozen=True)
class Group:
    """The seeds of one experiment."""

    runs: tuple[Run, ...]
    on: str = "test"
    suffix: str = ""  # tells it from another with the same label

    @property
    def first(self) -> Run:
        return self.runs[0]

    @cached_property
    def finished(self) -> dict[int, float]:
        """Seed -> accuracy in percent."""
        found = {run.seed: run.accuracy(self.on) for run in self.runs}
        return {seed: value for seed, value in found.items() if value is not None}

    @property
    def values(self) -> list[float]:
        return list(self.finished.values())

    @property
    def sample(self) -> Sample:
        return Sample.of(self.values)

    @property
    def diverged(self) -> int:
        return sum(run.state == "diverged" for run in self.runs)

    @property
    def unfinished(self) -> int:
        return sum(run.state in ("running", "stopped") for run in self.runs)

    @property
    def unread(self) -> int:
        """Runs that have ended without having read the test set."""
        return len(self.runs) - len(self.finished) - self.diverged - self.unfinished

    @property
    def seeds(self) -> str:
        """How many, and what became of the others."""
        parts = [str(len(self.finished))]
        parts += [f"{self.diverged} diverged"] if self.diverged else []
        parts += [f"{self.unfinished} unfinished"] if self.unfinished else []
        parts += [f"{self.unread} without {self.on}"] if self.unread else []
        return " + ".join(parts)

    @property
    def is_baseline(self) -> bool:
        """The stock model, as the recipe trains it."""
        return self._stock and self.first.get("optim.qkv_lr", 1.0) == 1.0

    @property
    def is_tuned(self) -> bool:
        """The stock model with a learning rate of its own for W_Q, W_K and W_V."""
        return self._stock and not self.is_baseline

    @property
    def _stock(self) -> bool:
        run = self.first
        plain = run.get("model.init", "default") == "default" and run.get("model.norm", True)
        plain = plain and run.get("optim.output_lr", 1.0) == 1.0
        return not run.get("methods") and bool(plain) and not self.suffix

    @property
    def spectral(self) -> Spectral | None:
        """The method, where it is Spectral and nothing else."""
        found = self.first.methods
        one = found[0] if len(found) == 1 else None
        return one if isinstance(one, Spectral) and not self._changed else None

    @property
    def _changed(self) -> list[str]:
        run, changes = self.first, []
        init = run.get("model.init", "default")
        changes += [f"{init} initialisation"] if init != "default" else []
        changes += [] if run.get("model.norm", True) else ["no LayerNorm"]
        rates = {weight: run.get(key, 1.0) for key, weight in _RATES.items()}
        changes += [f"{weight} rate × {rate:g}" for weight, rate in rates.items() if rate != 1.0]
        return changes

    @property
    def name(self) -> str:
        """What was done, from the configuration: variants of other recipes are named otherwise."""
        names = " + ".join(method_name(method) for method in self.first.methods)
        stock = "tuned" if self.first.get("optim.qkv_lr", 1.0) != 1.0 else "baseline"
        return ", ".join([names or stock, *self._changed])

    @property
    def label(self) -> str:
        """The same with all else that differs from the baseline."""
        return f"{self.name}, {self.suffix}" if self.suffix else self.name

    def median(self, key: str, watched: str | None = None) -> float | None:
        """Of a number of the results, over the runs that finished; or those watched in one way."""
        ended = [run for run in self.runs if run.state == "finished"]
        found = [run.measured(key) for run in ended if watched in (None, _watched(run))]
        known = [value for value in found if value is not None]
        return statistics.median(known) if known else None

    def average(self, column: str, *, end: bool = True) -> float | None:
        """Of the Monitor's curves at the end, or before training, over the seeds."""
        found = [r.curves.last(column) if end else r.curves.first(column) for r in self.runs]
        known = [value for value in found if value is not None]
        return statistics.fmean(known) if known else None


@dataclass(frozen=True)
class Setting:
    """What has to be equal before two accuracies may be compared."""

    architecture: str  # the paper's name for it
    model: str
    data: str
    form: str
    epochs: int
    groups: tuple[Group, ...]
    apart: str = ""  # tells it from another of which all that is the same

    @property
    def own(self) -> str:
        """Where our numbers are from."""
        return f"{self.data}, form {self.form}, {self.epochs} epochs{self.apart}"

    @property
    def short(self) -> str:
        """The same for a column."""
        size = self.groups[0].first.get("data.image_size", "?")
        return f"{self.data_name} at {size}×{size}, {self.form}, {self.epochs} epochs{self.apart}"

    @property
    def data_name(self) -> str:
        """In a word."""
        return str(self.groups[0].first.get("data.name", "?"))

    @property
    def baseline(self) -> Group | None:
        return next((g for g in self.groups if g.is_baseline), None)

    @property
    def tuned(self) -> Group | None:
        """The stock model at the rate that did best on validation images, never on the test's.

        That may be the rate of all others: the baseline itself. None where no other was tried, or
        where no images were held out to choose by.
        """
        stock = [g for g in self.groups if g is self.baseline or g.is_tuned]
        known = [g for g in stock if _on_validation(g)]
        return max(known, key=_on_validation) if any(g.is_tuned for g in known) else None

    @property
    def references(self) -> list[Group]:
        """Baseline and tuned baseline, as far as there are two."""
        both = [self.baseline, None if self.tuned is self.baseline else self.tuned]
        return [g for g in both if g is not None]

    def versus(self, group: Group, reference: Group | None) -> Difference | None:
        """Welch's test; a p-value only where every seed came through, on both sides.

        The mean over those that did not diverge is a mean over the lucky ones.
        """
        if reference is None or reference is group:
            return None
        found = difference(group.values, reference.values)
        if found is not None and (group.diverged or reference.diverged):
            return Difference(found.delta)
        return found

    def paired(self, group: Group, reference: Group | None) -> Difference | None:
        """The same by seeds that both have."""
        if reference is None or reference is group or group.diverged or reference.diverged:
            return None
        return paired(group.finished, reference.finished)

    def ratio(self, group: Group, key: str) -> float | None:
        """A cost over the baseline's, on the same hardware, each run by itself; else there is none.

        Runs side by side slow each other down, and in a worker's second run nothing is compiled.
        What the Monitor measures takes time as well: only runs that it watched alike are compared.
        Memory counts on a GPU only: a CPU's is that of the process, with all that ran in it before.
        """
        if self.baseline is None or (key == "peak_memory_bytes" and not _on_gpu(self.baseline)):
            return None
        alike = self._watched_alike(group)
        if self.crowded(group) or not alike:
            return None
        mine, theirs = (one.median(key, min(alike)) for one in (group, self.baseline))
        same = _hardware(group) == _hardware(self.baseline)
        return mine / theirs if mine and theirs and same else None

    @cached_property
    def level(self) -> float | None:
        """The baseline's validation accuracy at the end, mean of its seeds."""
        if self.baseline is None:
            return None
        found = Group(self.baseline.runs, "validation").values
        return statistics.fmean(found) if found else None

    def epochs_to_level(self, group: Group) -> list[float | None]:
        """For each finished run the epochs that it needed, None where it never got there."""
        ended = [run for run in group.runs if run.state == "finished"]
        return [] if self.level is None else [run.epochs_to(self.level) for run in ended]

    @cached_property
    def sweep(self) -> list[tuple[float | None, Group]]:
        """λ/σ_max of the fresh weights, where it is known, and the experiments that differ in it.

        It decides how strong a correction is. Exact for a κ target; for a λ by hand with the mean
        σ_max over layers and roles.
        """
        found: list[tuple[float | None, Group]] = []
        for one in self.groups:
            method = one.spectral
            if (
                method is None
                or replace(method, kappa=None, lam=None, preserve_norm=True) != Spectral()
            ):
                continue
            if method.lam is None:
                kappa = method.target or 2.0
                found.append(((kappa + 1) / (kappa - 1), one))
            else:
                found.append((method.lam / self.sigma if self.sigma else None, one))
        return sorted(found, key=lambda pair: pair[0] or 0.0)

    @cached_property
    def sigma(self) -> float | None:
        """Mean σ_max of W_Q, W_K and W_V at the start, from the Monitor's first records.

        Where nobody watched: from the certificates of the runs. All of them start with weights of
        one distribution, but for another initialisation.
        """
        alike = [g for g in self.groups if g.first.get("model.init", "default") == "default"]
        for one in alike:
            known = [one.average(f"raw_{role}_sigma_max", end=False) for role in "qkv"]
            values = [value for value in known if value]
            if values:
                return statistics.fmean(values)
        for run in (run for one in alike for run in one.runs):
            certificates: Any = (run.result or {}).get("certificates") or {}
            start = certificates.get("start") if isinstance(certificates, dict) else None
            value = number(start.get("sigma_mean")) if isinstance(start, dict) else None
            if value:
                return value
        return None

    def crowded(self, group: Group) -> bool:
        """Whether runs shared their device, so that costs are of their company, too."""
        both = [group, *([self.baseline] if self.baseline else [])]
        return any(_company(run) > 1 for one in both for run in one.runs)

    def unlike(self, group: Group) -> bool:
        """Whether the Monitor watched one and not the other, or measured more of it."""
        return self.baseline is not None and not self._watched_alike(group)

    def _watched_alike(self, group: Group) -> set[str]:
        """How runs of both were watched."""
        both = [{_watched(run) for run in one.runs} for one in (group, self.baseline) if one]
        return set.intersection(*both)


Study = list[Setting]


def group(runs: Sequence[Run], on: str = "test") -> Study:
    """Sort runs into settings and experiments; broken ones, of which nothing is known, are not."""
    settings: dict[str, dict[str, list[Run]]] = {}
    for run in runs:
        if run.state != "broken":
            parts = {k: v for k, v in flat(run.config).items() if k.startswith(_SETTING)}
            key = json.dumps(parts, sort_keys=True)
            settings.setdefault(key, {}).setdefault(run.experiment, []).append(run)
    study: dict[str, Setting] = {}
    for key, experiments in settings.items():
        groups = [Group(tuple(found), on) for found in experiments.values()]
        groups = _told_apart(groups)
        ended = [g.first for g in groups if g.first.result] or [groups[0].first]
        run = ended[0]
        order = sorted(groups, key=lambda g: (not g.is_baseline, not g.is_tuned, g.label))
        study[key] = _setting(run, order)
    places = {name: place for place, name in enumerate(ARCHITECTURES)}
    found = _settings_apart(study)
    return sorted(found, key=lambda s: (places.get(s.architecture, 9), s.architecture, s.own))


def _setting(run: Run, groups: Sequence[Group]) -> Setting:
    model = str(run.get("model.name", "?"))
    return Setting(run.architecture, model, run.data, run.form, run.epochs, tuple(groups))


def _settings_apart(study: Mapping[str, Setting]) -> list[Setting]:
    """Say of settings that would read alike in what they differ: `data.validation=0.0` for one."""
    alike: dict[tuple[str, str], list[str]] = {}
    for key, one in study.items():
        alike.setdefault((one.architecture, one.own), []).append(key)
    found = []
    for keys in alike.values():
        parts = [json.loads(key) for key in keys]
        names = sorted({name for each in parts for name in each})
        differ = [n for n in names if any(p.get(n) != parts[0].get(n) for p in parts)]
        for key, each in zip(keys, parts, strict=True):
            told = "".join(f", {name}={each.get(name)}" for name in differ)
            found.append(replace(study[key], apart=told))
    return found


ARCHITECTURES = ("ViT-B", "DeiT-B", "Swin-B", "XCiT-M", "DaViT-B")


def _told_apart(groups: list[Group]) -> list[Group]:
    """Say of each experiment what else differs from the baseline: `optim.lr=0.002` for one.

    Where there are several baselines, that with the most runs is the one. Without any, experiments
    of one name are held against the first of them.
    """
    by_name: dict[str, list[Group]] = {}
    for one in groups:
        by_name.setdefault(one.name, []).append(one)
    stock = by_name.get("baseline")
    found = []
    for same in by_name.values():
        reference = max(stock or same, key=lambda g: len(g.finished)).first.config
        for one in same:
            found.append(Group(one.runs, one.on, _differences(one.first.config, reference)))
    return found


def _differences(config: Mapping[str, Any], reference: Mapping[str, Any]) -> str:
    mine, theirs = flat(config), flat(reference)
    keys = sorted({*mine, *theirs} - set(_TOLD))
    return ", ".join(f"{k}={mine.get(k)}" for k in keys if mine.get(k) != theirs.get(k))


def _on_validation(group: Group) -> float:
    return Group(group.runs, "validation").sample.mean or 0.0


def _hardware(group: Group) -> Any:
    known = [(run.result or {}).get("hardware") for run in group.runs if run.result]
    found = [_machine(h) for h in known if isinstance(h, dict)]
    return found[0] if len(set(found)) == 1 else found


def _machine(hardware: Mapping[str, Any]) -> tuple[Any, ...]:
    """What step times depend on; the name of a CPU says no more than x86_64."""
    of_cpu = ("cores", "threads") if hardware.get("device") == "cpu" else ()
    return tuple(hardware.get(key) for key in ("name", "processes", *of_cpu))


def _watched(run: Run) -> str:
    """What the Monitor had to do; nothing where it was off."""
    return str(run.get("watch")) if run.get("watch.every") else ""


def _on_gpu(group: Group) -> bool:
    known = [(run.result or {}).get("hardware") for run in group.runs]
    return any(isinstance(h, dict) and h.get("device") == "cuda" for h in known)


def _company(run: Run) -> int:
    hardware = (run.result or {}).get("hardware")
    return int(hardware.get("side_by_side") or 1) if isinstance(hardware, dict) else 1
