"""The memory table: its bytes are those of the traced layer, and the page quotes the command's output."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import ROOT

pytest.importorskip("flax", reason="needs xen-moe-jax[flax]")

import xen_moe_jax as xm
from tests.support.layers import CONFIG
from xen_moe_jax import cli
from xen_moe_jax.flax import memory

PAGE = ROOT / "docs" / "user" / "performance.md"
T, R, K, H, F = 64, 4, 2, 256, 32
WIDE = dataclasses.replace(CONFIG, hidden_size=H, intermediate_size=F, capacity_factor=1.25)


def kept(**changes):
    buffers = memory.kept_buffers(dataclasses.replace(WIDE, **changes), T, R, "float32")
    return {(b.shape, b.dtype): b.count for b in buffers}


def test_what_the_backward_pass_keeps():
    rows = 160  # 1.25 * 64 * 2
    assert kept()[(rows, H), "float32"] == 2, "rows that came, rows that go back"
    assert kept()[(rows, F), "float32"] >= 3, "gate, up, and what is between"
    experts = kept(remat="experts")
    assert experts[(rows, H), "float32"] == 1 and ((rows, F), "float32") not in experts
    assert experts[(R, T, K), "int32"] >= 1, "the handle is kept: no routing again"
    everything = kept(remat="all", num_chunks=4)
    assert set(everything) == {((4, T // 4, H), "float32"), ((4, T // 4, K), "int32"), ((4, T // 4, K), "float32")}


def test_forward_buffers_shrink_by_the_chunks():
    whole, quarter = (
        memory.forward_buffers(dataclasses.replace(WIDE, capacity_factor=None, num_chunks=c), T, R) for c in (1, 4)
    )
    assert memory.chunk_rows(dataclasses.replace(WIDE, capacity_factor=None), T, R) == R * T * K
    by_name = {b.name: b for b in whole}
    assert by_name["rows that came"].shape == (R * T * K, H) and by_name["rows that came"].nbytes == R * T * K * H * 2
    assert 0.24 < memory.total(quarter) / memory.total(whole) < 0.27


def test_rows_are_those_of_the_layer():
    """The shape that the table counts is the shape that the layer dispatches."""
    for changes in ({}, {"capacity_factor": None}, {"capacity_factor": None, "num_chunks": 4, "alignment": 8}):
        config = dataclasses.replace(WIDE, **changes)
        rows = memory.chunk_rows(config, T, R)
        shapes = [b.shape for b in memory.kept_buffers(config, T, R, "float32")]
        assert (rows, H) in shapes


def test_an_exact_balance_has_rows_for_its_own_tokens_and_weights_of_its_slots():
    config = dataclasses.replace(WIDE, capacity_factor=None, balance="exact", slots_per_rank=4)
    assert memory.chunk_rows(config, T, R) == T * K
    assert memory.chunk_rows(dataclasses.replace(config, alignment=8), T, R) == T * K + 4 * 7 // 8 * 8
    by_name = {b.name: b for b in memory.forward_buffers(config, T, R)}
    assert by_name["expert weights in slots"].shape == (4, H, F)
    assert by_name["rows on their way back"].shape == (T * K, H)
    assert by_name["handle: counts"].shape == (R, 4)
    found = {(b.shape, b.dtype): b.count for b in memory.kept_buffers(config, T, R, "float32")}
    assert found[(T * K, F), "float32"] >= 3


def test_slots_of_a_placement_are_counted_as_experts():
    config = dataclasses.replace(WIDE, capacity_factor=None, top_k=4, num_experts=8)
    assert memory.chunk_rows(config, T, R) == R * T * 2
    assert memory.chunk_rows(dataclasses.replace(config, num_slots=12), T, R) == R * T * 3


def test_weights_are_counted_as_they_are_loaded():
    """The bytes of arrays of these shapes; few rows are multiplied by a kernel where it takes the shapes."""
    config = dataclasses.replace(WIDE, intermediate_size=96)
    entries = {entry.name: entry for entry in memory.weight_formats(config, R)}
    local, wide = config.num_experts // R, 3 * 2 * H * 96
    assert entries["bfloat16"] == memory.WeightsEntry("bfloat16", local * wide, 0, 0)
    blocks = entries["float8_e4m3fn in blocks of 128 x 128"]
    weights = [
        xm.QuantizedWeight(
            np.zeros((local, *shape), jnp.float8_e4m3fn), np.zeros((local, *scales), np.float32), (128, 128)
        )
        for shape, scales in (((H, 96), (2, 1)), ((H, 96), (2, 1)), ((96, H), (1, 2)))
    ]
    assert blocks.nbytes == sum(weight.nbytes for weight in weights)
    assert (blocks.few_rows, blocks.more_rows) == (0, local * 2 * 2 * H * 96)
    assert entries["MXFP4"].nbytes == local * 3 * H * 96 * (16 + 1) // 32
    odd = {entry.name: entry for entry in memory.weight_formats(dataclasses.replace(config, intermediate_size=40), R)}
    assert "MXFP4" not in odd and odd["int8, a scale a channel"].few_rows == local * 2 * 2 * H * 40


def test_the_page_quotes_the_command(capsys):
    assert cli.main(["memory"]) == 0
    printed = capsys.readouterr().out
    assert "| no capacity | 131072 |" in printed
    assert printed.count("| rows that came | bfloat16[131072, 4096] | 1024.00 | 256.00 | 320.00 | 80.00 |") == 1
    if jax.__version__ == "0.11.2":  # the arrays that jax.vjp keeps beside the rows differ between versions
        plans, _, kept_arrays, _, _ = printed.strip().split("\n\n")
        assert f"{plans}\n\n" in PAGE.read_text() and "2 x bfloat16[131072, 4096]" in kept_arrays


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--tokens", "0", "--tokens 0: must be at least 1"),
        ("--top-k", "99", "top_k=99"),
        ("--ranks", "10000000000", "--ranks 10000000000: must be at least 1 and below"),
        ("--tokens", "1000000000", "row numbers are int32"),
    ],
)
def test_wrong_sizes(capsys, option, value, message):
    with pytest.raises(SystemExit):
        cli.main(["memory", option, value])
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1
