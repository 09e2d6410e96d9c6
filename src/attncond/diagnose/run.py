"""One diagnosis from beginning to end: what is measured when, and into which row it goes."""

from __future__ import annotations

import fnmatch
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attncond._version import __version__
from attncond.corrections import full, records
from attncond.diagnose import measure
from attncond.diagnose.capture import Captured, watch
from attncond.diagnose.jacobians import Job, NotCoveredError, job_of, used_weight
from attncond.diagnose.measure import Values
from attncond.diagnose.progress import Clock
from attncond.diagnose.replayed import ReplayJob, TakenJobs
from attncond.diagnose.report import Report, Row, Spectrum
from attncond.diagnose.threads import side_by_side
from attncond.errors import DiagnosisError
from attncond.inspection import Unsupported
from attncond.sites import Projection, Site, class_name

__all__ = ["Diagnosis", "Options", "choose_sites"]

_POINTS = 64  # singular values that are kept of one projection
_SEVERAL = 1 << 23  # entries of a weight up to which several are solved at a time
_ROOM = 1 << 30  # bytes of the host's memory for Jacobians that are taken


@dataclass(frozen=True)
class Options:
    """What `diagnose` was asked for; None is everything."""

    heads: frozenset[int] | None
    samples: int | None
    tokens: int | None
    jacobian: bool
    gradients: bool


@dataclass(frozen=True, eq=False)
class _Weight:
    """One projection as it is stored or used: (heads, head_dim, in)."""

    layer: int
    site: Site
    projection: Projection
    names: tuple[str, ...]  # prefixes of the columns that it is for
    matrix: Tensor
    last: bool  # of its site


def choose_sites(
    sites: Sequence[Site], layers: Iterable[int | str] | None
) -> list[tuple[int, Site]]:
    """The attentions that were asked for, numbered as in the plan."""
    if layers is None:
        return list(enumerate(sites))
    if isinstance(layers, str | int):
        layers = [layers]
    chosen: set[int] = set()
    for layer in layers:
        if isinstance(layer, str):
            found = {i for i, s in enumerate(sites) if fnmatch.fnmatchcase(s.path, layer)}
        else:
            found = {i for i in range(len(sites)) if i in (layer, layer + len(sites))}
        if not found:
            known = [s.path or "''" for s in sites[:3]] + ["..."] * (len(sites) > 3)
            raise DiagnosisError(
                f"layers: {layer!r} is none of the model's {len(sites)} attentions, which are "
                f"numbered from 0: {', '.join(known)}"
            )
        chosen |= found
    return [(i, sites[i]) for i in sorted(chosen)]


class Diagnosis:
    """Collects values by (layer, run, head); head None is the whole attention."""

    def __init__(
        self, model: nn.Module, sites: list[tuple[int, Site]], options: Options, clock: Clock
    ) -> None:
        self.model = model
        self.sites = sites
        self.options = options
        self.clock = clock
        self.layers = {id(site): layer for layer, site in sites}
        self.weights: defaultdict[tuple[int, int | None], Values] = defaultdict(dict)
        self.values: dict[tuple[int, int, int | None], Values] = {}
        self.spectra: list[Spectrum] = []
        self.calls: Counter[int] = Counter()
        self.jobs: list[tuple[int, int, Site, Job | ReplayJob | TakenJobs]] = []
        self.taken = False
        self.notes: list[str] = []
        self.troubles: list[str] = []
        self.skipped: Counter[str] = Counter()
        self.unresolved: defaultdict[tuple[int, int], float] = defaultdict(float)
        self.ran = False
        self.measuring = False  # stays True where a measurement, not the model, raises

    def heads(self, site: Site) -> list[int]:
        """The query heads that were asked for."""
        wanted = self.options.heads
        return [h for h in range(site.heads) if wanted is None or h in wanted]

    def measure_weights(self) -> None:
        """Spectra of every projection, stored and effective, whole and by head."""
        self.clock.begin("weights", len(self.sites))
        raw = [p.raw for _, site in self.sites for p in site.projections]
        several = all(w.device.type == "cpu" and w.numel() <= _SEVERAL for w in raw)
        found = side_by_side(_spectra, self._matrices(), several)
        with torch.no_grad(), closing(found):
            for weight, (whole, parts) in found:
                self._note_weight(weight, whole, parts)
                if weight.last:
                    self.clock.step()

    def _matrices(self) -> Iterator[_Weight]:
        """Those of all projections, as long as there is time."""
        for layer, site in self.sites:
            if self.clock.spent:
                self.skipped["weights"] += 1
                continue
            for p in site.projections:
                last = p is site.projections[-1]
                conditioned = p.name in records(p.owner)
                names = ("raw_",) if conditioned else ("raw_", "")
                raw = p.matrix(full(p.raw.detach()))
                yield _Weight(layer, site, p, names, raw, last and not conditioned)
                if conditioned:
                    yield _Weight(layer, site, p, ("",), used_weight(p), last)

    def _note_weight(self, weight: _Weight, whole: Tensor, parts: Tensor) -> None:
        layer, site, p = weight.layer, weight.site, weight.projection
        shape = (p.heads * p.head_dim, p.in_features)
        found: dict[int | None, Values] = {None: measure.weight(whole, shape)}
        for h in self.heads(site):
            sigma = parts[p.serving(h, site.heads)]
            found[h] = measure.weight(sigma, (p.head_dim, p.in_features))
        points = measure.spread(len(whole), _POINTS)
        kept = tuple(float(f"{v:.7g}") for v in whole[points].tolist())
        ranks = tuple(i + 1 for i in points)
        for name in weight.names:
            for key, values in found.items():
                self.weights[layer, key] |= {f"{name}{p.role}_{k}": v for k, v in values.items()}
            spectrum = Spectrum(layer, site.path, p.role, name == "raw_", ranks, kept)
            self.spectra.append(spectrum)

    def raw_weights(self) -> list[Tensor]:
        """The stored parameters of all sites, each once."""
        found = {id(p.raw): p.raw for _, site in self.sites for p in site.projections}
        return [p for p in found.values() if p.is_floating_point()]

    def measure_gradients(self, weights: list[Tensor], grads: Sequence[Tensor | None]) -> None:
        """Norms of the loss's gradients by role, whole and by head."""
        by_id = {id(w): g for w, g in zip(weights, grads, strict=True)}
        for layer, site in self.sites:
            for p in site.projections:
                grad = by_id.get(id(p.raw))
                zero = torch.zeros(p.heads, p.head_dim, 1, device="cpu")
                matrix = zero if grad is None else p.matrix(full(grad.detach()))
                norms = torch.linalg.vector_norm(matrix.cpu().double(), dim=(1, 2))
                name = f"{p.role}_grad_norm"
                self.weights[layer, None][name] = float(norms.square().sum().sqrt())
                for h in self.heads(site):
                    self.weights[layer, h][name] = float(norms[p.serving(h, site.heads)])

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Measure every attention that happens in the block."""
        self.ran = True
        self.clock.begin("attention", len(self.sites))
        with watch([site for _, site in self.sites], self._measure_attention):
            yield

    def _measure_attention(self, captured: Captured) -> None:
        self.measuring = True
        site = captured.site
        layer = self.layers[id(site)]
        call = self.calls[layer]
        self.calls[layer] += 1
        whole: Values = {}
        self.values[layer, call, None] = whole
        for h in self.heads(site):
            self.values[layer, call, h] = {}
        if self.clock.spent:
            self.skipped["attention"] += 1
        else:
            self._measure_captured(captured, layer, call, whole)
        self.measuring = False

    def _measure_captured(self, captured: Captured, layer: int, call: int, whole: Values) -> None:
        site, scores = captured.site, captured.scores
        if not (scores.items and scores.queries and scores.keys):
            self.notes.append(f"nothing to measure in {site.path or 'the model'}: no tokens came")
            for h in (None, *self.heads(site)):
                self.values[layer, call, h]["jacobian_status"] = "not measured: no tokens"
            return
        if captured.tokens is not None:
            whole |= measure.tokens(captured.tokens, self.options.samples)
        told = scores.heads == site.heads
        heads = self.heads(site) if told else list(range(scores.heads))
        conditioned = captured.conditioned
        found = measure.attention(
            scores,
            heads,
            gap=captured.gap,
            precondition=None if conditioned is None else conditioned.precondition,
            samples=self.options.samples,
        )
        whole |= _over_heads(found)
        if told:
            for h, values in zip(heads, found, strict=True):
                self.values[layer, call, h] |= values
        if self.options.jacobian:
            self._prepare_jacobian(captured, layer, call)
        self.clock.step()

    def _prepare_jacobian(self, captured: Captured, layer: int, call: int) -> None:
        status, heads = "not measured: time budget", self.heads(captured.site)
        try:
            job = job_of(captured, heads, self.options.tokens)
            self.jobs.append((layer, call, captured.site, job))
        except NotCoveredError as error:
            status = f"not covered: {error}"
        for key in (None, *heads):
            self.values[layer, call, key]["jacobian_status"] = status

    def take_jobs(self) -> None:
        """Make the Jacobians of first runs independent of the model, and drop those of others.

        `measure_jacobians` may then be called in another thread, on whose CPU it computes, while
        the model changes. One that fails there is told in ``troubles``.
        """
        jobs, room = [job for job in self.jobs if job[1] == 0], _ROOM
        self.jobs.clear()
        for layer, call, site, job in jobs:
            assert not isinstance(job, TakenJobs)
            taken = job.taken(self.heads(site), room)
            room -= taken.written
            self.jobs.append((layer, call, site, taken))
        self.taken = True

    def measure_jacobians(self) -> None:
        """Those of all heads, one of each layer before a second of any."""
        each = [(h, *job) for job in self.jobs for h in self.heads(job[2])]
        self.clock.begin("Jacobians", len(each))
        for head, layer, call, site, job in sorted(each, key=lambda j: j[0]):
            if self.clock.spent:
                self.skipped["Jacobians"] += 1
                continue
            try:
                values = job.of_head(head).solve()
            except Exception as error:
                if not self.taken:
                    raise
                values = {"jacobian_status": f"not measured: {error}"}
                where = f"head {head} of {site.path or 'the model'}"
                self.troubles.append(f"the Jacobian of {where} cannot be solved: {error!r}")
            beyond = float(values["jacobian_status"] == "unresolved")
            self.values[layer, call, head] |= {**values, "jacobian_unresolved": beyond}
            whole = self.values[layer, call, None]
            whole["jacobian_status"] = values["jacobian_status"]
            new, old = values.get("jacobian_kappa"), whole.get("jacobian_kappa")
            if isinstance(new, float) and (not isinstance(old, float) or new > old):
                whole |= {k: v for k, v in values.items() if v is not None}  # the worst head's
            self.unresolved[layer, call] += beyond
            whole["jacobian_unresolved"] = self.unresolved[layer, call]
            if self.unresolved[layer, call]:  # then the worst κ is not known
                whole["jacobian_status"] = "unresolved"
            self.clock.step()
        self.jobs.clear()

    def rows(self) -> list[Row]:
        """All values, layer by layer."""
        rows: list[Row] = []
        for layer, site in self.sites:
            for call in range(max(1, self.calls[layer])):
                for h in (None, *self.heads(site)):
                    values: Values = {"heads": float(site.heads)}
                    values |= self.weights[layer, h]
                    values |= self.values.get((layer, call, h), {})
                    if self.ran and not self.calls[layer]:
                        values["jacobian_status"] = "not reached"
                    rows.append(Row(layer, site.path, site.cls, site.kind, call, h, values))
        return rows

    def report(self, unsupported: Sequence[Unsupported]) -> Report:
        """The rows, and all that belongs to them."""
        rows, notes = self.rows(), [*self.notes]
        for what, count in self.skipped.items():
            notes.append(f"time budget of {self.clock.budget} s: {count} {what} not measured")
        notes += [
            f"not supported: {u.path or 'the model'} ({u.cls}): {u.reason}" for u in unsupported
        ]
        return Report(tuple(rows), tuple(self.spectra), tuple(notes), self._info())

    def _info(self) -> dict[str, Any]:
        parameter = next(self.model.parameters())
        return {
            "model": class_name(self.model),
            "attncond": __version__,
            "torch": torch.__version__,
            "device": str(parameter.device),
            "dtype": str(parameter.dtype).removeprefix("torch."),
            "samples": self.options.samples,
            "tokens": self.options.tokens,
            "seconds": round(self.clock.seconds, 3),
        }


def _spectra(weight: _Weight) -> tuple[Tensor, Tensor]:
    """Singular values of the whole, and of the heads."""
    with torch.no_grad():  # in a thread of its own
        whole = measure.singular_values(weight.matrix.flatten(0, 1))
        several = weight.projection.heads > 1
        return whole, measure.singular_values(weight.matrix) if several else whole[None]


def _over_heads(found: Sequence[Values]) -> Values:
    """Means, and extremes of what is an extreme already."""
    result: Values = {}
    for name in dict.fromkeys(k for values in found for k in values):
        numbers = [v for values in found if isinstance(v := values.get(name), float)]
        if not numbers:
            continue
        stack = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        if name == "entropy_min":
            result[name] = float(stack.min())
        elif name == "logit_max":
            result[name] = float(stack.max())
        else:
            result[name] = float(stack.mean())
    return result
