"""What every benchmark writes beside its figures: the command, the versions and the machine."""

from __future__ import annotations

import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

import torch

import attncond
from attncond.files import write_text


def _without_destination(words: list[str]) -> list[str]:
    """A command without --out, which names a folder of the machine and decides no figure."""
    if "--out" not in words:
        return words
    i = words.index("--out")
    return words[:i] + words[i + 2 :]


def write(path: Path, figures: dict[str, Any]) -> None:
    """Write figures with their circumstances as JSON, whole or not at all."""
    hardware = {"cpu_cores": os.cpu_count(), "machine": platform.machine()}
    if torch.cuda.is_available():
        hardware["gpu"] = torch.cuda.get_device_name()
    else:
        hardware["torch_threads"] = torch.get_num_threads()
    versions = {"attncond": attncond.__version__, "torch": torch.__version__}
    versions["python"] = platform.python_version()
    for name in ("timm", "transformers", "weightwatcher"):
        if name in sys.modules:
            versions[name] = sys.modules[name].__version__
    record = {
        "command": " ".join(["python", *_without_destination(sys.argv)]),
        "versions": versions,
        "hardware": hardware,
        **figures,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(record, indent=1) + "\n")
