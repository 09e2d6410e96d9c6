"""Everything attncond raises on purpose, all of it a ConditioningError, and sentences for it."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable
from typing import Any


class ConditioningError(Exception):
    """Something about the model, the method or the call makes conditioning impossible.

    The call that raises it leaves the model exactly as it was.
    """


class UnsupportedAttentionError(ConditioningError):
    """The model has no attention, or attention that no adapter understands.

    An adapter raises it too, with the reason, to refuse a module it recognises.
    """


class AlreadyConditionedError(ConditioningError):
    """The model already carries this method; remove or fold it first."""


class NotFoldableError(ConditioningError):
    """A method changes something that no weight of the stock model can express."""


class DiagnosisError(ConditioningError):
    """A diagnosis could not be made or read: the message says what to change."""


def close(name: str, known: Iterable[str], n: int = 3, cutoff: float = 0.6) -> str:
    """A question for the end of a message: which of at most ``n`` names that look alike was meant.

    >>> close("spectrl", ["spectral", "gap"])
    ' Did you mean spectral?'
    """
    found = difflib.get_close_matches(name, list(known), n, cutoff)
    return f" Did you mean {' or '.join(found)}?" if found else ""


def installed(module: str, needs: str, extra: str, error: type[Exception]) -> Any:
    """A module that only some need, or an ``error`` that says who ``needs`` it and what to install.

    >>> installed("json", "the demo needs", "demo", ConditioningError).dumps([1])
    '[1]'
    """
    try:
        return importlib.import_module(module)
    except ImportError as cause:
        raise error(
            f"{needs} {module.partition('.')[0]}, which is not installed: "
            f"pip install 'attncond[{extra}]'"
        ) from cause
