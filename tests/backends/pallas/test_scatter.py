"""The kernel that writes values to the rows that pairs name, in interpret mode, against NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from tests.support import interpreter
from xen_moe_jax.pallas_kernels.launch import Launch
from xen_moe_jax.pallas_kernels.scatter import scatter


@pytest.fixture(autouse=True)
def quick_interpreter():
    with interpreter.quick():
        yield


@pytest.mark.parametrize(
    ("pairs", "slots", "size", "window", "cores"),
    [(300, 8, 200, 128, 2), (20, 40, 60, 128, 1)],
    ids=["blocks, windows and cores", "many slots"],
)
def test_values_come_to_their_rows(pairs, slots, size, window, cores, capfd):
    rng = np.random.default_rng(3)
    index = np.full(pairs * slots, -1, np.int32)
    named = rng.permutation(index.size)[: size * 3 // 4]
    index[named] = rng.permutation(size)[: named.size]
    index[rng.permutation(np.flatnonzero(index < 0))[:20]] = -2
    limit = index.max() + 1
    index = index.reshape(pairs, slots)
    of_slots = rng.integers(-(2**31), 2**31, index.shape).astype(np.int32)
    of_pairs = rng.integers(0, 2**31, pairs).astype(np.int32)

    pltpu.reset_tpu_interpret_mode_state()
    found = scatter(
        jnp.asarray(index),
        [jnp.asarray(of_pairs), jnp.asarray(of_slots)],
        [-1, 0],
        size=size,
        limit=jnp.int32(limit),
        window=window,
        launch=Launch(1, interpret=pltpu.InterpretParams(dma_execution_mode="on_wait", detect_races=True), cores=cores),
    )
    expected = np.full(size, -1, np.int32), np.zeros(size, np.int32)
    there = index >= 0
    expected[0][index[there]] = np.broadcast_to(of_pairs[:, None], index.shape)[there]
    expected[1][index[there]] = of_slots[there]
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert "RACE DETECTED" not in "".join(capfd.readouterr())
