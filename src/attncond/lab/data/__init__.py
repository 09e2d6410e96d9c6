"""The lab's data: read once, split once, and the same batches for the same seed."""

from attncond.lab.data.batches import Batches
from attncond.lab.data.loading import find, load
from attncond.lab.data.source import DataError, DataSettings, Files, Source, Split

__all__ = ["Batches", "DataError", "DataSettings", "Files", "Source", "Split", "find", "load"]
