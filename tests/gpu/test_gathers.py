"""all_gather and all_gather_matmul at the sizes of decode and prefill: bits, loops, and calls one after the other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import xen_moe_jax as xm
from xen_moe_jax import cuda

pytestmark = pytest.mark.gpu2
THROUGHPUT = xm.KernelConfig(mode="throughput")


@pytest.fixture
def mesh():
    return jax.make_mesh((2,), ("ep",), devices=jax.devices()[:2])


def placed(mesh, seed, shape, spec, dtype="bfloat16"):
    return jax.device_put(
        np.random.default_rng(seed).standard_normal(shape).astype(dtype), jax.NamedSharding(mesh, spec)
    )


@pytest.mark.parametrize("rows", [1, 16, 128, 640, 4096])
def test_rows_of_a_loop_are_those_of_this_turn(mesh, rows):
    """Each turn gathers other rows; if the epoch of the kernels did not advance, a turn would get those of the turn
    before."""
    x = placed(mesh, rows, (2 * rows, 7168), P("ep"))

    def body(x):
        def turn(i, wrong):
            now = x + i.astype(x.dtype)
            ours = xm.all_gather(now, "ep", tiled=True)
            return wrong + jnp.sum(ours != jax.lax.all_gather(now, "ep", tiled=True))

        return jax.lax.fori_loop(0, 20, turn, jnp.int32(0))[None]

    wrong = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"), check_vma=False))(x)
    assert not np.asarray(wrong).any()


@pytest.mark.parametrize("shape", [(512, 1024, 2048), (1000, 520, 264), (4096, 4096, 7168)], ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_bits_of_the_composition(mesh, shape, dtype):
    rows, depth, columns = shape
    x = placed(mesh, 1, (2 * rows, depth), P("ep"), dtype)
    w = placed(mesh, 2, (depth, 2 * columns), P(None, "ep"), dtype) * 0.05

    def body(x, w):
        ours = xm.all_gather_matmul(x, w, "ep", config=THROUGHPUT)
        twice = xm.all_gather_matmul(x + 1, w, "ep", config=THROUGHPUT)
        expected = [jnp.matmul(jax.lax.all_gather(a, "ep", tiled=True), w) for a in (x, x + 1)]
        return jnp.stack([jnp.sum(ours != expected[0]), jnp.sum(twice != expected[1])])[None]

    program = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(P("ep"), P(None, "ep")), out_specs=P("ep")))
    for _ in range(3):
        assert not np.asarray(program(x, w)).any()
    xm.check()
    assert all(work["launches"] > 0 for work in cuda.workspaces())
