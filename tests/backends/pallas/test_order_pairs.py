"""Pairs ordered within blocks, against plain Python: the tables that `reduce_slots` follows."""

from __future__ import annotations

import jax
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


def in_order(numbers, rows):
    """Numbers of pairs, those with most rows first, earlier ones before later ones."""
    return sorted(numbers, key=lambda p: -(rows[p] >= 0).sum())


def expected_blocks(rows, peer, block, cores):
    """Numbers of the pairs of every block, core by core: those that exist of its part of the blocks, `block` by
    `block`."""
    size = -(-len(peer) // (block * cores)) * block
    found = []
    for core in range(cores):
        exist = [p for p in range(core * size, min((core + 1) * size, len(peer))) if peer[p] >= 0]
        blocks = [exist[n : n + block] for n in range(0, len(exist), block)]
        found.append([in_order(b, rows) for b in blocks or [[]]])
    return found


@pytest.mark.parametrize(
    ("pairs", "slots", "group", "missing", "cores"),
    [(24, 3, 8, 0.2, 1), (1500, 8, 16, 0.6, 2), (600, 8, 16, 0.9, 1), (256, 1, 128, 0.0, 1), (512, 2, 16, 1.0, 2)],
)
def test_pairs_that_exist_are_together_and_ordered_by_depth(pairs, slots, group, missing, cores):
    rng = np.random.default_rng(pairs)
    rows = rng.integers(0, 1 << 30, (pairs, slots))
    rows[rng.random((pairs, slots)) < 0.6] = -1
    rows[rng.random((pairs, slots)) < 0.05] = -2  # dropped: the pair exists nevertheless
    rows[rng.random(pairs) < missing] = -1
    peer = np.where((rows != -1).any(1), rng.integers(0, 300, pairs), -1)
    address = rng.integers(0, 1 << 22, pairs)
    operands = [jnp.asarray(a, jnp.int32) for a in (rows, peer, address)]
    launch = Launch(8, interpret=pltpu.InterpretParams(), cores=cores)
    columns, tables, beside, made = order_pairs(*operands, group, launch=launch)
    tables = np.asarray(tables).reshape(cores, -1, columns.rows, columns.block)
    assert beside.shape[1:] == (group, columns.block // group * slots)
    upright = np.asarray(beside).reshape(*tables.shape[:2], group, -1, slots).swapaxes(2, 3)
    upright = upright.reshape(*tables.shape[:2], -1, slots)
    expected = expected_blocks(rows, peer, columns.block, cores)
    assert np.asarray(made).tolist() == [len(blocks) for blocks in expected]
    for core, b, order in ((c, b, order) for c, blocks in enumerate(expected) for b, order in enumerate(blocks)):
        table, n = tables[core, b], len(order)
        depths = (rows[order] >= 0).sum(1) if n else np.zeros(0, int)
        want = np.full((n, slots), -1)
        for i, p in enumerate(order):
            used = [r for r in rows[p] if r >= 0]
            want[i, : len(used)] = used
        assert np.array_equal(table[:slots, :n].T, want) and np.array_equal(upright[core, b, :n], want)
        assert np.array_equal(table[columns.peer, :n], peer[order])
        assert np.array_equal(table[columns.address, :n], address[order])
        assert np.array_equal(table[columns.depth, :n], depths)
        assert (table[columns.peer, n:] == -1).all() and (table[columns.depth, n:] == 0).all()
        deeper = [int((depths > s).sum()) for s in range(slots)]
        assert table[columns.facts, : slots + 1].tolist() == [*deeper, n]


@pytest.mark.parametrize("slots", [6, 7, 14])
def test_any_number_of_slots_is_lowered(slots):
    """With 6 and 14 slots, rows, peer and address fill whole registers. Mosaic has no empty vector to fill
    them up with."""
    given = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((256, slots), (256,), (256,)))
    order = jax.jit(lambda rows, peer, address: order_pairs(rows, peer, address, 16, launch=Launch(1))[1:])
    order.trace(*given).lower(lowering_platforms=("tpu",))
