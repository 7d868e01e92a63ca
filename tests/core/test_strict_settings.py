"""The settings that careful users switch on: rank promotion is an error, and so is an implicit dtype promotion.

Every operation in every layout, wire and direction is traced and lowered under them. Other tests check the results,
which tracing does not show.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import xen_moe_jax as xm
from xen_moe_jax.experts import on_tpu

RANKS, T, H, K, E = 4, 8, 256, 2, 8
LAYOUTS = ("grouped", "ranked", "padded")


@pytest.fixture(autouse=True)
def strict():
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        yield


def lower(body, mesh, *, axis=("ep",), platforms=("cpu",), dtype=jnp.bfloat16):
    """Traces and lowers `body(x, topk_idx, topk_weights)` on every rank."""
    specs = P(axis)
    shapes = ((H, dtype), (K, jnp.int32), (K, jnp.float32))
    sharding = jax.NamedSharding(mesh, specs)
    arrays = [jax.ShapeDtypeStruct((mesh.size * T, n), dtype, sharding=sharding) for n, dtype in shapes]
    program = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=specs))
    return program.trace(*arrays).lower(lowering_platforms=platforms)


def layer(x, idx, weights, *, axis="ep", layout="grouped", **options):
    routed = xm.dispatch(x, idx, weights, num_experts=E, axis_name=axis, layout=layout, **options)
    rows = xm.redispatch(x, routed.handle)
    return xm.combine(routed.x + rows, routed.handle)


def gradients(body):
    def run(x, idx, weights):
        def loss(x, weights):
            return jnp.sum(body(x, idx, weights).astype(jnp.float32))

        return jax.grad(loss, (0, 1))(x, weights)

    return run


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("wire", [None, "float8_e4m3fn", "int8:ue8m0"])
def test_every_layout_and_wire_with_gradients(mesh4, layout, wire):
    def body(x, idx, weights):
        return layer(x, idx, weights, layout=layout, wire=wire)

    lower(body, mesh4)
    lower(gradients(body), mesh4)


@pytest.mark.parametrize(
    "options",
    [{"alignment": 8}, {"capacity": 5}, {"config": xm.KernelConfig(chunk_tokens=3)}, {"gradient_wire": "int8"}],
    ids=str,
)
def test_options_with_gradients(mesh4, options):
    def body(x, idx, weights):
        return layer(x, idx, weights, **options)

    lower(gradients(body), mesh4)


@pytest.mark.parametrize(("layout", "dtype"), list(itertools.product(LAYOUTS, (jnp.float32, jnp.float16))))
def test_other_dtypes_without_weights(mesh4, layout, dtype):
    lower(gradients(lambda x, idx, weights: layer(x, idx, None, layout=layout)), mesh4, dtype=dtype)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_inactive_ranks(mesh4, layout):
    def body(x, idx, weights):
        active = jnp.arange(RANKS) != idx[0, 0]
        return layer(x, idx, weights, layout=layout, active=active)

    lower(body, mesh4)
    lower(gradients(body), mesh4)


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("options", [{}, {"balance": "exact"}], ids=["placement", "exact"])
def test_placements(mesh4, options, x64):
    """The placement traced, as it is where it is an argument, and weights moved to its slots and back."""
    placement = xm.balance.plan([5, 1, 1, 1, 1, 1, 1, 1], RANKS, 3)

    def body(x, idx, weights):
        given = options or {"placement": jax.tree.map(jnp.asarray, placement)}
        routed = xm.dispatch(x, idx, weights, num_experts=E, axis_name="ep", **given)
        made = routed.handle.placement
        left = made.without(jnp.ones(RANKS, bool))
        moved = made.move(jnp.ones((2, 3), jnp.float16), None, left)
        return xm.combine(routed.x, routed.handle), made.reduce(moved), xm.balance.count(idx, E, idx[:, 0] >= 0)

    with jax.enable_x64(x64):
        lower(body, mesh4)
        lower(gradients(lambda *args: body(*args)[0]), mesh4)
        outside = jax.jit(
            lambda w, idx: (placement.reduce(placement.move(w, None, placement)), placement.route(idx, 1))
        )
        lowered = outside.lower(jnp.ones((8, 3), jnp.float16), jnp.ones((2, 2), jnp.int32))
        moved_back, slots = lowered.out_info
        assert moved_back.shape == (8, 3) and slots.dtype == jnp.int32


def test_two_axes(node_mesh):
    axis = ("node", "gpu")
    lower(gradients(lambda *a: layer(*a, axis=axis)), node_mesh, axis=axis)


def test_second_derivatives_and_forward_mode(mesh4):
    def body(x, idx, weights):
        def f(x, weights):
            return jnp.sum(jnp.sin(layer(x, idx, weights).astype(jnp.float32)))

        first = jax.jvp(f, (x, weights), (x, weights))[1]
        second = jax.grad(lambda x: jnp.sum(jax.grad(f)(x, weights).astype(jnp.float32)))(x)
        return first.reshape(1), second

    lower(body, mesh4)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_start_and_done(mesh4, layout):
    def body(x, idx, weights):
        flight = xm.dispatch_start(x, idx, weights, num_experts=E, axis_name="ep", layout=layout)
        routed = xm.dispatch_done(flight)
        return xm.combine_done(xm.combine_start(routed.x, routed.handle))

    lower(body, mesh4)
    lower(gradients(body), mesh4)


def test_block_scaled_rows_and_quantization(mesh4):
    def body(x, idx, weights):
        routed = xm.dispatch(xm.quantize(x), idx, weights, num_experts=E, axis_name="ep")
        rows = xm.dequantize(routed.x, dtype=jnp.bfloat16)
        return xm.combine(rows, routed.handle, wire="float8_e4m3fn")

    lower(body, mesh4)
    for dtype, scale_format in itertools.product(("float8_e4m3fn", "int8"), ("float32", "ue8m0")):
        jax.jit(lambda x, d=dtype, s=scale_format: xm.quantize(x, dtype=d, scale_format=s)).lower(jnp.ones((3, 200)))


@pytest.mark.parametrize("groups", [None, [[0, 1], [2, 3]]], ids=["all", "groups"])
def test_drop_ins_with_gradients(mesh4, groups):
    size = RANKS if groups is None else 2

    def body(x, idx, weights):
        x = xm.all_to_all(x, "ep", 0, 1, axis_index_groups=groups, tiled=True)
        x = x + jnp.sum(xm.all_gather(x, "ep", axis_index_groups=groups, wire=None if groups else "int8"), axis=0)
        x = x + jnp.mean(xm.all_gather_matmul(x, x.T, "ep"))
        sizes = jnp.ones(size, jnp.int32)
        arguments = sizes, sizes, sizes, sizes
        return xm.ragged_all_to_all(x, x, *arguments, axis_name="ep", axis_index_groups=groups)

    lower(body, mesh4)
    lower(gradients(body), mesh4)


def test_routers_and_layout_counts():
    @jax.jit
    def all_of_them(scores, bias, idx):
        xm.routing.top_k(scores, K)
        xm.routing.top_k(scores, K, score="sigmoid", bias=bias)
        xm.routing.group_limited_top_k(scores, K, num_groups=4, topk_groups=2, bias=bias)
        xm.get_dispatch_layout(idx, num_experts=E, num_ranks=4, ranks_per_node=2)

    all_of_them.lower(jnp.ones((T, E)), jnp.zeros(E), jnp.zeros((T, K), jnp.int32))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_tpu_program_too(mesh4, layout):
    """Kernels and the operations around them are lowered for a TPU, without one."""
    lower(gradients(lambda *a: layer(*a, layout=layout)), mesh4, platforms=("tpu",))


def exchanges(x, idx, weights):
    """The drop-ins; segments are int64, as `jnp.arange` and sums make them where `jax_enable_x64` is set."""
    x = xm.all_to_all(x, "ep", 0, 1, tiled=True)
    sizes = jnp.ones(RANKS, jnp.int64)
    return xm.ragged_all_to_all(x, x, *(sizes,) * 4, axis_name="ep")


def halves(x, idx, weights):
    flight = xm.dispatch_start(x, idx, weights, num_experts=E, axis_name="ep")
    routed = xm.dispatch_done(flight)
    return xm.combine_done(xm.combine_start(routed.x, routed.handle))


def wide(body):
    """`body` with experts and weights of 64 bits."""
    return lambda x, idx, weights: body(x, idx.astype(jnp.int64), weights.astype(jnp.float64))


@pytest.mark.parametrize(
    "body",
    [
        *(pytest.param(gradients(wide(functools.partial(layer, layout=layout))), id=layout) for layout in LAYOUTS),
        pytest.param(gradients(wide(halves)), id="halves"),
        pytest.param(lambda *a: layer(*a, config=xm.KernelConfig(mode="low_latency")), id="low_latency"),
        pytest.param(exchanges, id="drop-ins"),
    ],
)
def test_the_tpu_program_with_64_bits(mesh4, body):
    """Mosaic has no 64-bit numbers: none may come into a kernel, whatever `jax_enable_x64` says."""
    with jax.enable_x64(True):
        lower(body, mesh4, platforms=("tpu",))


PRODUCTS = {
    "all_gather_matmul": ("cpu", lambda x, w: xm.all_gather_matmul(x, w, "ep")),
    "experts": ("tpu", lambda x, w: on_tpu.products(x, [w[None]], jnp.array([x.shape[0]], jnp.int32))[0]),
}


@pytest.mark.parametrize("product", PRODUCTS)
def test_the_precision_of_the_code_that_multiplies(mesh4, product):
    """`jax.default_matmul_precision` holds for operations within its `with` statement, which ends before the lowering;
    and for their gradients, which are traced later, as for those of `jax.lax.dot_general`."""
    platform, multiply = PRODUCTS[product]

    def text(outside, inside):
        def body(x):
            with jax.default_matmul_precision(inside):
                out, back = jax.vjp(multiply, x, jnp.ones((H, H)))
            return out if platform == "tpu" else back(out)

        x = jax.ShapeDtypeStruct((RANKS * H, H), jnp.float32, sharding=jax.NamedSharding(mesh4, P("ep")))
        with jax.default_matmul_precision(outside):
            program = jax.jit(jax.shard_map(body, mesh=mesh4, in_specs=P("ep"), out_specs=P("ep")))
            return program.trace(x).lower(lowering_platforms=(platform,)).as_text()

    assert text(None, "highest") == text("highest", "highest") == text("bfloat16", "highest")
    assert text(None, None) != text("highest", "highest")
