"""One file per paper: what each method does to canonical matrices, with no word about libraries."""

from attncond.methods.gap import RemoveGap
from attncond.methods.precondition import Precondition
from attncond.methods.spectral import Spectral

Method = Spectral | Precondition | RemoveGap
METHODS: dict[str, type[Method]] = {m.__name__: m for m in (Spectral, RemoveGap, Precondition)}

__all__ = ["METHODS", "Method", "Precondition", "RemoveGap", "Spectral"]
