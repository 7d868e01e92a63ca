"""The operations' declarations to JAX: primitives, lowerings, varying axes, meshes, export, caches."""

import collections
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import xen_moe_jax as xm
from tests.support.checks import assert_bits

RANKS, T, H, K, E = 4, 16, 128, 2, 8


def operands(tokens=RANKS * T, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((tokens, H)).astype(np.float32)
    idx = np.argsort(rng.random((tokens, E)), axis=1)[:, :K].astype(np.int32)
    return x, idx, rng.random((tokens, K)).astype(np.float32)


def layer(x, idx, weights, *, axis="ep", config=None, **options):
    """Experts that multiply by their number plus one: wrong routing gives a wrong sum."""
    routed = xm.dispatch(x, idx, weights, num_experts=E, axis_name=axis, config=config, **options)
    local = routed.group_sizes.shape[0]
    expert = jnp.repeat(jnp.arange(local), routed.group_sizes, total_repeat_length=routed.x.shape[0])
    y = routed.x * (1.0 + expert + local * jax.lax.axis_index(axis))[:, None].astype(routed.x.dtype)
    return xm.combine(y, routed.handle, config=config)


def dense(x, idx, weights):
    return x * np.sum(weights * (1.0 + idx), axis=1, keepdims=True)


def on(mesh, f, specs=None, **options):
    specs = P("ep") if specs is None else specs
    return jax.shard_map(f, mesh=mesh, in_specs=options.pop("in_specs", specs), out_specs=specs, **options)


def shapes(mesh, specs=None, tokens=RANKS * T):
    sharding = jax.NamedSharding(mesh, P("ep") if specs is None else specs)
    return [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding) for a in operands(tokens)]


def place(mesh, arrays, specs=None):
    return jax.device_put(arrays, jax.NamedSharding(mesh, P("ep") if specs is None else specs))


# -- primitives --------------------------------------------------------------------------------------------------------
def primitives(f, *args):
    return collections.Counter(re.findall(r"\bxen_moe_\w+", str(jax.make_jaxpr(f)(*args))))


def test_jaxprs_name_the_operations(mesh4):
    def every(x, idx, weights):
        routed = xm.dispatch(x, idx, weights, num_experts=E, axis_name="ep")
        rows = xm.redispatch(x, routed.handle)
        sizes = jnp.ones(RANKS, jnp.int32)
        exchanged = xm.all_to_all(x, "ep", 0, 0, tiled=True)
        exchanged = xm.ragged_all_to_all(exchanged, exchanged, sizes, sizes, sizes, sizes, axis_name="ep")
        gathered = xm.all_gather(x, "ep"), xm.all_gather_matmul(x, x.T, "ep")
        return xm.combine(routed.x + rows, routed.handle), exchanged, gathered

    found = primitives(on(mesh4, every), *shapes(mesh4))
    names = "dispatch", "combine", "redispatch", "all_to_all", "ragged_all_to_all", "all_gather", "all_gather_matmul"
    for name in names:
        assert found[f"xen_moe_{name}"] == 1, found


def test_backward_pass_does_no_layout_work(mesh4):
    """One dispatch and one combine forward; backward a redispatch (of combine) and a combine (of dispatch)."""
    program = on(mesh4, layer)
    grad = jax.grad(lambda x, idx, w: jnp.sum(program(x, idx, w)))
    found = primitives(grad, *shapes(mesh4))
    assert found["xen_moe_dispatch"] == 1
    assert found["xen_moe_combine"] == 2
    assert found["xen_moe_redispatch"] == 1


# -- lowering ----------------------------------------------------------------------------------------------------------
def collectives(text: str) -> dict[str, int]:
    """Collectives of a StableHLO or HLO text."""
    names = "all_to_all|all_gather|all_reduce|reduce_scatter|collective_permute|collective_broadcast"
    stable = re.findall(rf"stablehlo\.({names})\b", text)
    compiled = re.findall(rf"= [^=]*? ({names.replace('_', '-')})(?:-start)?\(", text)
    return dict(collections.Counter([*stable, *[name.replace("-", "_") for name in compiled]]))


OPERATIONS = {
    "dispatch": (
        lambda x, i, w: xm.dispatch(x, i, w, num_experts=E, axis_name="ep").x,
        {"all_gather": 1, "all_to_all": 1},  # metadata; rows
    ),
    "combine": (
        lambda x, i, w: xm.combine(x, handle_of(i)),
        {"all_to_all": 1, "all_reduce": 1},  # partial sums; the number of rounds
    ),
    "redispatch": (
        lambda x, i, w: xm.redispatch(x, handle_of(i)),
        {"all_to_all": 1, "all_reduce": 1},
    ),
    "all_to_all": (lambda x, i, w: xm.all_to_all(x, "ep", 0, 0, tiled=True), {"all_to_all": 1}),
    "all_gather": (lambda x, i, w: xm.all_gather(x, "ep"), {"all_gather": 1}),
    "all_gather through a wire": (lambda x, i, w: xm.all_gather(x, "ep", wire="int8"), {"all_gather": 1}),
    "all_gather_matmul": (lambda x, i, w: xm.all_gather_matmul(x, x.T, "ep"), {"all_gather": 1}),
}


def handle_of(idx):
    """A handle that costs no dispatch: every row is somewhere, where does not matter."""
    from xen_moe_jax._spec import Spec

    spec = Spec(("ep",), (RANKS,), num_experts=E, num_tokens=T, top_k=K, layout="grouped", capacity=T)
    positions = jnp.broadcast_to(idx[None] * 0, (RANKS, T, K))
    counts = positions[:, : E // RANKS, 0]
    return xm.Handle(idx, positions, counts, jnp.ones(T) + 0 * idx[:, 0], spec)


@pytest.mark.parametrize("name", OPERATIONS)
def test_cpu_lowering_holds_only_the_expected_collectives(mesh4, name):
    body, expected = OPERATIONS[name]
    lowered = jax.jit(on(mesh4, body)).lower(*shapes(mesh4))
    assert collectives(lowered.as_text()) == expected
    assert collectives(lowered.compile().as_text()) == expected, "XLA added or removed collectives"


def test_compiled_layer_on_three_axes_has_no_collective_on_the_others(dp_tp_mesh):
    """dp x ep x tp: the compiled program talks along "ep" only; nothing was gathered on the way in or out."""
    specs = P(("dp", "ep"))
    program = jax.jit(on(dp_tp_mesh, layer, specs))
    text = program.lower(*shapes(dp_tp_mesh, specs)).compile().as_text()
    assert collectives(text) == {"all_gather": 1, "all_to_all": 2, "all_reduce": 1}
    groups = re.findall(r"replica_groups=(.*?), ", text)
    assert len(groups) == 4
    # devices are numbered dp-major, tp-minor: the peer of device 0 along "ep" is device 2
    same = {"mesh['dp'=2,'ep'=2,'tp'=2] {'ep'}", "{{0,2},{1,3},{4,6},{5,7}}", "[4,2]<=[2,2,2]T(0,2,1)"}
    assert set(groups) <= same, groups


def lowered_for(platform, f, args):
    """StableHLO for another platform, on this machine; skips where the backend is not built."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            text = jax.jit(f).trace(*args).lower(lowering_platforms=(platform,)).as_text()
        except ModuleNotFoundError as missing:
            pytest.skip(f"no {platform} backend in this installation: {missing}")
    for warning in caught:
        if "plain JAX instead of" in str(warning.message):
            pytest.skip(str(warning.message))
    return text


def test_lowering_for_tpu_on_this_machine(mesh4):
    text = lowered_for("tpu", on(mesh4, layer), shapes(mesh4))
    assert "tpu_custom_call" in text
    # only counts travel by XLA's collectives: rows go by the kernels' own DMA
    wide = [line for line in text.splitlines() if "stablehlo.all_" in line and f"x{H}x" in line]
    assert not wide, wide


def test_lowering_for_cuda_on_this_machine(mesh4):
    text = lowered_for("cuda", on(mesh4, layer), shapes(mesh4))
    assert re.search(r"custom_call @xen_moe\w*", text), "no call of the CUDA kernels"
    assert not collectives(text), "the CUDA backend needs no collective of XLA"


def test_a_custom_call_of_the_reference_does_not_exist(mesh4):
    """The reference is plain JAX: `config` may ask for it on every platform."""
    config = xm.KernelConfig(backend="reference")
    for platform in ("cpu", "tpu", "cuda"):
        program = on(mesh4, lambda x, i, w: layer(x, i, w, config=config))
        text = jax.jit(program).trace(*shapes(mesh4)).lower(lowering_platforms=(platform,)).as_text()
        assert "xen_moe" not in re.sub(r'loc\(.*|"[^"]*"', "", text) and "tpu_custom_call" not in text


# -- varying manual axes -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("replicated", [False, True], ids=["sharded", "replicated"])
def test_unsound_out_specs_fail(mesh4, replicated):
    """Results differ from rank to rank, even when every operand is the same on all: `out_specs=P()` is a lie."""
    in_specs = P() if replicated else P("ep")

    def body(x, idx, weights):
        routed = xm.dispatch(x, idx, weights, num_experts=E, axis_name="ep")
        return {"rows": routed.x, "positions": routed.handle.positions, "sizes": routed.group_sizes}

    args = place(mesh4, operands(), in_specs)
    for lie in ("rows", "positions", "sizes"):
        program = jax.shard_map(
            lambda *a, lie=lie: body(*a)[lie], mesh=mesh4, in_specs=in_specs, out_specs=P(), check_vma=True
        )
        with pytest.raises(ValueError, match="out_specs"):
            jax.eval_shape(program, *args)
    jax.eval_shape(jax.shard_map(body, mesh=mesh4, in_specs=in_specs, out_specs=P("ep"), check_vma=True), *args)


def test_combine_and_drop_ins_vary(mesh4):
    args = place(mesh4, operands(T), P())
    ones = jnp.ones(RANKS, jnp.int32)
    for body in (
        lambda x, i, w: xm.combine(x, handle_of(i)),
        lambda x, i, w: xm.redispatch(x, handle_of(i)),
        lambda x, i, w: xm.all_to_all(x, "ep", 0, 0, tiled=True),
        lambda x, i, w: xm.ragged_all_to_all(x, x, ones, ones, ones, ones, axis_name="ep"),
        lambda x, i, w: xm.all_gather(x, "ep"),
        lambda x, i, w: xm.all_gather_matmul(x, x.T, "ep"),
    ):
        with pytest.raises(ValueError, match="out_specs"):
            jax.eval_shape(jax.shard_map(body, mesh=mesh4, in_specs=P(), out_specs=P()), *args)


def test_replicated_tokens_have_a_summed_gradient(mesh4):
    """Every rank sends the same tokens: the gradient of the one array is the sum over ranks."""
    x, idx, weights = operands(T)

    def loss(x, idx, weights):
        return jax.lax.psum(jnp.sum(layer(x, idx, weights)), "ep")

    program = jax.shard_map(loss, mesh=mesh4, in_specs=P(), out_specs=P())
    dx = jax.jit(jax.grad(program))(*place(mesh4, (x, idx, weights), P()))
    expected = RANKS * np.sum(weights * (1.0 + idx), axis=1, keepdims=True)
    np.testing.assert_allclose(dx, np.broadcast_to(expected, x.shape), rtol=1e-5)


@pytest.mark.optimized
def test_without_the_check_the_result_is_the_same(mesh4):
    args = place(mesh4, operands())
    checked = jax.jit(on(mesh4, layer))(*args)
    unchecked = jax.jit(on(mesh4, layer, check_vma=False))(*args)
    assert_bits(unchecked, np.asarray(checked), "check_vma=False")


# -- meshes ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_both_kinds_of_mesh_axes(axis_type):
    mesh = jax.make_mesh((RANKS,), ("ep",), devices=jax.devices()[:RANKS], axis_types=(axis_type,))
    arrays = operands()
    program = on(mesh, layer)
    out = jax.jit(program)(*place(mesh, arrays))
    np.testing.assert_allclose(out, dense(*arrays), rtol=1e-5)
    dx = jax.jit(jax.grad(lambda *a: jnp.sum(program(*a))))(*place(mesh, arrays))
    np.testing.assert_allclose(dx, np.broadcast_to(dense(1.0, *arrays[1:]), dx.shape), rtol=1e-5)


@pytest.mark.parametrize(
    ("sizes", "names"),
    [((2, 4), ("dp", "ep")), ((4, 2), ("ep", "tp")), ((2, 2, 2), ("dp", "ep", "tp"))],
    ids=lambda value: "x".join(map(str, value)),
)
def test_expert_axis_among_others(sizes, names):
    """Different tokens on every data-parallel row; the same tokens along "tp", which keeps them replicated."""
    mesh = jax.make_mesh(sizes, names, devices=jax.devices()[:8])
    specs = P(tuple(name for name in names if name != "tp"))
    arrays = operands(8 * T, seed=1)
    out = jax.jit(on(mesh, layer, specs))(*place(mesh, arrays, specs))
    np.testing.assert_allclose(out, dense(*arrays), rtol=1e-5)


def test_ranks_of_one_axis_may_differ_in_the_number_of_rounds(dp_mesh):
    """One data-parallel row sends everything to one rank, the other row nothing: neither may wait for the other."""
    x, idx, weights = operands(8 * T, seed=2)
    idx[: 4 * T] = E - 1
    idx[4 * T :] = -1
    specs = P(("dp", "ep"))
    out = jax.jit(on(dp_mesh, layer, specs))(*place(dp_mesh, (x, idx, weights), specs))
    np.testing.assert_allclose(out, dense(x, idx, weights * (idx >= 0)), rtol=1e-5)


def test_two_axes_of_three(dp_tp_mesh):
    """`axis_name` is a pair, a third mesh axis carries data parallelism."""
    mesh = dp_tp_mesh
    specs = P(("dp", "ep", "tp"))

    def body(x, idx, weights):
        routed = xm.dispatch(x, idx, weights, num_experts=E, axis_name=("ep", "tp"))
        return xm.combine(routed.x, routed.handle)

    x, idx, weights = operands(8 * T, seed=3)
    out = jax.jit(on(mesh, body, specs))(*place(mesh, (x, idx, weights), specs))
    np.testing.assert_allclose(out, x * weights.sum(1, keepdims=True), rtol=1e-5)


@pytest.mark.parametrize("sharding", [None, P("ep", "dp"), P(("ep", "dp"))], ids=["Auto", "hidden", "tokens"])
def test_partial_manual_shard_map(sharding):
    """Only "ep" is manual; "dp" is left to the partitioner, or is an explicit axis over which tokens are sharded."""
    axis_type = AxisType.Auto if sharding is None else AxisType.Explicit
    mesh = jax.make_mesh((2, 4), ("dp", "ep"), axis_types=(axis_type,) * 2)
    arrays = operands()
    x, idx, weights = (jax.device_put(a, jax.NamedSharding(mesh, sharding or P("ep"))) for a in arrays)
    program = jax.shard_map(layer, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"), axis_names={"ep"})
    np.testing.assert_allclose(jax.jit(program)(x, idx, weights), dense(*arrays), rtol=1e-5)

    def moved(x):
        segments = np.arange(RANKS, dtype=np.int32), np.ones(RANKS, np.int32)
        x = xm.all_to_all(x, "ep", 0, 0, tiled=True)
        return xm.ragged_all_to_all(x, jnp.zeros_like(x), *segments * 2, axis_name="ep")

    with jax.set_mesh(mesh):
        by_x = jax.jit(jax.grad(lambda *a: jnp.sum(program(*a))))(x, idx, weights)
        exchanged = jax.jit(jax.shard_map(moved, in_specs=P("ep"), out_specs=P("ep"), axis_names={"ep"}))
        there, by_moved = jax.jit(jax.value_and_grad(lambda x: jnp.sum(exchanged(x) ** 2)))(x)
    np.testing.assert_allclose(by_x, np.broadcast_to(dense(1.0, *arrays[1:]), x.shape), rtol=1e-5)
    assert there > 0 and by_moved.shape == x.shape and jax.typeof(by_moved).sharding == jax.typeof(x).sharding


# -- data that passes between programs ---------------------------------------------------------------------------------
def test_handle_is_plain_data(mesh4):
    """`Routed` leaves one jitted program and enters another, through flatten and unflatten, as a scan carry too."""
    arrays = operands()
    specs = P("ep")
    stack = jax.jit(on(mesh4, lambda *a: stacked(xm.dispatch(*a, num_experts=E, axis_name="ep")), specs))
    routed = stack(*place(mesh4, arrays))
    leaves, tree = jax.tree.flatten(routed)
    routed = jax.tree.unflatten(tree, [leaf + 0 for leaf in leaves])
    assert hash(tree) == hash(jax.tree.structure(routed))

    def many_combines(routed):
        routed = jax.tree.map(lambda a: a[0], routed)

        def step(carry, _):
            y, handle = carry
            out = xm.combine(y, handle)
            return (y * 2, handle), out

        return jax.lax.scan(step, (routed.x, routed.handle), None, length=2)[1][1][None]

    out = jax.jit(on(mesh4, many_combines, specs))(routed)
    x, _, weights = arrays
    np.testing.assert_allclose(out.reshape(x.shape), 2 * x * weights.sum(1, keepdims=True), rtol=1e-5)


def stacked(tree):
    return jax.tree.map(lambda a: a[None], tree)


def test_export_round_trip(mesh4):
    """A layer, and a dispatch whose `Routed` crosses the boundary of an exported program, static fields included."""
    args = place(mesh4, operands())
    program = jax.jit(on(mesh4, layer))
    blob = jax.export.export(program)(*shapes(mesh4)).serialize()
    assert_bits(jax.export.deserialize(blob).call(*args), np.asarray(program(*args)), "exported layer")

    program = jax.jit(on(mesh4, lambda *a: stacked(xm.dispatch(*a, num_experts=E, axis_name="ep"))))
    blob = jax.export.export(program)(*shapes(mesh4)).serialize()
    exported, direct = jax.export.deserialize(blob).call(*args), program(*args)
    assert exported.handle.spec == direct.handle.spec
    jax.tree.map(lambda a, b: assert_bits(a, np.asarray(b), "exported Routed"), exported, direct)


def test_every_pytree_of_the_public_api_is_serialized():
    """Quantized weights are arguments of a program that serves, a layer's metrics are its results."""
    weight, idx = jnp.ones((2, 128, 64), jnp.bfloat16), jnp.zeros((4, 2), jnp.int32)
    codes = xm.quantize_weights(weight)
    for value in (
        xm.quantize(weight),
        xm.get_dispatch_layout(idx, num_experts=4, num_ranks=2),
        xm.balance.home(4, 2),
        xm.QuantizedWeight(jnp.ones((2, 64, 8), jnp.uint8), jnp.ones((2, 4, 8), jnp.uint8), (32, 1)),
        codes,
        codes.of(weight),
        xm.MoEMLPInfo(idx[0], idx[0, 0]),
        xm.flax.MoEMetrics(weight[0, 0, 0], idx[0], idx[0, 0]),
    ):
        given = jax.tree.map(jnp.asarray, value)
        blob = jax.export.export(jax.jit(lambda given: (given,)))(given).serialize()
        (found,) = jax.export.deserialize(blob).call(given)
        assert jax.tree.structure(found) == jax.tree.structure(given)


# -- caches ------------------------------------------------------------------------------------------------------------
def test_equal_configs_share_a_program(mesh4):
    traces = []

    def f(x, idx, weights, config):
        traces.append(config)
        return on(mesh4, lambda *a: layer(*a, config=config))(x, idx, weights)

    program = jax.jit(f, static_argnames="config")
    args = place(mesh4, operands())
    for config in (xm.KernelConfig(chunk_tokens=4), xm.KernelConfig(chunk_tokens=4), None, None):
        program(*args, config=config)
    assert len(traces) == 2
    assert xm.KernelConfig(chunk_tokens=4) == xm.KernelConfig(chunk_tokens=4) != xm.KernelConfig(chunk_tokens=8)
    assert len({xm.KernelConfig(), xm.KernelConfig(), xm.KernelConfig(channel=1)}) == 2


@pytest.mark.optimized
def test_config_never_changes_the_result(mesh4):
    args = place(mesh4, operands())
    expected = np.asarray(jax.jit(on(mesh4, layer))(*args))
    for config in (xm.KernelConfig(chunk_tokens=1), xm.KernelConfig(chunk_tokens=64, channel=3, num_sms=8)):
        out = jax.jit(on(mesh4, lambda *a, config=config: layer(*a, config=config)))(*args)
        assert_bits(out, expected, f"{config}")


def test_environment_is_not_read_at_trace_time(mesh4, monkeypatch):
    """Two traces of one program are the same text, independent of the environment's variables."""
    first = jax.jit(on(mesh4, layer)).lower(*shapes(mesh4)).as_text()
    for name in ("XEN_MOE_BACKEND", "XEN_MOE_MODE", "XEN_MOE_NUM_SMS", "XEN_MOE_CHANNEL", "XEN_MOE_CUDA"):
        monkeypatch.setenv(name, "7")
    jax.clear_caches()
    assert jax.jit(on(mesh4, layer)).lower(*shapes(mesh4)).as_text() == first
