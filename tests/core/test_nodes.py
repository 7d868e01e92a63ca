"""`KernelConfig.ranks_per_node` without GPUs: its effect on results, the values refused, and the layer that refuses
them."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import xen_moe_jax as xm
from xen_moe_jax.backends.cuda import processes

RANKS, TOKENS, HIDDEN, TOP_K, EXPERTS = 4, 16, 128, 4, 8


def operands(seed: int = 0):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((RANKS * TOKENS, HIDDEN)).astype(jnp.bfloat16)
    idx = rng.integers(0, EXPERTS, (RANKS * TOKENS, TOP_K)).astype(np.int32)
    weights = rng.uniform(-1, 1, idx.shape).astype(np.float32)
    return x, idx, weights


@functools.cache
def round_trip(axes: tuple[str, ...], sizes: tuple[int, ...], wire: str | None = None, **config):
    """Combined tokens, and the gradients of `x` and of the weights."""
    mesh = jax.make_mesh(sizes, axes, devices=jax.devices()[:RANKS])
    config = xm.KernelConfig(backend="reference", **config)

    def body(x, idx, weights):
        def out(x, weights):
            routed = xm.dispatch(x, idx, weights, num_experts=EXPERTS, axis_name=axes, config=config)
            return xm.combine(routed.x * 3, routed.handle, wire=wire, config=config)

        y, pull = jax.vjp(out, x, weights)
        return y, *pull(x)

    mapped = jax.shard_map(body, mesh=mesh, in_specs=(P(axes),) * 3, out_specs=P(axes))
    placed = jax.device_put(operands(), NamedSharding(mesh, P(axes)))
    return [np.asarray(a) for a in jax.jit(mapped)(*placed)]


def test_a_cut_axis_adds_as_two_axes_do():
    """Bit for bit, and not as one axis does: in these data the order shows."""
    cut = round_trip(("ep",), (4,), ranks_per_node=2)
    for found, two_axes in zip(cut, round_trip(("node", "gpu"), (2, 2)), strict=True):
        np.testing.assert_array_equal(found, two_axes)
    flat = round_trip(("ep",), (4,))
    assert (cut[0] != flat[0]).any() and (cut[1] != flat[1]).any()


def test_one_node_is_no_nodes():
    for found, flat in zip(round_trip(("ep",), (4,), ranks_per_node=4), round_trip(("ep",), (4,)), strict=True):
        np.testing.assert_array_equal(found, flat)


def test_one_node_on_two_axes_is_no_nodes():
    """Its sum does not go through the wire once more."""
    wire = "float8_e4m3fn"
    for found, flat in zip(round_trip(("node", "gpu"), (1, 4), wire), round_trip(("ep",), (4,), wire), strict=True):
        np.testing.assert_array_equal(found, flat)


def test_two_axes_are_the_same_when_named_as_nodes():
    axes, sizes = ("node", "gpu"), (2, 2)
    for found, plain in zip(round_trip(axes, sizes, ranks_per_node=2), round_trip(axes, sizes), strict=True):
        np.testing.assert_array_equal(found, plain)


def test_a_way_of_cutting_that_is_none_is_refused():
    with pytest.raises(ValueError, match=r"ranks_per_node=3: must divide the 4 ranks of axis 'ep'"):
        round_trip(("ep",), (4,), ranks_per_node=3)
    with pytest.raises(
        ValueError, match=r"ranks_per_node=4 on axes .*'node', 'gpu'.* must be 2, the ranks of one node"
    ):
        round_trip(("node", "gpu"), (2, 2), ranks_per_node=4)
    with pytest.raises(ValueError, match=r"KernelConfig.ranks_per_node=0: must be None or a positive int"):
        xm.KernelConfig(ranks_per_node=0)


def test_tpu_kernels_take_nodes_from_the_mesh_alone():
    mesh = jax.make_mesh((4,), ("ep",), devices=jax.devices()[:4])

    def body(x, idx):
        return xm.dispatch(x, idx, num_experts=EXPERTS, axis_name="ep", config=xm.KernelConfig(ranks_per_node=2)).x

    shapes = [
        jax.ShapeDtypeStruct((RANKS * TOKENS, n), dtype, sharding=NamedSharding(mesh, P("ep")))
        for n, dtype in ((HIDDEN, jnp.bfloat16), (TOP_K, jnp.int32))
    ]
    mapped = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(P("ep"),) * 2, out_specs=P("ep")))
    with pytest.raises(
        ValueError, match=r"ranks_per_node=2 on one axis 'ep': the pallas backend.*slow axis, fast axis"
    ):
        mapped.trace(*shapes).lower(lowering_platforms=("tpu",))


@pytest.mark.parametrize("given", [3, 0, 8])
def test_memory_is_asked_for_nodes_of_equal_size(given):
    with pytest.raises(ValueError, match=f"buffer_size_hint: ranks_per_node={given}"):
        xm.buffer_size_hint(num_tokens=8, hidden=128, num_ranks=4, ranks_per_node=given)


@pytest.mark.parametrize(
    ("group", "per_node", "words"),
    [
        ([[0, 1], [2, 3], [4, 5], [6, 7]], 2, None),
        ([[0, 4], [1, 5], [2, 6], [3, 7]], 2, "ranks 0 and 1 .* processes 0 and 4, .*ranks_per_node=1"),
        ([[0, 4, 1, 5]], 1, None),
        ([[0, 1, 4, 5]], 4, "ranks 0 and 2 .* processes 0 and 4, .*nodes of 2 .* each 4 .*ranks_per_node=2"),
        ([[0, 1, 5, 4], [2, 3, 6, 7]], 2, None),
    ],
    ids=str,
)
def test_neighbours_share_a_node(group, per_node, words, monkeypatch):
    """Meshes are (dp=4, ep=2) and (ep=2, dp=4) over four nodes of two processes, and axes of four ranks; a process has
    one GPU."""
    monkeypatch.setattr(processes, "_domain", 2)
    with contextlib.nullcontext() if words is None else pytest.raises(ValueError, match=words):
        processes.check_neighbours(np.array(group), per_node)
    if words is not None:  # an exchange refuses `ranks_per_node`, too
        with pytest.raises(ValueError, match="order the mesh.*, or use KernelConfig.backend='reference'"):
            processes.check_neighbours(np.array(group), per_node, between_nodes=False)
