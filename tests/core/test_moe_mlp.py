"""`xm.moe_mlp`: the bits of its parts, written out here; derivatives, remat, export, errors."""

import collections
import contextlib
import dataclasses
import functools
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import xen_moe_jax as xm
from tests.support import plain_hopper
from tests.support.checks import assert_bits
from xen_moe_jax import _moe_mlp
from xen_moe_jax._config import RowsInHalves
from xen_moe_jax._quantized_weight import adopted
from xen_moe_jax.experts import combined

RANKS, TOKENS, HIDDEN, WIDE, EXPERTS, TOP_K = 4, 6, 32, 64, 6, 3
LOCAL = -(-EXPERTS // RANKS)
RANKED = P("ep")
PROJECTIONS = {"gelu": 1, "relu2": 1}


@dataclasses.dataclass(frozen=True)
class Case:
    """One call: options that dispatch shares, and those of the experts."""

    activation: str = "swiglu"
    biased: bool = False
    dtype: str = "float32"
    token_dims: tuple[int, ...] = (TOKENS,)
    dispatch: tuple = ()
    combine: tuple = ()
    active: bool = False

    @property
    def gated(self):
        return PROJECTIONS.get(self.activation, 2) == 2


CASES = {
    "drops": Case(dispatch=(("capacity", 9), ("drop", "weight"), ("alignment", 2))),
    "biases, wires, [B, S, H]": Case(
        "clipped_swiglu",
        biased=True,
        token_dims=(2, 3),
        dispatch=(("wire", "float8_e4m3fn"),),
        combine=(("wire", "int8"),),
    ),
    "one projection, inactive rank": Case("relu2", biased=True, active=True),
    "padded, bfloat16": Case(dtype="bfloat16", dispatch=(("layout", "padded"),)),
    "gelu": Case("gelu"),
    "geglu": Case("geglu"),
}


def operands(case, seed=0, hidden=HIDDEN, wide=WIDE):
    """x, idx (unused slots and a duplicate among them), weights, and the experts' arrays by name."""
    rng = np.random.default_rng(seed)
    tokens = (RANKS * case.token_dims[0], *case.token_dims[1:])
    idx = rng.integers(-1, EXPERTS + 1, (*tokens, TOP_K)).astype(np.int32)
    weights = rng.uniform(0.1, 1, idx.shape).astype(np.float32)
    shapes = {"up": (hidden, wide), "down": (wide, hidden)} | ({"gate": (hidden, wide)} if case.gated else {})
    shapes |= {f"{name}_bias": shape[1:] for name, shape in shapes.items()} if case.biased else {}
    experts = {
        name: (rng.standard_normal((RANKS * LOCAL, *shape)) / np.sqrt(shape[0])).astype(case.dtype)
        for name, shape in shapes.items()
    }
    return rng.standard_normal((*tokens, hidden)).astype(case.dtype), idx, weights, experts


def who(case):
    return jnp.arange(RANKS) != 2 if case.active else None


def call(case, x, idx, weights, experts, **options):
    names = ("gate", "up", "down")
    arrays = [experts.get(name) for name in names]
    biases = tuple(experts.get(f"{name}_bias") for name in names) if case.biased else None
    given = {"combine_wire": dict(case.combine).get("wire"), "active": who(case), "activation": case.activation}
    return xm.moe_mlp(
        x,
        idx,
        weights,
        *arrays,
        num_experts=EXPERTS,
        axis_name="ep",
        biases=biases,
        **given | dict(case.dispatch) | options,
    )


def activated(case, gate, up):
    if case.activation == "swiglu":
        return jax.nn.silu(gate) * up
    if case.activation == "relu2":
        return jnp.square(jax.nn.relu(up))
    if case.activation == "clipped_swiglu":
        gate, up = jnp.minimum(gate, 7.0), jnp.clip(up, -7.0, 7.0)
        return gate * jax.nn.sigmoid(1.702 * gate) * (up + 1)
    gelu = functools.partial(jax.nn.gelu, approximate=False)
    return gelu(up) if gate is None else gelu(gate) * up


def written_out(case, x, idx, weights, experts):
    """Computes the layer by the public operations; each row gets the bias of its expert."""
    routed = xm.dispatch(x, idx, weights, num_experts=EXPERTS, axis_name="ep", active=who(case), **dict(case.dispatch))
    rows = routed.x
    if padded := rows.ndim == 3:
        used = jnp.arange(rows.shape[1])[None] < routed.num_tokens_per_expert[:, None]
        rows = jnp.where(used[..., None], rows, 0)

    def project(rows, name):
        if padded:
            return jnp.einsum("lma,lab->lmb", rows, experts[name])
        out = jax.lax.ragged_dot(rows, experts[name], routed.group_sizes)
        if not case.biased:
            return out
        mine = routed.expert_ids()[:, None] == jnp.arange(LOCAL)
        return out + jnp.where(mine.any(1, keepdims=True), mine.astype(out.dtype) @ experts[f"{name}_bias"], 0)

    inner = activated(case, project(rows, "gate") if case.gated else None, project(rows, "up"))
    out = xm.combine(project(inner, "down"), routed.handle, **dict(case.combine))
    return out, xm.MoEMLPInfo(routed.num_tokens_per_expert, routed.num_dropped)


def on_ranks(mesh, body):
    """`body(x, idx, weights, experts) -> (out, info)` on every rank; the counts of the ranks stand side by side."""

    def stacked(*arrays):
        out, info = body(*arrays)
        return out, jax.tree.map(jnp.atleast_1d, info)

    return jax.shard_map(stacked, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))


def place(mesh, arrays, specs=RANKED):
    shardings = jax.tree.map(lambda spec: jax.NamedSharding(mesh, spec), specs, is_leaf=lambda s: isinstance(s, P))
    return jax.device_put(arrays, shardings)


def values_and_gradients(mesh, body, arrays):
    x, idx, weights, experts = place(mesh, arrays)

    def loss(x, weights, experts):
        out, info = on_ranks(mesh, body)(x, idx, weights, experts)
        return jnp.sum(jnp.sin(out.astype(jnp.float32))), (out, info)

    (_, results), gradients = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(x, weights, experts)
    return results, gradients


def dense(case, x, idx, weights, experts):
    """Every expert on every token, without ranks, in the dtype of `x`."""
    every = []
    for expert in range(EXPERTS):
        of = {name: array[expert] for name, array in experts.items()}
        inner = activated(case, *(x @ of[n] + of.get(f"{n}_bias", 0) if n in of else None for n in ("gate", "up")))
        every.append(inner @ of["down"] + of.get("down_bias", 0))
    share = jnp.sum(jax.nn.one_hot(idx, EXPERTS, dtype=x.dtype) * weights[..., None], axis=-2)
    return jnp.einsum("...e,e...h->...h", share, jnp.stack(every), precision="highest")


def assert_near(actual, expected, tolerance):
    def check(a, e):
        np.testing.assert_allclose(np.asarray(a), np.asarray(e), rtol=tolerance, atol=tolerance * np.abs(e).max())

    jax.tree.map(check, actual, expected)


@pytest.mark.parametrize("name", CASES)
def test_is_the_composition(name, mesh4):
    """Values, counts and gradients are those of the operations written out, bit for bit."""
    case = CASES[name]
    given = operands(case)
    ours = values_and_gradients(mesh4, functools.partial(call, case, return_info=True), given)
    theirs = values_and_gradients(mesh4, functools.partial(written_out, case), given)
    (out, info), _ = ours
    assert np.asarray(out).any() and (int(info.num_dropped.sum()) > 0) == (name == "drops" or case.active)
    if case.activation in ("gelu", "geglu"):  # their derivative rule is the library's own
        return assert_near(ours, theirs, 2e-6)
    jax.tree.map(lambda a, b: assert_bits(a, np.asarray(b), name), ours, theirs)
    return None


@pytest.mark.parametrize("kernels", [False, True], ids=["composition", "as on Hopper"])
@pytest.mark.parametrize("biased", [False, True], ids=["", "biases"])
def test_gradients_equal_float64(kernels, biased, mesh4):
    """Also those that the fused backward pass has on a Hopper GPU, where rows past the last group are NaN."""
    case = Case("clipped_swiglu" if biased else "swiglu", biased)
    x, idx, weights, experts = operands(case)
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        exact = jax.tree.map(lambda a: jnp.asarray(a, jnp.float64), (x, weights, experts))

        def loss(x, weights, experts):
            return jnp.sum(jnp.sin(dense(case, x, idx, weights, experts)))

        expected = jax.tree.map(np.asarray, jax.jit(jax.grad(loss, (0, 1, 2)))(*exact))
    with plain_hopper.in_the_kernels_place() if kernels else jax.default_matmul_precision("highest"):
        body = functools.partial(call, case, return_info=True)
        _, actual = values_and_gradients(mesh4, body, (x, idx, weights, experts))
    assert_near(actual, expected, 3e-6)


def kept(mesh, body, given):
    """Shapes of the arrays that the backward pass keeps on a rank, and how many of each."""

    def shapes(x, idx, weights, experts):
        out, pull = jax.vjp(lambda x, weights, experts: body(x, idx, weights, experts)[0], x, weights, experts)
        found.update(leaf.shape for leaf in jax.tree.leaves(pull))
        return out

    found = collections.Counter()
    program = jax.shard_map(shapes, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))
    jax.eval_shape(program, *place(mesh, given))
    return found


def test_the_kernels_keep_no_outputs_of_experts(mesh4):
    case, hidden = Case(dispatch=(("capacity", 16),)), 128  # sizes that the kernels do not pad
    given = operands(case, hidden=hidden, wide=192)
    body = functools.partial(call, case, return_info=True)
    plain = kept(mesh4, body, given)
    with plain_hopper.in_the_kernels_place():
        fused = kept(mesh4, body, given)
    assert (plain[16, hidden], fused[16, hidden]) == (2, 1)  # received rows, and the experts' output
    assert (plain[16, 192], fused[16, 192]) == (3, 2)  # two projections, and the activation


def test_forward_mode_and_second_derivatives(mesh4):
    """Products of a Hessian and a vector, by forward and by reverse over reverse mode, against the dense model."""
    case = Case()
    x, idx, weights, experts = operands(case)
    layer = on_ranks(mesh4, functools.partial(call, case, grouped_matmul="ragged_dot", return_info=True))
    rng = np.random.default_rng(3)
    point = x, experts
    direction = jax.tree.map(lambda a: rng.standard_normal(a.shape).astype(np.float32), point)
    given = point, direction, idx, weights

    def product(moe, at, direction, idx, weights):
        def loss(at):
            return jnp.sum(jnp.sin(moe(at[0], idx, weights, at[1])))

        def slope(at):
            parts = jax.tree.map(lambda g, d: jnp.sum(g * d), jax.grad(loss)(at), direction)
            return sum(jax.tree.leaves(parts))

        return jax.jvp(jax.grad(loss), (at,), (direction,)), jax.grad(slope)(at)

    with jax.default_matmul_precision("highest"):
        ours = jax.jit(functools.partial(product, lambda *a: layer(*a)[0]))(*place(mesh4, given))
        expected = jax.jit(functools.partial(product, functools.partial(dense, case)))(*given)
    assert_near(ours, expected, 2e-5)


@pytest.mark.parametrize("where", ["rows", "activation", "input"])
def test_the_kernels_have_no_second_derivative(where, mesh4):
    x, idx, weights, experts = operands(Case())
    layer = on_ranks(mesh4, functools.partial(call, Case(), apply_weights_to=where, return_info=True))

    def first(x, *others):
        return jnp.sum(jax.grad(lambda x: jnp.sum(jnp.sin(layer(x, *others)[0])))(x))

    with plain_hopper.in_the_kernels_place(), pytest.raises(NotImplementedError, match="grouped_matmul='ragged_dot'"):
        jax.eval_shape(jax.grad(first), *place(mesh4, (x, idx, weights, experts)))


def test_vmap_is_a_loop_of_calls(mesh4):
    case = Case()
    x, idx, weights, experts = operands(case)
    both = np.stack([x, operands(case, seed=5)[0]])

    def mapped(x, idx, weights, experts):
        return jax.vmap(lambda x: call(case, x, idx, weights, experts))(x)

    specs = (P(None, "ep"), P("ep"), P("ep"), P("ep"))
    program = jax.jit(jax.shard_map(mapped, mesh=mesh4, in_specs=specs, out_specs=P(None, "ep")))
    out = program(*place(mesh4, (both, idx, weights, experts), specs))
    one = jax.jit(on_ranks(mesh4, functools.partial(call, case, return_info=True)))
    for entry, x in zip(out, both, strict=True):
        assert_bits(entry, np.asarray(one(*place(mesh4, (x, idx, weights, experts)))[0]), "entry")


@pytest.mark.parametrize("kernels", [False, True], ids=["composition", "as on Hopper"])
def test_remat_by_name_does_not_dispatch_again(kernels, mesh4):
    given = operands(Case())
    with plain_hopper.in_the_kernels_place() if kernels else jax.default_matmul_precision("highest"):
        counts = []
        for names in ((), ("xen_moe_rows", "xen_moe_handle")):
            policy = jax.checkpoint_policies.save_only_these_names(*names)
            layer = jax.checkpoint(functools.partial(call, Case(), return_info=True), policy=policy)
            text = str(jax.make_jaxpr(functools.partial(values_and_gradients, mesh4, layer))(given))
            counts.append(text.count("xen_moe_dispatch["))
    assert counts == [2, 1]


def test_export(mesh4):
    case = CASES["drops"]
    program = jax.jit(on_ranks(mesh4, functools.partial(call, case, return_info=True)))
    given = place(mesh4, operands(case))
    exported = jax.export.deserialize(jax.export.export(program)(*given).serialize())
    jax.tree.map(lambda a, b: assert_bits(a, np.asarray(b), "exported"), exported.call(*given), program(*given))


@pytest.mark.parametrize(
    "options",
    [{}, {"layout": "padded"}, {"experts": "float8_e4m3fn", "wire": "float8_e4m3fn"}],
    ids=["grouped", "padded", "fp8, as it arrived"],
)
def test_beside_an_explicit_axis(options, mesh4):
    """Tokens and experts are sharded over an explicit axis. JAX has no ragged dot there."""
    mesh = jax.make_mesh((RANKS, 2), ("ep", "tp"))
    columns, rows = P("ep", None, "tp"), P("ep", "tp")
    specs = P("ep", "tp"), RANKED, RANKED, {"gate": columns, "up": columns, "down": rows}
    given = operands(Case())

    def loss(x, idx, weights, arrays):
        def of(x, weights, arrays):
            given = {"num_experts": EXPERTS, "axis_name": "ep"} | options
            return jnp.sum(xm.moe_mlp(x, idx, weights, **arrays, **given) ** 2)

        return jax.value_and_grad(of, (0, 1, 2))(x, weights, arrays)[1]

    def gradients(mesh):
        return jax.jit(jax.shard_map(loss, mesh=mesh, in_specs=RANKED, out_specs=RANKED, axis_names={"ep"}))

    found, expected = gradients(mesh)(*place(mesh, given, specs)), gradients(mesh4)(*place(mesh4, given))
    jax.tree.map(lambda a, b: assert_near(a, np.asarray(b), 1e-5), found, expected)


@pytest.mark.parametrize("layout", ["grouped", "padded"])
def test_replicated_tokens(layout, mesh4):
    case = Case()
    x, idx, weights, experts = operands(case)
    body = functools.partial(call, case, replicated=True, layout=layout)
    specs = (P(), P(), P(), P("ep"))
    with jax.default_matmul_precision("highest"):
        program = jax.jit(jax.shard_map(body, mesh=mesh4, in_specs=specs, out_specs=P()))
        out = program(*place(mesh4, (x, idx, weights, experts), specs))
        assert_near(out, dense(case, x, idx, weights, experts), 2e-6)


@pytest.mark.parametrize("kernels", [False, True], ids=["composition", "as on Hopper"])
@pytest.mark.parametrize("how", ["placement", "exact"])
def test_the_result_does_not_depend_on_where_experts_are(how, kernels, mesh4):
    """Expert 0, which most tokens name, is on two ranks; or a placement is computed for the batch. Other groups of rows
    give `ragged_dot` other sums on a CPU."""
    case = Case()
    x, idx, weights, experts = operands(case)
    idx[:, 0] = 0
    placement = xm.balance.plan(np.bincount(idx[idx >= 0], minlength=EXPERTS + 1)[:EXPERTS], RANKS, 3)

    def moved(x, idx, weights, experts):
        there = placement.move(experts, None, placement, axis_name="ep")
        return call(case, x, idx, weights, there, placement=placement, return_info=True)

    exact = functools.partial(call, case, balance="exact", return_info=True)
    given = x, idx, weights, experts
    with plain_hopper.in_the_kernels_place() if kernels else contextlib.nullcontext():
        (out, info), gradients = values_and_gradients(mesh4, exact if how == "exact" else moved, given)
        (expected, _), at_home = values_and_gradients(mesh4, functools.partial(call, case, return_info=True), given)
    assert_near(out, expected, 2e-6)
    assert int(info.num_dropped.sum()) == 0
    assert_near(gradients, at_home, 2e-6)


def test_quantized_weights(mesh4):
    """They are widened where they are multiplied by, and have no gradient; other arguments have."""
    case = Case()
    x, idx, weights, experts = operands(case)
    scaled = {name: (array * 8).astype(jnp.float8_e4m3fn) for name, array in experts.items()}
    shipped = {
        name: xm.QuantizedWeight(
            values, np.full((len(values), 1, values.shape[2]), 0.125, np.float32), (values.shape[1], 1)
        )
        for name, values in scaled.items()
    }
    wide = {name: values.astype(jnp.float32) / 8 for name, values in scaled.items()}
    program = on_ranks(mesh4, functools.partial(call, case, return_info=True))

    def total(x, *others):
        return jnp.sum(jnp.sin(program(x, *others)[0]))

    ours, expected = (jax.jit(jax.grad(total))(*place(mesh4, (x, idx, weights, w))) for w in (shipped, wide))
    assert_bits(ours, np.asarray(expected), "gradient of x")
    with pytest.raises(TypeError, match="a gradient by a quantized weight"):
        jax.eval_shape(jax.grad(total, 3, allow_int=True), *place(mesh4, (x, idx, weights, shipped)))


def test_functions_may_take_rows_as_they_arrive(mesh4):
    """With `takes_block_scaled` they get a `BlockScaled`: bits of the dequantized rows, and no gradient."""
    case = Case(biased=True)
    x, idx, weights, experts = operands(case)
    taken = []

    def wide(rows, dtype):
        taken.append(isinstance(rows, xm.BlockScaled))
        return xm.dequantize(rows, dtype) if taken[-1] else rows

    def matmul(rows, weights, sizes):
        return jax.lax.ragged_dot(wide(rows, weights.dtype), weights, sizes)

    def doubled(rows, sizes, weights):
        return 2 * wide(rows, weights["up"].dtype)

    def run(x, **hook):
        def body(x, idx, weights, given):
            matrices = (given[name] for name in ("gate", "up", "down"))
            biases = tuple(given[f"{name}_bias"] for name in ("gate", "up", "down"))
            options = {"biases": biases, "wire": "float8_e4m3fn", "return_info": True, "num_experts": EXPERTS}
            return xm.moe_mlp(x, idx, weights, *matrices, axis_name="ep", **options, **hook)

        return jax.jit(on_ranks(mesh4, body))(*place(mesh4, (x, idx, weights, experts)))[0]

    for name, function, calls in (("grouped_matmul", matmul, 3), ("experts", doubled, 1)):
        plain = np.asarray(run(x, **{name: function}))
        assert not any(taken)
        taken.clear()
        function.takes_block_scaled = True
        assert_bits(run(x, **{name: function}), plain, name)
        assert taken.count(True) == (2 if calls == 3 else 1) and len(taken) == calls
        taken.clear()
        with pytest.raises(TypeError, match="dispatch of a BlockScaled x has no gradient"):
            jax.grad(lambda x, hook={name: function}: run(x, **hook).sum())(x)
        taken.clear()


@dataclasses.dataclass
class QArray:
    """The fields of `qwix.QArray`."""

    qvalue: Any
    scale: Any
    zero_point: Any = None


def test_weights_that_qwix_has_quantized(mesh4):
    """A scale a channel or a tile: the bits of the `QuantizedWeight`. Zero points and shared scales are errors."""
    case = Case()
    x, idx, weights, experts = operands(case)

    def by_qwix(x, idx, weights, experts):
        arrays = {name: QArray(weight.values, weight.scales) for name, weight in experts.items()}
        return call(case, x, idx, weights, arrays, return_info=True)

    for tile in (1, 2):
        given = {}
        for name, array in experts.items():
            values = (array * 8).astype(jnp.int8)
            scales = np.full((len(values), tile, values.shape[2]), 0.125, np.float32)
            given[name] = xm.QuantizedWeight(values, scales, (values.shape[1] // tile, 1))
        bodies = by_qwix, functools.partial(call, case, return_info=True)
        one, other = (jax.jit(on_ranks(mesh4, body))(*place(mesh4, (x, idx, weights, given)))[0] for body in bodies)
        assert_bits(one, np.asarray(other), "moe_mlp")
    with pytest.raises(ValueError, match="gate has zero points: quantize it with weight_calibration_method='absmax'"):
        adopted("gate", QArray(values, scales, scales))
    with pytest.raises(ValueError, match="gate has scales .*: must be one or more for each expert"):
        adopted("gate", QArray(values, scales[:1]))


def test_flax_is_not_needed():
    program = "import sys, xen_moe_jax; xen_moe_jax.moe_mlp; sys.exit('flax' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


UP = jnp.ones((LOCAL, HIDDEN, WIDE))
MISTAKES = {
    "gate shape": (
        {"gate": UP[:, 1:]},
        ValueError,
        r"gate has shape \(2, 31, 64\): must be \[L, H, F\] = \[2, 32, 64\]",
    ),
    "experts of a rank": ({"up": UP[:1]}, ValueError, r"up has shape \(1, 32, 64\): .*for L = 2 experts"),
    "down shape": ({"down": UP}, ValueError, r"down has shape .*\[L, F, H\] = \[2, 64, 32\]"),
    "dtype": (
        {"up": UP.astype(jnp.bfloat16)},
        TypeError,
        r"up has dtype bfloat16 and x has float32.*up.astype\(x.dtype\)",
    ),
    "integers": ({"up": UP.astype(jnp.int32)}, TypeError, "up has dtype int32: must be floating point"),
    "no array": ({"up": "up"}, TypeError, "up is a str: must be an array"),
    "no gate": ({"gate": None}, ValueError, "gate is None with activation='swiglu': pass the array"),
    "a gate": ({"activation": "gelu"}, ValueError, "gate is an array with activation='gelu': .*pass None"),
    "activation": ({"activation": "tanh"}, ValueError, r"activation='tanh': must be one of \('swiglu', .*'relu2'\)"),
    "limit": ({"activation_limit": 0}, ValueError, "activation_limit=0: must be a finite number > 0"),
    "biases": ({"biases": UP}, TypeError, r"biases is a .*: must be None, or a tuple \(gate, up, down\)"),
    "bias shape": (
        {"biases": (UP[:, 0], UP[:, 0], UP[:, 0])},
        ValueError,
        r"down_bias has shape \(2, 64\): must be \[L, H\] = \[2, 32\]",
    ),
    "no bias of the gate": ({"biases": (None, UP[:, 0], UP[:, :, 0])}, ValueError, "gate_bias is None"),
    "where weights go": ({"apply_weights_to": "y"}, ValueError, "apply_weights_to='y': must be one of"),
    "matmul": ({"grouped_matmul": "triton"}, ValueError, "grouped_matmul='triton': .*or a function"),
    "matmul without groups": (
        {"grouped_matmul": "hopper", "layout": "padded"},
        ValueError,
        "grouped_matmul='hopper' with layout='padded': .*use 'auto'",
    ),
    "no features": ({"up": UP[..., :0], "gate": UP[..., :0]}, ValueError, r"up has shape \(2, 32, 0\): .*at least 1"),
    "ranked": ({"layout": "ranked"}, ValueError, "layout='ranked': .*call dispatch and combine"),
    "experts": ({"experts": 4}, TypeError, "experts=4: must be a function"),
    "dtype of experts": (
        {"experts": "float4"},
        ValueError,
        "experts='float4': must be None, 'float8_e4m3fn' or 'int8'",
    ),
    "another dtype of experts": ({"experts": jnp.int4}, ValueError, "experts='int4': must be None, .* or 'int8'"),
    "a list of matmuls": (
        {"experts": jnp.int8, "grouped_matmul": ["auto"]},
        ValueError,
        r"experts='int8' with grouped_matmul=\['auto'\]: .*use 'auto'",
    ),
    "config": ({"config": "pallas"}, TypeError, "moe_mlp: config='pallas': must be None or an xm.KernelConfig"),
    "weights for a function": (
        {"experts": lambda rows, *_: rows, "apply_weights_to": "activation"},
        ValueError,
        "get no router weights",
    ),
    "rows of a function": ({"experts": lambda rows, *_: rows[1:]}, ValueError, "experts=<lambda> returned shape"),
    "quantized": ({"x": xm.BlockScaled(jnp.ones((8, 128), jnp.int8), jnp.ones((8, 1)))}, TypeError, "wire=..."),
    "wire of replicated tokens": ({"replicated": True, "wire": "int8"}, ValueError, "wire='int8' with replicated=True"),
    "replicated": ({"replicated": 2}, TypeError, "replicated=2: must be True or False"),
    "placement": ({"placement": UP}, TypeError, "moe_mlp: placement is a .*: must be a Placement"),
    "capacity": ({"capacity": -1}, ValueError, "capacity=-1: must be >= 0"),
    "capacity of rows in fp8": (
        {"capacity": -1, "wire": "float8_e4m3fn", "experts": "float8_e4m3fn"},
        ValueError,
        "capacity=-1: must be >= 0",
    ),
    "alignment of replicated tokens": ({"replicated": True, "alignment": 0}, ValueError, "alignment=0: must be >= 1"),
    "experts in all": ({"num_experts": 0}, ValueError, "num_experts=0: must be >= 1"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name, mesh4):
    wrong, error, message = MISTAKES[name]
    down = jnp.swapaxes(UP, 1, 2)
    given = {"x": jnp.ones((8, HIDDEN)), "gate": UP, "up": UP, "down": down, "num_experts": EXPERTS} | wrong

    def body(idx):
        return xm.moe_mlp(topk_idx=idx, topk_weights=None, axis_name="ep", **given)

    with pytest.raises(error, match=message) as found:
        jax.eval_shape(jax.shard_map(body, mesh=mesh4, in_specs=P(), out_specs=P()), jnp.zeros((8, TOP_K), jnp.int32))
    assert str(found.value).startswith(("moe_mlp: ", "experts=<lambda> "))  # not the name of an operation inside


def test_numbers_of_numpy_are_numbers(mesh4):
    case = Case("clipped_swiglu")
    placed = jax.device_put(operands(case), jax.NamedSharding(mesh4, RANKED))

    def body(*arrays):
        limits = {"activation_limit": np.float32(0.5), "activation_alpha": np.float16(1.5)}
        plain = {name: float(number) for name, number in limits.items()}
        return [call(case, *arrays, **options) for options in (limits, plain)]

    mapped = jax.jit(jax.shard_map(body, mesh=mesh4, in_specs=RANKED, out_specs=RANKED))
    assert_bits(*mapped(*placed), "out")


def test_rows_in_halves_are_for_the_backend_that_reads_them(monkeypatch, mesh4):
    """A tuple of one axis is one axis; a subclass of a config may have fields of its own."""

    @dataclasses.dataclass(frozen=True)
    class Named(xm.KernelConfig):
        name: str = "mine"

    def found(axis_name, config):
        taken = []
        monkeypatch.setattr(
            _moe_mlp, "experts_and_combine", lambda f, w, routed, back, _: taken.append(back) or routed.x
        )
        x, idx, matrix = jnp.ones((8, 256), jnp.bfloat16), jnp.zeros((8, 1), jnp.int32), jnp.ones((2, 256, 256))
        options = {"num_experts": EXPERTS, "axis_name": axis_name, "capacity": 64, "config": config}
        matrices = [matrix.astype(x.dtype)] * 3
        body = lambda x, idx: xm.moe_mlp(x, idx, jnp.ones(idx.shape), *matrices, **options)  # noqa: E731
        jax.eval_shape(jax.shard_map(body, mesh=mesh4, in_specs=P(), out_specs=RANKED, check_vma=False), x, idx)
        return taken[0].config

    monkeypatch.setattr(combined, "by_pallas", lambda *_: True)
    assert found("ep", None) == found(("ep",), None) == RowsInHalves()
    assert found("ep", Named(channel=3)) == RowsInHalves(channel=3)
    assert found("ep", xm.KernelConfig(backend="reference")) == xm.KernelConfig(backend="reference")


def test_outside_of_shard_map():
    down = jnp.swapaxes(UP, 1, 2)
    with pytest.raises(ValueError, match="moe_mlp: axis_name='ep': there is no manual axis here"):
        xm.moe_mlp(
            jnp.ones((8, HIDDEN)), jnp.zeros((8, 2), jnp.int32), None, UP, UP, down, num_experts=2, axis_name="ep"
        )
