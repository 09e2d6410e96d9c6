"""Watch how well conditioned attention stays in training: ``Monitor(model, every=100)``."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from attncond.diagnose import Batch, begin
from attncond.diagnose.guard import unwrapped
from attncond.diagnose.run import Diagnosis
from attncond.monitor.checks import chosen, is_first_process, replaced, sharded
from attncond.monitor.history import History, Journal, Record, Row
from attncond.monitor.sinks import Log, scalars, sink_of
from attncond.monitor.snapshot import Snapshot, Stage, measured
from attncond.sites import class_name

if TYPE_CHECKING:
    from pandas import DataFrame

__all__ = ["History", "Monitor", "Record", "Row"]

Troubles = list[tuple[str, str]]  # (kind, what went wrong); each kind is told once


class Monitor:
    """Measures W_Q, W_K and W_V of a model in training, and leaves the training as it is.

    Call :meth:`step` after each optimizer step. Every ``every`` steps, and at step 0, which is
    here and now, the weights are copied; their exact spectra are computed in a thread of its own
    while the training goes on, and logged at a later call. The numbers are those of
    :func:`attncond.diagnose`, of stored weights (``raw_q_kappa``) and of those that the forward
    pass uses (``q_kappa``). Where modules of the model are replaced, the new ones are measured.

    Args:
        model: Any model that :func:`attncond.inspect` reads; may be compiled, wrapped in DDP, or
            conditioned. With several processes, the first one measures and the others do nothing.
        every: Steps between two measurements; None measures only ``at`` some.
        log: Where to: a TensorBoard ``SummaryWriter``, a Lightning logger, a ``logging.Logger``, a
            function of (values by name, step), a path for a file of JSON lines, or a list of them.
        at: Further steps to measure.
        roles: Some of "qkv".
        layers: Which attentions: numbers in the order of ``inspect``, or patterns of paths.
        heads: Whether to measure each head's block of rows, too. Trackers do not get those.
        batch: A probe, as for ``diagnose``: entropy, saturation, the second singular value of the
            attention and the rank of the tokens on it. The model runs once in eval mode for each
            measurement, which training waits for; not for the Jacobians.
        samples: Items of the probe that are measured at the most.
        tokens: Jacobians of the heads on the probe, with so many tokens; None leaves them out.
            They are computed beside the training, on the CPU wherever the model is. An attention
            that no closed form covers is run again for them, and that training waits for, too.
        start: Steps that lie behind the model: those of its checkpoint. A file then goes on after
            them; what it holds beyond is of a run that was given up, and goes.
        patience: Seconds that a step may wait for the previous measurement to end. If that does
            not suffice, its own is left out. ``math.inf`` leaves out none.
        gather: Measure weights that FSDP2 shards. Then each process has to make a Monitor and to
            step it, for gathering takes them all.

    Raises:
        UnsupportedAttentionError: The model has no attention that ``inspect`` can read.
        DiagnosisError: The probe does not run, or the file is of another run.
        ConditioningError: Weights are sharded, and ``gather`` was not asked for.

    After that, nothing that goes wrong stops the training: it is told in a warning, once.

    >>> import attncond as ac
    >>> with ac.Monitor(nn.TransformerEncoderLayer(16, 2), every=50) as monitor:
    ...     for _ in range(100):
    ...         monitor.step()  # after optimizer.step()
    >>> monitor.history[0].step, monitor.history[0].rows[0].path
    (0, 'self_attn')
    >>> monitor.history[0].rows[0].values["q_kappa"] > 1
    True
    """

    def __init__(
        self,
        model: nn.Module,
        every: int | None = 100,
        *,
        log: Log | Sequence[Log] | None = None,
        at: Iterable[int] = (),
        roles: Iterable[str] = "qkv",
        layers: Iterable[int | str] | None = None,
        heads: bool = False,
        batch: Batch | None = None,
        samples: int | None = 4,
        tokens: int | None = None,
        start: int = 0,
        patience: float = 0.1,
        gather: bool = False,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"Monitor needs a torch.nn.Module, not {type(model).__name__}")
        if every is not None and every < 1:
            raise ValueError(f"every must be at least 1, or None, not {every!r}")
        if start < 0:
            raise ValueError(f"start must be at least 0, not {start!r}")
        self.model = unwrapped(model)
        self.every, self.at = every, frozenset(at)
        self.roles, self.heads = "".join(roles), heads
        if not self.roles or set(self.roles) - set("qkv"):
            raise ValueError(f"roles must be some of 'qkv', not {roles!r}")
        if tokens is not None and batch is None:
            raise ValueError("tokens= asks for Jacobians, which need a probe: give batch= as well")
        self.batch, self.samples, self.tokens = batch, samples, tokens
        self.patience = patience
        self.layers = layers if layers is None or isinstance(layers, str | int) else [*layers]
        self.sites = chosen(self.model, self.layers)
        gathers = sharded(self.model, gather, batch is not None)
        self._main = is_first_process()
        self._takes_part = self._main or gathers
        self._waits = gathers  # one process must not leave out what the others gather
        self._step = self._last = start
        self._probed = False
        self._warned: set[str] = set()
        self._job: Future[tuple[Record, Troubles]] | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._stage = Stage(keep=self._main)
        name = class_name(self.model)
        self._history = History(name)
        self._journals: list[Journal] = []
        self._sinks = []
        if self._main:
            for one in log if isinstance(log, list | tuple) else [] if log is None else [log]:
                if isinstance(one, str | os.PathLike):
                    self._journals.append(Journal(one, name, start))
                    self._history.records = self._journals[-1].records[:]
                else:
                    self._sinks.append(sink_of(one))
        # A compiled training step that calls it must neither trace it nor depend on its counter.
        self._advance = torch.compiler.disable(self._advance_eagerly)
        done = {record.step for record in self._history}
        if start == 0 or (self._due(start) and start not in done and not gathers):
            self._measure(start, None)

    def step(self, *, step: int | None = None, loss: Tensor | float | None = None) -> None:
        """Count one optimizer step, and measure if it is time to.

        ``step`` says how many there were, if you count yourself; ``loss`` goes into the record.
        A loss on a GPU is only read when it is measured, and then without waiting for it.
        """
        self._advance(step, loss)

    def measure(self, *, loss: Tensor | float | None = None) -> None:
        """Measure now, whether it is time or not: the end of a training, for one."""
        self._advance(self._step, loss, force=True)

    @property
    def history(self) -> History:
        """All records so far; waits for the one that is being made. Empty in other processes."""
        self.flush()
        return self._history

    @property
    def frame(self) -> DataFrame:
        """The history as a pandas table; ``Report.columns`` says what its columns mean."""
        return self.history.frame

    def to_json(self, path: str | os.PathLike[str]) -> Path:
        """Write the history; :meth:`read` reads it."""
        return self.history.to_json(path)

    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """Write a page with the history's curves."""
        return self.history.to_html(path)

    @staticmethod
    def read(path: str | os.PathLike[str]) -> History:
        """The history in a file that ``log=path`` or ``to_json`` wrote, of a killed run too."""
        return History.read(path)

    def flush(self) -> None:
        """Wait for the measurement under way, and log it."""
        self._collect(None)

    def close(self) -> None:
        """Log what is under way, and end the thread. The history stays; stepping does nothing."""
        self.flush()
        if self._pool is not None:
            self._pool.shutdown()
        self._takes_part = False

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _due(self, step: int) -> bool:
        return step in self.at or (self.every is not None and step % self.every == 0)

    def _advance_eagerly(
        self, step: int | None, loss: Tensor | float | None, force: bool = False
    ) -> None:
        self._step = self._step + 1 if step is None else step
        if not self._takes_part:
            return
        if self._job is not None and self._job.done():
            self._collect(None)
        # Each step once: a probe of step 0 by the loop's own count would be of trained weights.
        if self._step <= self._last or not (force or self._due(self._step)):
            return
        if not self._collect(None if force or self._waits else self.patience):
            self._warn(
                "behind",
                f"step {self._step} is not measured, since an earlier measurement is still being "
                "computed. Measure less often (every=), less (layers=, roles=, heads=False, "
                "tokens=), or let the training wait (patience=). The same may happen again.",
            )
            return
        try:
            self._measure(self._step, loss)
        except Exception as error:  # whatever it is, the training is worth more
            self._warn("measure", f"step {self._step} could not be measured: {error!r}")

    def _measure(self, step: int, loss: Tensor | float | None) -> None:
        self._last = step
        if replaced(self.model, self.sites):
            self.sites = chosen(self.model, self.layers)
        snapshot = self._stage.take(self.sites, self.roles, loss)
        if not self._main:
            return
        probe: Diagnosis | None = None
        if self.batch is not None:
            try:
                probe = begin(self.model, self.sites, self.batch, self.samples, self.tokens)
            except Exception as error:
                if not self._probed:  # a batch that never fits is the caller's mistake
                    raise
                self._warn("probe", f"the probe failed at step {step}: {error!r}")
            self._probed = True
        if self._pool is None:
            self._pool = ThreadPoolExecutor(
                1, "attncond-monitor", _use_one_core, (torch.get_num_threads(),)
            )
        self._job = self._pool.submit(_record, step, snapshot, self.heads, probe)

    def _collect(self, patience: float | None) -> bool:
        """Log the measurement under way, if it ends within so many seconds; None: whenever."""
        if self._job is None:
            return True
        try:
            # The longest wait that a lock takes is shorter than infinity.
            limit = None if patience is None else min(patience, threading.TIMEOUT_MAX)
            record, troubles = self._job.result(limit)
        except NotYet:
            return False
        except Exception as error:
            self._job = None
            self._warn("compute", f"a measurement failed: {error!r}")
            return True
        self._job = None
        for kind, trouble in troubles:
            self._warn(kind, f"{trouble} at step {record.step}")
        self._history.records.append(record)
        for journal in self._journals:
            try:
                journal.add(record)
            except OSError as error:
                self._warn(
                    f"file {journal.path}",
                    f"{journal.path} could not be written ({error}). The records are kept, and "
                    "tried again with each new one.",
                )
        for number, sink in enumerate(self._sinks):
            try:
                sink(scalars(record), record.step)
            except Exception as error:
                self._warn(f"sink {number}", f"logging failed at step {record.step}: {error!r}")
        return True

    def _warn(self, key: str, message: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            warnings.warn(f"attncond.Monitor: {message}", RuntimeWarning, stacklevel=2)


def _record(
    step: int, snapshot: Snapshot, heads: bool, probe: Diagnosis | None
) -> tuple[Record, Troubles]:
    """In the worker: everything that takes time.

    Nothing here touches the model or a setting of the process: training goes on in another thread.
    """
    snapshot.wait()
    rows, unsolved = measured(snapshot.weights, heads)
    troubles = [("values", trouble) for trouble in unsolved]
    if probe is not None:
        probe.measure_jacobians()
        troubles += [("Jacobians", trouble) for trouble in probe.troubles]
        more = {(row.layer, row.head): row.values for row in probe.rows() if row.call == 0}
        for i, row in enumerate(rows):
            found = more.get((row.layer, row.head), {})
            numbers = {k: v for k, v in found.items() if not isinstance(v, str)}
            rows[i] = Row(row.layer, row.path, row.head, {**row.values, **numbers})
    loss = None if snapshot.loss is None else float(snapshot.loss)
    return Record(step, tuple(rows), loss), troubles


def _use_one_core(others: int) -> None:
    """Let this thread alone do without helpers: the cores belong to data loaders and training."""
    torch.set_num_threads(1)
    torch.get_num_threads()  # now it holds here
    # It is also what threads start with that are made later, which are not ours.
    restore = threading.Thread(target=torch.set_num_threads, args=(others,))
    restore.start()
    restore.join()
