"""Tables 8 and 9 are counted in real models."""

import pytest
from fabricate import Fake

from attncond.lab import costs
from attncond.lab.compare import group
from attncond.lab.config import Model
from attncond.lab.results import load_runs
from attncond.lab.tables import table


def test_counts_by_hand():
    model = Model(name="vit_small32", kwargs={"depth": 2})
    found = costs.counted("small", model, 10, 32)
    tokens, width = 65, 192
    assert found.original.total("parameters") == 2 * 3 * width**2
    assert found.original.total("flops") == 2 * 6 * tokens * width**2
    assert found.original.overhead_output == pytest.approx(1 / (2 * width))  # the paper's
    assert found.original.overhead_weight == pytest.approx(1 / tokens)
    assert found.original.correction_bytes == 0
    assert 0 < found.corrected.correction_bytes < 0.03 * 4 * 2 * 3 * width**2  # a few a row
    assert found.corrected.total("parameters") == found.original.total("parameters")


def test_both_tables_without_any_run():
    memory, flops = table(8), table(9)
    models = ("ViT-B", "DeiT-B", "Swin-B", "XCiT-M", "DaViT-B")
    assert [row["model"] for row in memory.data] == [row["model"] for row in flops.data]
    assert tuple(row["model"] for row in flops.data) == models
    vit = flops.data[0]
    assert vit["flops"] == 12 * 6 * 197 * 768**2
    assert vit["overhead_output"] == pytest.approx(1 / (2 * 768))
    assert memory.data[0]["parameters"] == 12 * 3 * 768**2
    ((_, command),) = memory.missing
    assert command.startswith("attncond lab run vit-cifar10 --form small --variants baseline,")


def test_measured_memory_stands_beside(tmp_path):
    Fake(memory=4e9).write(tmp_path)
    Fake("gap", methods=("gap",), memory=4.4e9).write(tmp_path)
    found = costs.memory(group(load_runs([tmp_path])), {"small": "vit_b"})
    measured = [d for d in found.data if "peak_memory_bytes" in d]
    assert [(d["variant"], d["ratio"]) for d in measured] == [
        ("baseline", 1.0),
        ("gap", pytest.approx(1.1)),
    ]
    assert "4.40" in found.to_text()
    assert not found.missing
