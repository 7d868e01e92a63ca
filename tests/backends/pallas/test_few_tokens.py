"""The kernels that make the tables of a decode, against NumPy: more tokens than the conformance suite has."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from tests.support import interpreter
from xen_moe_jax.pallas_kernels.index_tokens import Slabs, index_tokens
from xen_moe_jax.pallas_kernels.launch import Launch
from xen_moe_jax.pallas_kernels.order_tokens import order_tokens
from xen_moe_jax.pallas_kernels.place import TOKEN_BITS
from xen_moe_jax.pallas_kernels.record import Header, Record


@pytest.fixture(autouse=True)
def quick_interpreter():
    with interpreter.quick():
        yield


LAUNCH = Launch(16, interpret=pltpu.InterpretParams())
RANK, BLOCK, GROUP = 1, 16, 32


def routing(ranks, tokens, top_k, experts, seed):
    """Experts `[R, T, K]` with unused slots, and with tokens that name an expert twice."""
    rng = np.random.default_rng(seed)
    idx = rng.integers(0, experts, (ranks, tokens, top_k)).astype(np.int32)
    idx[rng.random(idx.shape) < 0.1] = -1
    return idx, rng.random(idx.shape, np.float32)


def rows_of(idx, local, slabs):
    """Positions `[R, T, K]` on rank 1 by the definition: experts in order, sources in order, slots in order."""
    positions = np.full(idx.shape, -1)
    counts = np.zeros((len(idx), local), int)
    start = 0
    for e in range(local):
        at = 0
        for entry in np.argwhere(idx == RANK * local + e):
            row = (e * slabs.slab if slabs.slab else start) + at
            fits = at < slabs.slab if slabs.slab else row < slabs.rows
            positions[tuple(entry)] = row if fits else -2
            counts[entry[0], e] += 1
            at += 1
        start += -(-at // slabs.alignment) * slabs.alignment
    return positions, counts, start


@pytest.mark.parametrize(
    ("ranks", "tokens", "top_k", "local", "layout", "capacity", "alignment"),
    [
        (4, 128, 2, 16, "padded", None, 1),
        (2, 200, 3, 5, "grouped", 640, 8),
        (4, 64, 4, 3, "grouped", 200, 1),  # not enough for all
        (3, 7, 3, 6, "padded", None, 1),  # slabs of 21 rows: blocks of 16 are shared by experts
        (3, 1, 3, 9, "padded", None, 1),  # and by several, with slabs of 3
        (2, 8, 6, 1, "padded", None, 1),  # an expert named twice by a token: its slab is too small
    ],
)
def test_index_tokens(ranks, tokens, top_k, local, layout, capacity, alignment):
    idx, weights = routing(ranks, tokens, top_k, local * ranks if local > 1 else 2, seed=tokens)
    slab = ranks * tokens if layout == "padded" else 0
    slabs = Slabs(local, BLOCK, local * slab or capacity, slab, alignment)
    header = Header(top_k)
    record = Record(128, "bfloat16", header=header.words)
    staged = np.full((ranks, *record.shape[:1], tokens, 128), 77, np.int32)
    last = staged[:, record.header_row]
    last[..., header.experts : header.rows] = idx
    last[..., header.weights : header.token] = weights.view(np.int32)
    visits, found_weights, found_positions, found_counts = index_tokens(
        jnp.asarray(staged), jnp.full((1,), RANK * local, jnp.int32), record=record, top_k=top_k, slabs=slabs,
        launch=LAUNCH,
    )  # fmt: skip
    positions, counts, used = rows_of(idx, local, slabs)
    assert (positions == -2).any() == ((capacity or 640) < 640 or local == 1)
    assert np.array_equal(np.asarray(found_positions).swapaxes(1, 2), positions)
    assert np.array_equal(found_counts, counts)
    source, expected_weights = np.full(slabs.rows, -1), np.zeros(slabs.rows, np.float32)
    for r, t, k in np.argwhere(positions >= 0):
        source[positions[r, t, k]] = r << TOKEN_BITS | t
        expected_weights[positions[r, t, k]] = weights[r, t, k]
    assert np.array_equal(np.asarray(found_weights), expected_weights)

    blocks = np.pad(source, (0, -slabs.rows % BLOCK), constant_values=-1).reshape(-1, BLOCK)
    wanted = np.flatnonzero((blocks >= 0).any(1)) if slab else np.arange(-(-min(used, slabs.rows) // BLOCK))
    count = int(visits.last[0]) + 1
    assert np.array_equal(visits.blocks[:count], wanted)
    assert np.array_equal(visits.gathered[:count], (blocks[wanted] >= 0).sum(1))
    assert np.array_equal(visits.records[: count * BLOCK].reshape(-1, BLOCK), blocks[wanted])


@pytest.mark.parametrize(("ranks", "tokens", "top_k"), [(8, 128, 8), (3, 200, 4), (2, 5, 2)])
def test_order_tokens(ranks, tokens, top_k):
    local = 4
    idx, _ = routing(ranks, tokens, top_k, local * ranks, seed=ranks)
    positions, _, _ = rows_of(idx, local, Slabs(local, BLOCK, ranks * tokens * top_k - 40, 0, 1))
    own = idx[RANK]
    ordered, summands, zero = order_tokens(
        jnp.asarray(positions.swapaxes(1, 2), jnp.int32), jnp.asarray(own.T), jnp.full((1,), RANK, jnp.int32),
        local_experts=local, block=BLOCK, group=GROUP, launch=LAUNCH,
    )  # fmt: skip
    assert not np.asarray(zero).any()
    hit = np.stack([(own // local == r).any(1) for r in range(ranks)])  # -1 // local is no rank
    number = np.where(hit, np.arange(ranks)[:, None] * tokens + np.arange(tokens), -1)
    wide = len(summands.numbers) // ranks
    assert np.array_equal(np.asarray(summands.numbers).reshape(ranks, wide)[:, :tokens], number)
    assert len(summands.came) == -(-tokens // BLOCK) * BLOCK
    assert np.array_equal(np.asarray(summands.came)[:tokens], number.T)
    steps = np.pad(hit, ((0, 0), (0, -tokens % BLOCK))).reshape(ranks, -1, BLOCK).sum((0, 2))
    assert np.array_equal(np.asarray(summands.gathered)[: len(steps)], steps)
    assert np.array_equal(np.asarray(ordered.expected)[:ranks], hit.sum(1))

    columns = ordered.columns
    tables = np.asarray(ordered.tables).reshape(-1, columns.rows, columns.block)
    each = columns.block // wide
    beside = np.asarray(ordered.rows).reshape(len(tables), GROUP, -1, top_k)
    upright = beside.swapaxes(1, 2).reshape(len(tables), columns.block, top_k)
    for b, table in enumerate(tables):
        sources = range(b * each, (b + 1) * each)
        pairs = [(s, t, [r for r in positions[s, t] if r >= 0]) for s in sources for t in range(tokens)]
        pairs = sorted((p for p in pairs if (positions[p[0], p[1]] != -1).any()), key=lambda p: -len(p[2]))
        n = len(pairs)
        want = np.array([rows + [-1] * (top_k - len(rows)) for _, _, rows in pairs])
        assert np.array_equal(table[:top_k, :n].T, want) and np.array_equal(upright[b, :n], want)
        assert np.array_equal(table[columns.peer, :n], [s for s, _, _ in pairs])
        assert np.array_equal(table[columns.address, :n], [RANK * tokens + t for _, t, _ in pairs])
        deeper = [sum(len(rows) > s for _, _, rows in pairs) for s in range(top_k)]
        assert table[columns.facts, : top_k + 1].tolist() == [*deeper, n]
