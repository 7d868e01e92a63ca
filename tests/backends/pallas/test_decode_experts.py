"""The kernel of a decode layer's experts in interpret mode, against NumPy: to the bit, since these sums are exact."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P

from tests.support import interpreter
from tests.support.checks import assert_bits
from xen_moe_jax.pallas_kernels.decode_experts import GROUP, Pieces, decode_experts
from xen_moe_jax.pallas_kernels.launch import Launch


@pytest.fixture(autouse=True)
def kernels_are_clean(capfd):
    with interpreter.clean(capfd):
        yield


def whole_numbers(rng, *shape):
    return rng.integers(-2, 3, shape).astype(np.float32)


def bfloat16(values):
    """Values rounded to bfloat16, as float32."""
    return np.asarray(jnp.asarray(values, jnp.bfloat16).astype(jnp.float32))


def product(gate, up):
    """An activation without rounding of its own."""
    return jnp.maximum(up, 0.0) if gate is None else gate * up


def by_numpy(x, received, weights, biases, rounded, alignment):
    """The rows of each expert through its MLP, in float32; each matmul's result is rounded, then its bias added."""
    local, hidden, _ = weights["up"].shape
    out, used, at = np.zeros_like(x), np.zeros(len(x), bool), 0
    for e in range(local):
        size = -(-int(received[:, e].sum()) // alignment) * alignment
        rows = slice(at, min(at + size, len(x)))
        at += size

        def project(values, name, e=e):
            result = rounded(values @ weights[name][e])
            return result if biases is None else rounded(result + biases[name][e])

        gate = project(x[rows, :hidden], "gate") if "gate" in weights else None
        activation = rounded(np.asarray(product(gate, project(x[rows, :hidden], "up"))))
        out[rows, :hidden] = project(activation, "down")
        used[rows] = True
    return out, used


CASES = {
    # experts without rows, one that is visited three times, slabs that do not divide the matrices
    "more rows than a visit": {"counts": (16, 0, 80, 0, 33), "hidden": 320, "width": 192},
    "biases, and columns beyond the hidden size": {"counts": (1, 40, 0), "hidden": 144, "width": 144, "biased": True},
    "one projection": {"counts": (5, 5, 5), "hidden": 128, "width": 256, "gated": False},
    "two cores, an odd number of visits": {"counts": (16, 16, 16), "hidden": 128, "width": 128, "cores": 2},
    "no rows at all": {"counts": (0, 0), "hidden": 128, "width": 128},
    "more rows than the capacity": {"counts": (40, 40, 40), "hidden": 128, "width": 128, "capacity": 64},
    "groups at multiples of 32": {"counts": (3, 40, 2), "hidden": 128, "width": 128, "alignment": 32},
}


@pytest.mark.parametrize(("name", "dtype", "mode"), interpreter.in_turn(CASES, 2))
def test_every_expert_computes_its_own_rows(name, dtype, mode):
    case = CASES[name]
    hidden, width, counts = case["hidden"], case["width"], np.array(case["counts"])
    alignment, biased = case.get("alignment", GROUP), case.get("biased", False)
    rng = np.random.default_rng(3)
    rows = case.get("capacity", int((-(-counts // alignment) * alignment).sum()) + GROUP)
    x = whole_numbers(rng, rows, -(-hidden // 128) * 128)
    received = rng.multinomial(1, np.ones(3) / 3, counts.sum())  # by source
    received = np.stack([part.sum(0) for part in np.split(received, np.cumsum(counts)[:-1])], axis=1)
    names = ("gate", "up", "down") if case.get("gated", True) else ("up", "down")
    shapes = {"gate": (hidden, width), "up": (hidden, width), "down": (width, hidden)}
    weights = {n: whole_numbers(rng, len(counts), *shapes[n]) / 64 for n in names}
    biases = {n: whole_numbers(rng, len(counts), shapes[n][1]) / 4 for n in names} if biased else None
    rounded = bfloat16 if dtype == "bfloat16" else np.asarray
    expected, used = by_numpy(x, received, weights, biases, rounded, alignment)

    kernel = functools.partial(
        decode_experts,
        activate=product,
        alignment=alignment,
        pieces=Pieces(rows_at_once=32, rows=16, depth=128, width=128),
        launch=Launch(
            1, cores=case.get("cores", 1), interpret=pltpu.InterpretParams(dma_execution_mode=mode, detect_races=True)
        ),
    )
    given = {n: jnp.asarray(value, dtype) for n, value in weights.items()}
    in_float32 = biases and {n: jnp.asarray(value) for n, value in biases.items()}
    out = jax.jit(kernel)(
        jnp.asarray(x, dtype),
        jnp.asarray(received, jnp.int32),
        given.get("gate"),
        given["up"],
        given["down"],
        in_float32,
    )
    assert not interpreter.races_found(out)
    assert_bits(np.asarray(out.astype(jnp.float32))[used], expected[used], name)
    assert name == "no rows at all" or (used.any() and np.abs(expected).max() > 0.1), "the case tests nothing"


def test_sums_that_are_rounded_are_close():
    """Random values, and an activation of which XLA knows more than one way to compute it."""
    rng = np.random.default_rng(0)
    counts, hidden, width = np.array([17, 0, 48]), 256, 384
    x = jnp.asarray(rng.standard_normal((96, hidden)), jnp.bfloat16)
    shapes = ((hidden, width), (hidden, width), (width, hidden))
    gate, up, down = (jnp.asarray(rng.standard_normal((3, *shape)) / 16, jnp.bfloat16) for shape in shapes)
    out = decode_experts(
        x, jnp.asarray(counts[None], jnp.int32), gate, up, down, None, activate=lambda g, u: jax.nn.silu(g) * u,
        alignment=GROUP, pieces=Pieces(64, 64, 128, 128), launch=Launch(1, interpret=pltpu.InterpretParams()),
    )  # fmt: skip
    at = 0
    for e, size in enumerate(-(-counts // GROUP) * GROUP):
        rows = np.asarray(x[at : at + size], np.float32)
        g, u = (rows @ np.asarray(w[e], np.float32) for w in (gate, up))
        expected = (g / (1 + np.exp(-g)) * u) @ np.asarray(down[e], np.float32)
        np.testing.assert_allclose(np.asarray(out[at : at + size], np.float32), expected, rtol=0.05, atol=0.05)
        at += size


ONE_BYTE = {
    # one scale for each block, of which the slabs and the columns of a product hold parts, or for each column
    "fp8 in blocks": {"dtype": "float8_e4m3fn", "block": (128, 128), "widened": False},
    "int8 in large blocks, one projection": {"dtype": "int8", "block": (256, 384), "gated": False},
    "int8 with scales of channels": {"dtype": "int8", "block": None},
    "fp8 with scales of channels, biases": {"dtype": "float8_e4m3fn", "block": None, "biased": True},
}


@pytest.mark.parametrize(("name", "dtype", "mode"), interpreter.in_turn(ONE_BYTE, 2))
def test_weights_of_one_byte(name, dtype, mode):
    """Scales are powers of two, so that a widened weight is exact: the bits of the product with widened weights."""
    case = ONE_BYTE[name]
    hidden, width, counts = 288, 672, np.array([40, 0, 5])  # 672: a column piece of 512 and one of 160
    rng = np.random.default_rng(5)
    x = whole_numbers(rng, int((-(-counts // GROUP) * GROUP).sum()), -(-hidden // 128) * 128)
    names = ("gate", "up", "down") if case.get("gated", True) else ("up", "down")
    shapes = {"gate": (hidden, width), "up": (hidden, width), "down": (width, hidden)}
    values, scales, widened = {}, {}, {}
    for n in names:
        rows, columns = shapes[n]
        values[n] = whole_numbers(rng, len(counts), rows, columns)
        a, b = case["block"] or (rows, 1)
        powers = 2.0 ** rng.integers(-7, -4, (len(counts), -(-rows // a), -(-columns // b)))
        scales[n] = powers.astype(np.float32)
        widened[n] = values[n] * powers.repeat(a, 1).repeat(b, 2)[:, :rows, :columns]
    biases = {n: whole_numbers(rng, len(counts), shapes[n][1]) / 4 for n in names} if case.get("biased") else None
    expected, used = by_numpy(x, counts[None], widened, biases, bfloat16 if dtype == "bfloat16" else np.asarray, GROUP)
    kernel = functools.partial(
        decode_experts,
        activate=product,
        alignment=GROUP,
        pieces=Pieces(rows_at_once=32, rows=16, depth=128, width=256, ahead=2, widened=case.get("widened", True)),
        launch=Launch(1, interpret=pltpu.InterpretParams(dma_execution_mode=mode, detect_races=True)),
    )
    given = {n: jnp.asarray(value, case["dtype"]) for n, value in values.items()}
    flat = {n: jnp.asarray(s[:, 0] if case["block"] is None else s.ravel()) for n, s in scales.items()}
    out = jax.jit(lambda x, received, given, biases, flat: kernel(
        x, received, given.get("gate"), given["up"], given["down"], biases,
        scales={n: (s, case["block"]) for n, s in flat.items()},
    ))(
        jnp.asarray(x, dtype), jnp.asarray(counts[None], jnp.int32), given,
        biases and {n: jnp.asarray(value) for n, value in biases.items()}, flat,
    )  # fmt: skip
    assert not interpreter.races_found(out)
    assert_bits(np.asarray(out.astype(jnp.float32))[used], np.asarray(expected, np.float32)[used], name)
    assert np.abs(expected).max() > 0.1, "the case tests nothing"


@pytest.mark.tpu_aot
@pytest.mark.parametrize(
    "generation", ["v6e", *(pytest.param(g, marks=pytest.mark.slow) for g in ("v5e", "v5p", "tpu7x"))]
)
@pytest.mark.parametrize("block", [(128, 128), None], ids=["blocks", "channels"])
def test_matrix_units_take_fp8_of_any_size(generation, block):
    """The last rows and columns of matrices that no tile divides compile, too."""
    pytest.importorskip("libtpu", reason="compiling for TPU needs libtpu: pip install 'xen-moe-jax[tpu]'")
    from benchmarks.tpu import topologies

    local, hidden, width = 3, 288, 672
    mesh = topologies.mesh(generation)

    def struct(dtype, *shape):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, P()))

    def experts(x, received, matrices, scales):
        return decode_experts(
            x, received, matrices["gate"], matrices["up"], matrices["down"], None, activate=product, alignment=GROUP,
            pieces=Pieces(32, 16, 256, 256, ahead=2, widened=False), launch=Launch(1, vmem_limit_bytes=2**25),
            scales={name: (scale, block) for name, scale in scales.items()},
        )  # fmt: skip

    shapes = {"gate": (hidden, width), "up": (hidden, width), "down": (width, hidden)}
    matrices = {name: struct("float8_e4m3fn", local, *shape) for name, shape in shapes.items()}
    blocks = -(-hidden // 128) * -(-width // 128)
    scales = {n: struct("float32", *((local * blocks,) if block else (local, s[1]))) for n, s in shapes.items()}
    mapped = jax.jit(jax.shard_map(experts, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False))
    given = struct("bfloat16", 64, 384), struct("int32", 1, local), matrices, scales
    text = mapped.trace(*given).lower(lowering_platforms=("tpu",)).compile().as_text()
    assert "xen_moe_decode_experts" in text and "f8e4m3fn" in text
