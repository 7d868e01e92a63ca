"""The kernel of a whole decode layer in interpret mode, against NumPy: to the bit, since these sums are exact."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P

from tests.backends.pallas.test_decode_experts import bfloat16, product, whole_numbers
from tests.support import interpreter
from tests.support.checks import assert_bits
from xen_moe_jax.pallas_kernels.decode_experts import Pieces
from xen_moe_jax.pallas_kernels.decode_layer import decode_layer
from xen_moe_jax.pallas_kernels.decode_sums import decode_sums, lines
from xen_moe_jax.pallas_kernels.launch import Launch
from xen_moe_jax.pallas_kernels.peers import Axes
from xen_moe_jax.pallas_kernels.record import Record

LOCAL = 3
SAME_CORE = 0
"""Seed of the interpreter with which step 0 of a grid of two runs on core 0, and step 1 on core 1."""


@pytest.fixture(autouse=True)
def kernels_are_clean(capfd):
    with interpreter.clean(capfd):
        yield


def by_numpy(x, idx, factors, weights, biases, rounded, ranks, as_sums=False, local=LOCAL):
    """`[R, T, H]`: rows through their experts, summed in slot order on each rank, then over ranks in their order; with
    `as_sums`, sums are not rounded."""

    def project(values, name, e):
        result = rounded(values @ weights[name][e])
        return result if biases is None else rounded(result + biases[name][e])

    out = np.zeros_like(x)
    for source, token in np.ndindex(idx.shape[:2]):
        row = x[source, token]
        for rank in range(ranks):
            total = np.zeros_like(row)
            for e, factor in zip(idx[source, token], factors[source, token], strict=True):
                if e >= 0 and e // local == rank:
                    gate = project(row, "gate", e) if "gate" in weights else None
                    activation = rounded(np.asarray(product(gate, project(row, "up", e))))
                    total += project(activation, "down", e) * factor
            out[source, token] += total if as_sums else rounded(total)
    return out if as_sums else rounded(out)


CASES = {
    "many tokens, six groups of experts": {
        "tokens": 48, "hidden": 256, "width": 192, "routing": "uniform", "ranks": 2, "local": 6,
    },
    "one expert has all rows": {"tokens": 16, "hidden": 128, "width": 256, "routing": "one", "certain": 1, "kept": 50},
    "a token on one rank alone": {"tokens": 5, "hidden": 320, "width": 128, "routing": "own"},
    "biases, weights that come early": {
        "tokens": 8, "hidden": 144, "width": 144, "routing": "uniform", "biased": True, "certain": 2,
    },
    "one projection, unused slots": {"tokens": 1, "hidden": 384, "width": 128, "routing": "unused", "gated": False},
    "rows one by one, passes of some sources": {
        "tokens": 8, "hidden": 128, "width": 128, "routing": "one", "kept": 30, "in_hbm": True,
    },
    "rows one by one, more visits than are kept": {
        "tokens": 16, "hidden": 256, "width": 128, "routing": "uniform", "ranks": 2, "local": 10, "in_hbm": True,
    },
    "no rows at all": {"tokens": 8, "hidden": 128, "width": 128, "routing": "none"},
    "two cores": {"tokens": 32, "hidden": 256, "width": 192, "routing": "uniform", "ranks": 2, "local": 4, "cores": 2},
    "two cores, all rows of a token on one rank": {
        "tokens": 5, "hidden": 320, "width": 128, "routing": "own", "ranks": 2, "local": 4, "cores": 2, "biased": True,
    },
    "two cores, several passes, fp8 in blocks": {
        "tokens": 8, "hidden": 128, "width": 128, "routing": "one", "ranks": 2, "local": 4, "cores": 2, "kept": 30,
        "certain": 1, "block": (128, 128),
    },
}  # fmt: skip


def routing(kind, rng, ranks, tokens, top_k, local=LOCAL):
    experts = ranks * local
    idx = np.argsort(rng.random((ranks, tokens, experts)), axis=2)[..., :top_k]
    if kind == "one":
        idx = np.where(np.arange(top_k) == 1, 4, np.where(idx == 4, -1, idx))
    elif kind == "own":  # all experts of one rank: three rows in slot order
        rank = rng.integers(0, ranks, (ranks, tokens, 1))
        idx = rank * local + np.argsort(rng.random((ranks, tokens, local)), axis=2)[..., :top_k]
    elif kind == "unused":
        idx = np.where(rng.random(idx.shape) < 0.5, -1, idx)
    elif kind == "none":
        idx = np.full(idx.shape, -1)
    return idx.astype(np.int32)


@pytest.mark.parametrize(("name", "dtype", "mode"), interpreter.in_turn(CASES, 1))
def test_a_layer(name, dtype, mode):
    case, top_k = CASES[name], 3
    ranks = case.get("ranks", 4)
    tokens, hidden, width = (case[key] for key in ("tokens", "hidden", "width"))
    local, cores = case.get("local", LOCAL), case.get("cores", 1)
    rng = np.random.default_rng(5)
    idx = routing(case["routing"], rng, ranks, tokens, top_k, local)
    factors = rng.integers(1, 4, idx.shape).astype(np.float32) / 2
    x = whole_numbers(rng, ranks, tokens, hidden)
    names = ("gate", "up", "down") if case.get("gated", True) else ("up", "down")
    shapes = {"gate": (hidden, width), "up": (hidden, width), "down": (width, hidden)}
    values = {n: whole_numbers(rng, ranks * local, *shapes[n]) for n in names}
    block, given = case.get("block"), {n: jnp.asarray(value / 64, dtype) for n, value in values.items()}
    weights, scales = {n: value / 64 for n, value in values.items()}, {}
    if block:  # one for each expert
        scales = {n: 2.0 ** rng.integers(-7, -5, ranks * local).astype(np.float32) for n in names}
        weights = {n: value * scales[n][:, None, None] for n, value in values.items()}
        given = {n: jnp.asarray(value, "float8_e4m3fn") for n, value in values.items()}
    biased = case.get("biased", False)
    biases = {n: whole_numbers(rng, ranks * local, shapes[n][1]) / 4 for n in names} if biased else None
    rounded = bfloat16 if dtype == "bfloat16" else np.asarray
    expected = by_numpy(x, idx, factors, weights, biases, rounded, ranks, local=local)
    how = pltpu.InterpretParams(
        dma_execution_mode=mode, detect_races=True, num_cores_or_threads=cores, random_seed=SAME_CORE
    )

    pieces = Pieces(rows_at_once=32, rows=16, depth=128, width=128, ahead=3, widened=not block)
    kernel = functools.partial(
        decode_layer,
        activate=product,
        pieces=pieces,
        kept=case.get("kept", 1000),
        certain=case.get("certain", 0),
        in_hbm=case.get("in_hbm", False),
        axes=Axes(("ep",), (ranks,)),
        launch=Launch(1, collective_id=7, interpret=how, cores=cores),
    )

    def body(x, idx, factors, given, biases, scales):
        matrices = given.get("gate"), given["up"], given["down"]
        of_blocks = {n: (scale, block) for n, scale in scales.items()} or None
        return kernel(x, idx.T, factors.T, *matrices, biases or None, scales=of_blocks)

    mesh = jax.make_mesh((ranks,), ("ep",), devices=jax.devices()[:ranks], axis_types=(jax.sharding.AxisType.Auto,))
    mapped = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"), check_vma=False))
    in_float32 = {n: jnp.asarray(value) for n, value in (biases or {}).items()}
    rows, *flat = (jnp.asarray(a.reshape(ranks * tokens, -1)) for a in (x, idx, factors))
    out = mapped(rows.astype(dtype), *flat, given, in_float32, scales)
    assert not interpreter.races_found(out)
    assert_bits(np.asarray(out.astype(jnp.float32)), expected.reshape(ranks * tokens, hidden), name)
    assert name == "no rows at all" or np.abs(expected).max() > 0.1, "the case tests nothing"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tokens_that_every_rank_has(dtype):
    """Without axes nothing is sent, slots of other ranks are no expert's, and float32 sums are not rounded."""
    rng = np.random.default_rng(8)
    tokens, hidden, width = 24, 320, 128
    idx = routing("uniform", rng, 3, tokens, 4)[0] - LOCAL  # a third of them are ours
    idx = np.where((idx >= 0) & (idx < LOCAL), idx, -1).astype(np.int32)
    factors = rng.integers(1, 4, idx.shape).astype(np.float32) / 2
    x = whole_numbers(rng, tokens, hidden)
    shapes = {"gate": (hidden, width), "up": (hidden, width), "down": (width, hidden)}
    weights = {n: whole_numbers(rng, LOCAL, *shape) / 64 for n, shape in shapes.items()}
    rounded = bfloat16 if dtype == "bfloat16" else np.asarray
    expected = by_numpy(x[None], idx[None], factors[None], weights, None, rounded, 1, as_sums=True)[0]
    out = decode_layer(
        jnp.pad(jnp.asarray(x, dtype), ((0, 8), (0, 0))),
        jnp.pad(jnp.asarray(idx.T), ((0, 0), (0, 8)), constant_values=-1),
        jnp.pad(jnp.asarray(factors.T), ((0, 0), (0, 8))),
        *(jnp.asarray(weights[n], dtype) for n in ("gate", "up", "down")),
        None,
        activate=product,
        pieces=Pieces(rows_at_once=16, rows=16, depth=128, width=128, ahead=2),
        kept=1,
        certain=1,
        axes=None,
        launch=Launch(1, interpret=pltpu.InterpretParams(detect_races=True)),
    )
    assert not interpreter.races_found(out)
    assert out.dtype == jnp.float32
    assert_bits(np.asarray(out)[:tokens], expected, dtype)


@pytest.mark.parametrize("tokens", [5, 13, 16, 32])
def test_sums_of_tokens_that_fill_no_register_are_lowered(tokens):
    """Mosaic takes blocks of eight rows, or of a whole array."""
    record = Record(256, "bfloat16")
    rows = jax.ShapeDtypeStruct((8 * tokens, record.value_rows, 128), jnp.int32)
    table = jax.ShapeDtypeStruct((128, lines(8)), jnp.float32)
    sums = functools.partial(
        decode_sums, record=record, shape=(tokens, 256), dtype=jnp.bfloat16, launch=Launch(1, cores=2)
    )
    jax.jit(sums).trace(rows, table).lower(lowering_platforms=("tpu",))
