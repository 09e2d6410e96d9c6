"""Reports and histories that the tests of the page draw: real ones, and odd ones."""

from __future__ import annotations

import math
import random

import attncond as ac
from attncond.diagnose.report import Row, Spectrum

HOSTILE = (
    '</script><script>window.hacked=1</script><img src=x onerror="window.hacked=1">'
    "'\"`${window.hacked=1}` & \u202eلعبة\u202c \u2028\u2029 🙈 <!--"
)


def made_up(layers: int = 4, heads: int = 3, name: str = "Made up") -> ac.Report:
    """Numbers of every kind in every place: missing, None, NaN, infinite, zero, unknown."""
    odd = random.Random(0)
    path = "model.layers" if name != HOSTILE else HOSTILE
    rows = []
    for layer in range(layers):
        for head in (None, *range(heads)):
            values: dict[str, float | str | None] = {
                "heads": float(heads),
                "entropy": odd.random() * 3,
                "entropy_relative": odd.random(),
                "saturation": odd.choice([0.0, odd.random()]),
                "q_kappa": 10 ** odd.uniform(0, 6),
                "k_kappa": odd.choice([math.inf, 10.0, 1e3, math.nan]),
                "jacobian_kappa": odd.choice([None, 10 ** odd.uniform(1, 9)]),
                "jacobian_paper_bound": 10 ** odd.uniform(1, 9),
                "jacobian_certificate": odd.choice([math.inf, 1e12]),
                "jacobian_status": "closed form" if name != HOSTILE else HOSTILE,
                "made_up_column": odd.random(),
                "__proto__": 1.5,
            }
            if head is None:
                values |= {"token_residue": 1 / (layer + 1), "token_rms": -math.inf}
            if layer % 3 == 2:
                del values["entropy"]
            rows.append(Row(layer, f"{path}.{layer}", name, "self", 0, head, values))
    spectra = [
        Spectrum(layer, f"{path}.{layer}", role, raw, (1, 2, 3), (3.0, 1.0, 0.0 if raw else 0.5))
        for layer in range(layers)
        for role in "qkv"
        for raw in (True, False)
    ]
    info = {"model": name, "batch": "float32 (2, 3)", "odd": {"a": [1, math.inf]}, name: name}
    return ac.Report(tuple(rows), tuple(spectra), (f"note: {name}",), info)


def weights_only() -> ac.Report:
    """As without a batch, of one attention with one head."""
    rows = [Row(0, "", "A", "self", 0, head, {"q_kappa": 3.0}) for head in (None, 0)]
    return ac.Report(tuple(rows), (Spectrum(0, "", "q", False, (1,), (2.0,)),))


def several_calls() -> ac.Report:
    """A shared layer that ran three times."""
    rows = [
        Row(0, "shared", "A", "self", call, head, {"entropy_relative": 0.1 * (call + 1)})
        for call in range(3)
        for head in (None, 0, 1)
    ]
    return ac.Report(tuple(rows))


def history(layers: int = 5, steps: int = 6, name: str = "Recorded") -> dict[str, object]:
    """As a monitor writes it, out of order and with gaps."""
    records = []
    for step in reversed(range(0, 100 * steps, 100)):
        rows = [
            {
                "layer": layer,
                "path": f"blocks.{layer}",
                "head": head,
                "values": {
                    "q_kappa": "inf" if (layer, step) == (1, 0) else 2.0 + layer * step,
                    "entropy": None if step == 200 else 1.0 + layer,
                    "made_up": "nan" if layer == 0 else 0,
                },
            }
            for layer in range(layers)
            for head in (None, 0, 1)
            if (layer, step) != (2, 300)
        ]
        records.append(
            {"step": step, "rows": rows, "loss": None if step == 100 else 1 / (1 + step)}
        )
    return {"schema": "attncond.history/1", "model": name, "records": records}


def known(rows, name):
    return [r for r in rows if r.number(name) is not None]


def heads(report):
    return [r for r in report.rows if r.head is not None]


def wholes(report):
    return [r for r in report.rows if r.head is None]
