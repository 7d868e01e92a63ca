"""Pairs ordered within blocks, against plain Python: the tables that `reduce_slots` follows."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from tests.support import interpreter
from xen_moe_jax.pallas_kernels.launch import Launch
from xen_moe_jax.pallas_kernels.order_pairs import order_pairs


@pytest.fixture(autouse=True)
def quick_interpreter():
    with interpreter.quick():
        yield


def expected_block(rows, peer, slots):
    """Numbers of the pairs that exist, those with most rows first, earlier ones before later ones."""
    exist = [p for p in range(len(peer)) if peer[p] >= 0]
    return sorted(exist, key=lambda p: -(rows[p] >= 0).sum())


@pytest.mark.parametrize(("pairs", "slots", "group"), [(24, 3, 8), (600, 8, 16), (256, 1, 128)])
def test_pairs_are_ordered_by_depth(pairs, slots, group):
    rng = np.random.default_rng(pairs)
    rows = rng.integers(0, 1 << 30, (pairs, slots))
    rows[rng.random((pairs, slots)) < 0.6] = -1
    rows[rng.random((pairs, slots)) < 0.05] = -2  # dropped: the pair exists nevertheless
    peer = np.where((rows != -1).any(1), rng.integers(0, 300, pairs), -1)
    address = rng.integers(0, 1 << 22, pairs)
    operands = [jnp.asarray(a, jnp.int32) for a in (rows, peer, address)]
    columns, tables, beside = order_pairs(*operands, group, launch=Launch(8, interpret=pltpu.InterpretParams()))
    tables = np.asarray(tables).reshape(-1, columns.rows, columns.block)
    assert beside.shape[1:] == (group, columns.block // group * slots)
    upright = np.asarray(beside).reshape(len(tables), group, -1, slots).swapaxes(1, 2).reshape(len(tables), -1, slots)
    for b, table in enumerate(tables):
        here = slice(b * columns.block, (b + 1) * columns.block)
        order = expected_block(rows[here], peer[here], slots)
        depths = (rows[here] >= 0).sum(1)
        want = np.full((len(order), slots), -1)
        for i, p in enumerate(order):
            used = [r for r in rows[here][p] if r >= 0]
            want[i, : len(used)] = used
        n = len(order)
        assert np.array_equal(table[:slots, :n].T, want) and np.array_equal(upright[b, :n], want)
        assert np.array_equal(table[columns.peer, :n], peer[here][order])
        assert np.array_equal(table[columns.address, :n], address[here][order])
        assert np.array_equal(table[columns.depth, :n], depths[order])
        assert (table[columns.peer, n:] == -1).all() and (table[columns.depth, n:] == 0).all()
        deeper = [int((depths[order] > s).sum()) for s in range(slots)]
        assert table[columns.facts, : slots + 1].tolist() == [*deeper, n]
