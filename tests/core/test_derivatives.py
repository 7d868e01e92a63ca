"""Derivatives beyond reverse mode: the primitives' own rules under every transformation, and remat by name.

The reference is a dense MoE without ranks. `test_gradients.py` has first reverse-mode derivatives.
"""

import collections
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import xen_moe_jax as xm
from tests.support.checks import assert_bits
from tests.support.gradient_model import EXPERTS, LAYOUTS, assert_close, dense_moe, ep_moe, model, place, sharded

TARGET = np.random.default_rng(1).standard_normal((48, 64)).astype(np.float32)


def losses(layout, mesh, **options):
    """Losses of (x, weights, w_in, w_out) given idx: with expert parallelism in one layout, and dense."""
    ep = sharded(functools.partial(ep_moe, layout, **options), mesh)

    def of(moe):
        def loss(idx, x, weights, w_in, w_out):
            return jnp.sum(jnp.sin(moe(x, idx, weights, w_in, w_out)) * TARGET)

        return loss

    return of(ep), of(dense_moe)


def directions(operands, seed=2):
    rng = np.random.default_rng(seed)
    return tuple(rng.standard_normal(a.shape).astype(np.float32) for a in operands)


@pytest.fixture(autouse=True)
def exact_matmuls():
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture
def problem(mesh4):
    """idx on the mesh and on the host, then primals and directions of both."""
    x, idx, weights, w_in, w_out = model()
    primals = (x, weights, w_in, w_out)
    dots = directions(primals)
    (placed_idx,) = place(mesh4, idx)
    return placed_idx, idx, (place(mesh4, *primals), place(mesh4, *dots)), (primals, dots)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_forward_mode_and_linearize(mesh4, problem, layout):
    placed_idx, idx, here, there = problem
    ep, dense = losses(layout, mesh4)
    value, tangent = jax.jit(lambda p, d: jax.jvp(functools.partial(ep, placed_idx), tuple(p), tuple(d)))(*here)
    expected = jax.jvp(functools.partial(dense, idx), *there)
    assert_close(value, expected[0], "value")
    assert_close(tangent, expected[1], "tangent")
    value, linear = jax.linearize(functools.partial(ep, placed_idx), *here[0])
    assert_close(linear(*here[1]), expected[1], "linearized")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_second_derivatives(mesh4, problem, layout):
    """Hessian-vector products: forward over reverse, and reverse over reverse."""
    placed_idx, idx, here, there = problem
    ep, dense = losses(layout, mesh4)

    def gradient(loss, i):
        return jax.grad(functools.partial(loss, i), (0, 1, 2, 3))

    def forward_over_reverse(loss, i, primals, dots):
        return jax.jvp(gradient(loss, i), tuple(primals), tuple(dots))[1]

    def reverse_over_reverse(loss, i, primals, dots):
        def slope(*p):
            return sum(jnp.sum(g * d) for g, d in zip(gradient(loss, i)(*p), dots, strict=True))

        return jax.grad(slope, (0, 1, 2, 3))(*primals)

    expected = forward_over_reverse(dense, idx, *there)
    for product in (forward_over_reverse, reverse_over_reverse):
        actual = jax.jit(lambda p, d, product=product: product(ep, placed_idx, p, d))(*here)
        for name, a, e in zip(("x", "weights", "w_in", "w_out"), actual, expected, strict=True):
            scale = float(np.abs(e).max())
            np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-5 * scale, err_msg=f"{product.__name__}, {name}")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_dispatch_has_the_linear_transpose_that_its_gradient_uses(mesh4, layout):
    x, idx, weights, *_ = model()

    def f(x, idx, weights):
        def send(x, weights):
            routed = xm.dispatch(x, idx, weights, num_experts=EXPERTS, axis_name="ep", layout=layout)
            return routed.x, routed.topk_weights if layout == "ranked" else routed.weights

        rows, primal = jax.vjp(send, x, weights)
        cotangents = jax.tree.map(jnp.cos, rows)
        transposed = jax.linear_transpose(send, x, weights)(cotangents)
        one = jax.linear_transpose(lambda x: send(x, None)[0], x)(cotangents[0])
        return *transposed, *one, *primal(cotangents)

    out = jax.jit(jax.shard_map(f, mesh=mesh4, in_specs=P("ep"), out_specs=P("ep")))(*place(mesh4, x, idx, weights))
    x_ct, weights_ct, x_alone, expected_x, expected_weights = map(np.asarray, out)
    assert np.abs(expected_x).max() > 0 and np.abs(expected_weights).max() > 0
    assert (x_ct == expected_x).all() and (x_alone == expected_x).all() and (weights_ct == expected_weights).all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_linear_transposes_are_adjoint(mesh4, layout):
    """`<A x, y> == <x, A^T y>` for redispatch in x and combine in y, and A^T is the other operation, bit for bit."""
    x, idx, weights, *_ = model()

    def f(x, idx, weights):
        routed = xm.dispatch(x, idx, weights, num_experts=EXPERTS, axis_name="ep", layout=layout)
        handle = routed.handle
        used = jnp.zeros(routed.x.shape[:-1], bool).reshape(-1)
        at = jnp.where(handle.positions >= 0, handle.positions, used.size).reshape(-1)
        used = used.at[at].set(True, mode="drop").reshape(routed.x.shape[:-1])
        y = jnp.where(used[..., None], jnp.sin(routed.x * 3 + 1), 0)
        send = functools.partial(xm.redispatch, handle=handle)
        bring = functools.partial(xm.combine, handle=handle, weighted=False)
        (x_back,) = jax.linear_transpose(send, x)(y)
        (y_back,) = jax.linear_transpose(bring, y)(x)
        sums = [jnp.vdot(jnp.where(used[..., None], send(x), 0), y), jnp.vdot(x, x_back), jnp.vdot(y_back, y)]
        sums += [jnp.vdot(x, bring(y))]
        total = jax.lax.psum(jnp.stack(sums), "ep")
        same = jnp.where(used[..., None], y_back - send(x), 0), x_back - bring(y)
        return total[None], *same

    out = jax.jit(jax.shard_map(f, mesh=mesh4, in_specs=P("ep"), out_specs=P("ep")))(*place(mesh4, x, idx, weights))
    totals, *differences = map(np.asarray, out)
    np.testing.assert_allclose(totals[0, 0], totals[0, 1], rtol=1e-5)
    np.testing.assert_allclose(totals[0, 2], totals[0, 3], rtol=1e-5)
    assert all((d == 0).all() for d in differences)


@pytest.mark.parametrize("wire", ["float8_e4m3fn", "int8:ue8m0"])
def test_tangents_pass_straight_through_a_quantized_wire(mesh4, wire):
    """Values are rounded, tangents are those of the unquantized program: bit for bit."""
    x, idx, weights, *_ = model(5)

    def f(x, idx, weights, x_dot, wire=None):
        def forward(x):
            routed = xm.dispatch(x, idx, weights, num_experts=EXPERTS, axis_name="ep", wire=wire)
            return xm.combine(routed.x, routed.handle, wire=wire)

        return jax.jvp(forward, (x,), (x_dot,))

    operands = place(mesh4, x, idx, weights, *directions((x,)))
    exact, plain = sharded(f, mesh4)(*operands)
    rounded, through = sharded(functools.partial(f, wire=wire), mesh4)(*operands)
    assert_bits(through, np.asarray(plain), "tangent")
    assert not np.array_equal(exact, rounded)


def test_router_weights_of_a_quantized_payload_have_a_gradient(mesh4):
    """fp8 values carry no cotangent, router weights do; asking for the values' gradient is a named error."""
    x, idx, weights, *_ = model(3)

    def loss(weights, x, idx):
        quantized = jax.lax.stop_gradient(xm.quantize(x))
        routed = xm.dispatch(quantized, idx, weights, num_experts=EXPERTS, axis_name="ep")
        rows = xm.dequantize(routed.x, dtype=jnp.float32)
        return jnp.sum(xm.combine(rows, routed.handle))

    dweights = sharded(jax.grad(loss), mesh4)(*place(mesh4, weights, x, idx))
    values = jax.jit(lambda x: xm.dequantize(xm.quantize(x), dtype=jnp.float32))(x)
    used = (idx >= 0) & (idx < EXPERTS)
    np.testing.assert_allclose(dweights, used * np.asarray(values).sum(1)[:, None], rtol=1e-4, atol=1e-4)

    def through_values(x, idx):
        return jnp.sum(xm.dispatch(xm.quantize(x), idx, num_experts=EXPERTS, axis_name="ep").x.scales)

    with pytest.raises(TypeError, match="BlockScaled x has no gradient"):
        jax.eval_shape(sharded(jax.grad(through_values), mesh4), *place(mesh4, x, idx))


# -- remat by name -----------------------------------------------------------------------------------------------------


def operations(program, *arguments):
    return collections.Counter(re.findall(r"\bxen_moe_\w+(?=\[)", str(jax.make_jaxpr(program)(*arguments))))


NAMED = jax.checkpoint_policies.save_only_these_names
POLICIES = {  # policy -> dispatches in forward and backward pass together
    "nothing saved": (None, 2),
    "rows and handle saved": (NAMED("xen_moe_rows", "xen_moe_handle"), 1),
    "handle saved": (NAMED("xen_moe_handle"), 2),  # the rows themselves have to come again
}


@pytest.mark.parametrize("start_done", [False, True], ids=["whole", "start-done"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_by_name_saves_the_dispatch(mesh4, policy, start_done):
    policy, dispatches = POLICIES[policy]
    x, idx, weights, w_in, w_out = model()
    if start_done:

        def layer(x, idx, weights, w_in, w_out):
            flight = xm.dispatch_start(x, idx, weights, num_experts=EXPERTS, axis_name="ep")
            routed = xm.dispatch_done(flight)
            y = jax.nn.silu(jax.lax.ragged_dot(routed.x, w_in, routed.group_sizes))
            y = jax.lax.ragged_dot(y, w_out, routed.group_sizes)
            return xm.combine_done(xm.combine_start(y, routed.handle))
    else:
        layer = functools.partial(ep_moe, "grouped")

    def loss(x, weights, w_in, w_out, idx):
        return jnp.sum(jnp.sin(jax.checkpoint(layer, policy=policy)(x, idx, weights, w_in, w_out)))

    program = sharded(jax.grad(loss, (0, 1, 2, 3)), mesh4)
    operands = place(mesh4, x, weights, w_in, w_out, idx)
    found = operations(program, *operands)
    assert found["xen_moe_dispatch"] == dispatches, found
    assert found["xen_moe_redispatch"] == 1, found
    plain = sharded(jax.grad(lambda x, *r: jnp.sum(jnp.sin(layer(x, r[3], *r[:3]))), (0, 1, 2, 3)), mesh4)
    for actual, expected in zip(program(*operands), plain(*operands), strict=True):
        assert_bits(actual, np.asarray(expected), "gradient")


def test_one_redispatch_serves_rows_and_weights(mesh4):
    """The cotangent of a weighted combine travels once for gradients of rows, of weights or of both; unused gradients
    cost nothing."""
    x, idx, weights = place(mesh4, *model()[:3])

    def counted(*wanted):
        def loss(x, weights, idx):
            routed = xm.dispatch(x, idx, weights, num_experts=EXPERTS, axis_name="ep")
            return jnp.sum(jnp.sin(xm.combine(jnp.cos(routed.x), routed.handle)))

        return operations(sharded(jax.grad(loss, wanted), mesh4), x, weights, idx)

    both, rows, router = counted(0, 1), counted(0), counted(1)
    assert both["xen_moe_redispatch"] == rows["xen_moe_redispatch"] == router["xen_moe_redispatch"] == 1
    assert (both["xen_moe_combine"], rows["xen_moe_combine"], router["xen_moe_combine"]) == (2, 2, 1)
    back = "xen_moe_weights_from_rows"
    assert (both[back], rows[back], router[back]) == (1, 0, 1)


def test_results_carry_names_and_operations_scopes(mesh4):
    x, idx, weights = place(mesh4, *model()[:3])

    def layer(x, idx, weights):
        routed = xm.dispatch(x, idx, weights, num_experts=EXPERTS, axis_name="ep")
        rows = xm.redispatch(x, routed.handle)
        return xm.combine(routed.x + rows, routed.handle)

    program = sharded(layer, mesh4)
    text = str(jax.make_jaxpr(program)(x, idx, weights))
    assert {"xen_moe_rows", "xen_moe_handle", "xen_moe_out"} <= set(re.findall(r"name\[name=(\w+)\]", text))
    hlo = program.lower(x, idx, weights).compile().as_text()
    for scope in ("xen_moe_dispatch", "xen_moe_redispatch", "xen_moe_combine"):
        assert re.search(rf'op_name="[^"]*\b{scope}/', hlo), scope


# -- flights -----------------------------------------------------------------------------------------------------------


def test_a_flight_is_finished_once(mesh4):
    x, idx, weights = place(mesh4, *model()[:3])

    def twice(finish, copied):
        def f(x, idx, weights):
            flight = xm.dispatch_start(x, idx, weights, num_experts=EXPERTS, axis_name="ep")
            if finish is xm.combine_done:
                routed = xm.dispatch_done(flight)
                flight = xm.combine_start(routed.x, routed.handle)
            again = jax.tree.map(lambda a: a, flight) if copied else flight
            finish(flight)
            finish(again)
            return x

        return f

    for finish in (xm.dispatch_done, xm.combine_done):
        for copied in (False, True):
            with pytest.raises(ValueError, match="finished before: a flight is used once"):
                jax.eval_shape(sharded(twice(finish, copied), mesh4), x, idx, weights)


@pytest.mark.parametrize("half", ["dispatch", "combine"])
def test_a_loop_cannot_pass_on_the_flight_that_it_finished(mesh4, half):
    """Every turn would finish the same flight again; a loop that hands a new flight to the next turn is right."""
    x, idx, weights = place(mesh4, *model()[:3])

    def loop(renewed):
        def f(x, idx, weights):
            def start(x):
                flight = xm.dispatch_start(x, idx, weights, num_experts=EXPERTS, axis_name="ep")
                if half == "dispatch":
                    return flight
                routed = xm.dispatch_done(flight)
                return xm.combine_start(routed.x, routed.handle)

            def turn(flight, _):
                if half == "combine":
                    out = xm.combine_done(flight)
                else:
                    routed = xm.dispatch_done(flight)
                    out = xm.combine(routed.x, routed.handle)
                return (start(x) if renewed else flight), out

            return jax.lax.scan(turn, start(x), length=2)[1][-1]

        return sharded(f, mesh4)

    with pytest.raises(ValueError, match=f"a {half} flight is passed on .* that was finished"):
        jax.eval_shape(loop(renewed=False), x, idx, weights)
    assert jax.eval_shape(loop(renewed=True), x, idx, weights).shape == x.shape


def test_flights_of_the_same_operands_are_two(mesh4):
    x, idx, weights = place(mesh4, *model()[:3])

    def f(x, idx, weights):
        flights = [xm.dispatch_start(x, idx, weights, num_experts=EXPERTS, axis_name="ep") for _ in range(2)]
        first, second = (xm.dispatch_done(flight) for flight in flights)
        outs = [xm.combine_start(first.x, first.handle) for _ in range(2)]
        return sum(xm.combine_done(flight) for flight in outs) + 0 * xm.combine(second.x, second.handle)

    jax.eval_shape(sharded(f, mesh4), x, idx, weights)
