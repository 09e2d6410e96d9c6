"""One file per paper: what each method does to canonical matrices, with no word about libraries."""

from attncond.methods.spectral import Spectral

__all__ = ["Spectral"]
