"""The kernel that reads the headers of staged records, in interpret mode, against NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from tests.support import interpreter
from xen_moe_jax.pallas_kernels import index_rows as kernel
from xen_moe_jax.pallas_kernels.launch import Launch
from xen_moe_jax.pallas_kernels.record import Header, Record

FIRST, LOCAL = 4, 3
"""This rank's first expert, and how many it has."""


@pytest.fixture(autouse=True)
def quick_interpreter():
    with interpreter.quick():
        yield


@pytest.mark.parametrize(
    ("counts", "tokens", "top_k", "window", "cores"),
    [
        # two sources a step: they share a table of 128 headers, but for one pair that does not fit
        ([40, 0, 90, 50, 1, 0, 60, 9, 100], 128, 4, 1024, 2),
        ([0, 300, 256, 5], 300, 2, 256, 1),  # two tables of a source, and rows in two windows
        ([0, 0, 0], 5, 3, 128, 2),
    ],
    ids=["sources share tables", "sources with several tables", "no records"],
)
@pytest.mark.parametrize("mode", ["on_wait", "eager"])
def test_rows_and_positions_of_arrived_headers(counts, tokens, top_k, window, cores, mode, capfd):
    rng = np.random.default_rng(tokens)
    ranks, header = len(counts), Header(top_k)
    record = Record(128, "bfloat16", header=header.words)
    start = np.concatenate([[0], np.cumsum(counts)[:-1]]) + 3
    staged = np.full((sum(counts) + 3, *record.shape), 77, np.int32)
    experts = rng.integers(-1, FIRST + LOCAL + 2, (sum(counts), top_k))
    mine = (experts >= FIRST) & (experts < FIRST + LOCAL)
    size = max(int(mine.sum()) + 20, 1)
    row = np.full(experts.shape, 1 << 20)
    row[mine] = rng.permutation(size)[: mine.sum()]
    weights = rng.random(experts.shape, np.float32)
    number = np.concatenate([np.sort(rng.permutation(tokens)[:n]) for n in counts]).astype(int)
    words = np.concatenate([experts, row, weights.view(np.int32), number[:, None]], axis=1)
    staged[3:, record.header_row, header.experts : header.experts + words.shape[1]] = words

    pltpu.reset_tpu_interpret_mode_state()
    source, found_weights, positions = kernel.index_rows(
        jnp.asarray(staged),
        jnp.asarray(start, jnp.int32),
        jnp.asarray(counts, jnp.int32),
        (jnp.int32(FIRST), jnp.int32(LOCAL), jnp.int32(size)),
        record=record,
        tokens=tokens,
        top_k=top_k,
        size=size,
        window=window,
        launch=Launch(1, interpret=pltpu.InterpretParams(dma_execution_mode=mode, detect_races=True), cores=cores),
    )
    expected = np.full(size, -1), np.zeros(size, np.float32), np.full((ranks, tokens, top_k), -1)
    of_source = np.repeat(np.arange(ranks), counts)
    for n, s in np.argwhere(mine):
        expected[0][row[n, s]] = n + 3
        expected[1][row[n, s]] = weights[n, s]
        expected[2][of_source[n], number[n], s] = row[n, s]
    assert kernel.sources_at_once(ranks, tokens, top_k) == {128: 2, 300: 1, 5: 3}[tokens]
    for ours, theirs in zip((source, found_weights, positions), expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert "RACE DETECTED" not in "".join(capfd.readouterr())
