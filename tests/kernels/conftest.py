from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def interpreted() -> dict[str, list[float]]:
    """The errors of all cases in Triton's interpreter, which has to be on before it is imported."""
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(Path(__file__).parent / "reference.py")],
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    if "only 0-dimensional arrays can be converted" in done.stderr:
        pytest.skip("the interpreter of this Triton does not go with this NumPy")
    assert done.returncode == 0, done.stderr
    found: dict[str, list[float]] = json.loads(done.stdout)
    return found
