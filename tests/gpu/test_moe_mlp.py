"""`xm.moe_mlp` over one, two and four GPUs, a rank each: outputs with the bits that plain JAX's transport gives, and
outputs and gradients beside a dense evaluation in float32.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import xen_moe_jax as xm
from xen_moe_jax import balance

TOKENS, HIDDEN, WIDTH, EXPERTS, TOP_K = 96, 256, 384, 8, 3
NAMES = ("gate", "up", "down")
COSINE = {False: 0.9995, True: 0.996}
"""Least cosine between an array and that of the dense evaluation; True: rows or experts are in fp8."""


@dataclasses.dataclass(frozen=True)
class Case:
    """Options of a call. `placed`: expert 0, which most tokens name, has a replica on another rank."""

    options: tuple[tuple[str, object], ...] = ()
    biased: bool = False
    placed: bool = False

    @property
    def in_float8(self) -> bool:
        return "wire" in dict(self.options)


FLOAT8 = "float8_e4m3fn"
CASES = {
    "swiglu": Case(),
    "many tokens": Case((("config", xm.KernelConfig(mode="throughput")),)),
    "biases": Case((("activation", "clipped_swiglu"),), biased=True),
    "weights in front": Case((("apply_weights_to", "activation"),)),
    "padded": Case((("layout", "padded"), ("activation", "geglu"))),
    "fp8 wire": Case((("wire", FLOAT8),)),
    "experts in fp8": Case((("experts", FLOAT8), ("wire", FLOAT8))),
    "placement": Case(placed=True),
    "exact balance": Case((("balance", "exact"),)),
}


def draw(case: Case, ranks: int) -> tuple:
    """Operands of all ranks: x, experts of tokens, router weights, matrices, biases, and the output's cotangent."""
    keys = iter(jax.random.split(jax.random.key(37), 12))

    def normal(*shape: int, scale: float = 1.0) -> jax.Array:
        return (scale * jax.random.normal(next(keys), shape)).astype(jnp.bfloat16)

    x, cotangent = normal(ranks * TOKENS, HIDDEN), normal(ranks * TOKENS, HIDDEN)
    scores = jax.random.uniform(next(keys), (ranks * TOKENS, EXPERTS)).at[:, 0].add(0.5)
    weights, idx = jax.lax.top_k(scores, TOP_K)
    sizes = (HIDDEN, WIDTH), (HIDDEN, WIDTH), (WIDTH, HIDDEN)
    matrices = [normal(EXPERTS, *size, scale=size[0] ** -0.5) for size in sizes]
    biases = tuple(normal(EXPERTS, size[1], scale=0.3) for size in sizes) if case.biased else None
    return x, idx, weights, matrices, biases, cotangent


def program(case: Case, mesh: jax.sharding.Mesh, idx: jax.Array, **changed: object):
    """`(x, weights, matrices, biases, cotangent) -> output, gradients`, jitted."""
    options = dict(case.options) | changed
    placement = None
    if case.placed:
        counts = np.bincount(np.asarray(idx).ravel(), minlength=EXPERTS)
        placement = balance.plan(counts, mesh.size, EXPERTS // mesh.size + 1)

    def body(x, idx, weights, matrices, biases):
        if placement is not None:
            matrices = placement.move(matrices, None, placement, axis_name="ep")
        given = {"num_experts": EXPERTS, "axis_name": "ep", "biases": biases, "placement": placement}
        return xm.moe_mlp(x, idx, weights, *matrices, **given | options)

    def layer(x, weights, matrices, biases):
        mapped = jax.shard_map(body, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))
        return mapped(x, idx, weights, matrices, biases)

    @jax.jit
    def both(*given):
        *given, cotangent = given
        out, pull = jax.vjp(layer, *given)
        return out, pull(cotangent)

    return both


def dense(case: Case, idx: jax.Array, x, weights, matrices, biases):
    """Every expert on every token, in float32."""
    activation = dict(case.options).get("activation", "swiglu")
    share = jnp.zeros((x.shape[0], EXPERTS)).at[jnp.arange(x.shape[0])[:, None], idx].add(weights)
    gate, up, down = matrices
    b = [bias[:, None] for bias in biases] if biases else [0, 0, 0]
    gate, up = (jnp.einsum("th,ehf->etf", x, m) + bias for m, bias in ((gate, b[0]), (up, b[1])))
    if activation == "clipped_swiglu":
        gate, up = jnp.minimum(gate, 7.0), jnp.clip(up, -7.0, 7.0)
        inner = gate * jax.nn.sigmoid(1.702 * gate) * (up + 1)
    elif activation == "geglu":
        inner = jax.nn.gelu(gate, approximate=False) * up
    else:
        inner = jax.nn.silu(gate) * up
    return jnp.einsum("te,eth->th", share, jnp.einsum("etf,efh->eth", inner, down) + b[2])


@pytest.fixture(params=[pytest.param(ranks, marks=getattr(pytest.mark, f"gpu{ranks}")) for ranks in (1, 2, 4)])
def mesh(request):
    """With the kind of axes over which `moe_mlp` checks that values vary."""
    devices = jax.devices()[: request.param]
    yield jax.make_mesh((request.param,), ("ep",), devices=devices, axis_types=(jax.sharding.AxisType.Auto,))
    xm.check()


def assert_close(case: Case, names: tuple[str, ...], got, expected) -> None:
    for name, one, other in zip(names, jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        one, other = (np.asarray(a, np.float64).ravel() for a in (one, other))
        assert np.isfinite(one).all() and np.abs(other).max() > 1e-3, name
        cosine = one @ other / np.linalg.norm(one) / np.linalg.norm(other)
        assert cosine > COSINE[case.in_float8], f"{name}: {cosine}"
        assert 0.98 < np.linalg.norm(one) / np.linalg.norm(other) < 1.02, name


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(mesh, name):
    case = CASES[name]
    if case.placed and mesh.size == 1:
        pytest.skip("on one rank there is nowhere to place a replica")
    x, idx, weights, matrices, biases, cotangent = draw(case, mesh.size)
    given = jax.device_put((x, weights, matrices, biases, cotangent), jax.NamedSharding(mesh, P("ep")))
    got = program(case, mesh, idx)(*given)

    plain = program(case, mesh, idx, config=xm.KernelConfig(backend="reference"))(*given)
    np.testing.assert_array_equal(np.asarray(got[0]).view(np.uint16), np.asarray(plain[0]).view(np.uint16))

    @jax.jit
    def exact(*given):
        *given, cotangent = jax.tree.map(lambda a: a.astype(jnp.float32), given)
        out, pull = jax.vjp(functools.partial(dense, case, idx), *given)
        return out, pull(cotangent)

    with jax.default_matmul_precision("highest"):
        expected = exact(x, weights, matrices, biases, cotangent)
    names = ("output", "x", "weights", *NAMES, *(f"{n}_bias" for n in NAMES if biases))
    assert_close(case, names, got, expected)
