"""`xm.Buffer` on GPUs: it serves, refuses operations that do not fit, frees, and a program survives its closing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import xen_moe_jax as xm
from xen_moe_jax import cuda

TOKENS, HIDDEN, EXPERTS, TOP_K, CHANNEL = 64, 512, 16, 4, 7
SHAPE = {"num_tokens": TOKENS, "hidden": HIDDEN, "top_k": TOP_K, "num_experts": EXPERTS, "dtype": "float32"}


def round_trip(mesh, tokens: int):
    config = xm.KernelConfig(backend="cuda", channel=CHANNEL, timeout_s=20.0)

    def body(x, idx, weights):
        routed = xm.dispatch(x, idx, weights, num_experts=EXPERTS, axis_name="ep", config=config)
        return xm.combine(routed.x, routed.handle, config=config)

    rng = np.random.default_rng(0)
    rows = mesh.size * tokens
    idx = np.argsort(rng.random((rows, EXPERTS)), axis=1)[:, :TOP_K].astype(np.int32)
    operands = (
        rng.integers(-8, 8, (rows, HIDDEN)).astype(np.float32),
        idx,
        np.full((rows, TOP_K), 0.25, np.float32),
    )
    program = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(P("ep"),) * 3, out_specs=P("ep"), check_vma=False))
    return program, operands


def held() -> int:
    return sum(w["staging_bytes"] for w in cuda.workspaces() if w["channel"] == CHANNEL)


@pytest.mark.gpu2
def test_buffer_serves_refuses_and_frees(gpu_mesh):
    mesh = gpu_mesh((2,), ("ep",))
    program, operands = round_trip(mesh, TOKENS)
    with xm.Buffer(mesh, "ep", channel=CHANNEL, **SHAPE) as buffer:
        assert buffer.size_bytes <= held() <= buffer.size_bytes + 1024
        np.testing.assert_array_equal(
            np.asarray(program(*operands)), operands[0]
        )  # four experts that add a quarter each
        assert held() <= buffer.size_bytes + 1024
        large, more = round_trip(mesh, 16 * TOKENS)
        with pytest.raises(Exception, match=rf"Buffer on channel {CHANNEL} has \d+ bytes and this operation needs \d+"):
            jax.block_until_ready(large(*more))
        with pytest.raises(Exception, match="already open"):
            xm.Buffer(mesh, "ep", channel=CHANNEL, **SHAPE)
    assert held() == 0
    np.testing.assert_array_equal(np.asarray(program(*operands)), operands[0])  # memory is made again on first use
    assert held() > 0


@pytest.mark.gpu2
def test_memory_grows_to_the_largest_need(gpu_mesh):
    mesh = gpu_mesh((2,), ("ep",))
    small, operands = round_trip(mesh, TOKENS)
    jax.block_until_ready(small(*operands))
    before = held()
    large, more = round_trip(mesh, 8 * TOKENS)
    np.testing.assert_array_equal(np.asarray(large(*more)), more[0])
    assert held() > before
    np.testing.assert_array_equal(np.asarray(small(*operands)), operands[0])


@pytest.mark.gpu2
def test_missing_attributes_are_refused_by_name(gpu_mesh):
    """The module itself refuses a call without an attribute that Python always sends."""
    mesh = gpu_mesh((2,), ("ep",))

    def body(x):
        return jax.ffi.ffi_call("xen_moe_combine", jax.ShapeDtypeStruct(x.shape, x.dtype))(
            x, x, x, x, x, ranks=np.int64(99)
        )

    program, operands = round_trip(mesh, TOKENS)
    jax.block_until_ready(program(*operands))  # registers the targets
    refused = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"), check_vma=False))
    with pytest.raises(Exception, match=r"attribute weighted is missing or not an int64"):
        jax.block_until_ready(refused(jnp.zeros((2, 4), jnp.float32)))
