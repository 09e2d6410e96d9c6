"""Where a number comes from: versions, hardware, the state of the source, the command."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from attncond._version import __version__

__all__ = ["about", "begin_memory", "command", "git", "hardware", "peak_memory", "versions"]

_PACKAGES = ("torch", "timm", "accelerate", "torchvision", "numpy", "safetensors", "triton")


def about(device: torch.device, processes: int) -> dict[str, Any]:
    """Everything here that belongs into a result."""
    return {
        "versions": versions(),
        "hardware": hardware(device, processes),
        "git": git(),
        "command": command(),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def versions() -> dict[str, str]:
    """Of this package, Python and what a training depends on."""
    found = {"attncond": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found


def hardware(device: torch.device, processes: int) -> dict[str, Any]:
    """What the run was computed on; ``side_by_side`` runs shared it, which step times show."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {
        "device": device.type,
        "name": name,
        "processes": processes,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "side_by_side": int(os.environ.get("ATTNCOND_LAB_JOBS", "1")),
    }


def git() -> dict[str, Any] | None:
    """The commit of the source, and whether it was changed since; None if nobody knows.

    ATTNCOND_COMMIT tells it where the source was copied without its history.
    """
    if told := os.environ.get("ATTNCOND_COMMIT"):
        commit, _, rest = told.partition("-")
        return {"commit": commit, "dirty": bool(rest)}
    call = ["git", "-C", str(Path(__file__).parent)]
    try:
        commit = _output([*call, "rev-parse", "HEAD"])
        return {"commit": commit, "dirty": bool(_output([*call, "status", "--porcelain", "."]))}
    except (OSError, subprocess.SubprocessError):
        return None


def command() -> str:
    """What was typed, with the program's name instead of its path."""
    told = os.environ.get("ATTNCOND_LAB_COMMAND")  # of the process that started this one
    return told or shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])


def begin_memory(device: torch.device) -> int:
    """Start to watch memory; the bytes that an earlier run of this process left on the GPU."""
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def peak_memory(device: torch.device) -> int | None:
    """Bytes: of tensors on a GPU; of the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _output(call: list[str]) -> str:
    done = subprocess.run(call, capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()
