"""`xm.moe_mlp` with few tokens on a TPU, without Flax: the decode kernels, and the same values and gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import xen_moe_jax as xm
from tests.support import interpreter
from xen_moe_jax.experts import tpu_decode, tpu_decode_layer
from xen_moe_jax.pallas_kernels.decode_experts import GROUP

KERNEL = xm.KernelConfig(backend="pallas", interpret=True)
RANKS, TOKENS, EXPERTS, TOP_K, HIDDEN, WIDTH = 4, 6, 10, 2, 144, 96


def operands(experts=EXPERTS):
    rng = np.random.default_rng(0)
    local = -(-experts // RANKS)
    x = jnp.asarray(rng.standard_normal((RANKS * 2, TOKENS // 2, HIDDEN)), jnp.float32)
    idx = np.argsort(rng.random((*x.shape[:2], experts)), axis=2)[..., :TOP_K]
    idx[0, 0, 1] = -1
    factors = jnp.asarray(rng.random(idx.shape), jnp.float32)
    shapes = {"gate": (HIDDEN, WIDTH), "up": (HIDDEN, WIDTH), "down": (WIDTH, HIDDEN)}
    weights = {n: jnp.asarray(rng.standard_normal((RANKS * local, *s)) / 8, jnp.float32) for n, s in shapes.items()}
    biases = {n: jnp.asarray(rng.standard_normal((RANKS * local, s[1])), jnp.float32) for n, s in shapes.items()}
    return x, jnp.asarray(idx, jnp.int32), factors, weights, biases


def program(config, experts=EXPERTS, **options):
    mesh = jax.make_mesh((RANKS,), ("ep",), devices=jax.devices()[:RANKS], axis_types=(jax.sharding.AxisType.Auto,))

    def layer(x, idx, factors, weights, biases):
        result = xm.moe_mlp(
            x, idx, factors, weights["gate"], weights["up"], weights["down"],
            biases=(biases["gate"], biases["up"], biases["down"]), num_experts=experts, axis_name="ep",
            activation="clipped_swiglu", config=config, **options,
        )  # fmt: skip
        return (result[0], result[1].num_tokens_per_expert) if options.get("return_info") else result

    def loss(x, factors, weights, biases, idx):
        out = jax.shard_map(layer, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))(x, idx, factors, weights, biases)
        return jnp.sum(jnp.square(out[0] if options.get("return_info") else out)), out

    return jax.value_and_grad(loss, argnums=(0, 1, 2, 3), has_aux=True)


def test_a_call_with_few_tokens_is_one_kernel():
    x, idx, factors, weights, biases = operands()
    given = x, factors, weights, biases, idx
    own = program(KERNEL)
    assert "xen_moe_decode_layer" in str(jax.make_jaxpr(own)(*given))
    with interpreter.of_layers_alone():
        (_, y), gradients = jax.jit(own)(*given)
    (_, expected), expected_gradients = jax.jit(program(xm.KernelConfig()))(*given)

    def assert_close(value, wanted):
        assert np.abs(value - wanted).max() <= 3e-6 * np.abs(wanted).max()

    assert_close(y, expected)
    jax.tree.map(assert_close, gradients, expected_gradients)


def test_an_index_of_64_bits_beyond_32_is_an_unused_slot():
    x, idx, factors, weights, biases = operands()
    with jax.enable_x64():
        far = jnp.where(idx == 3, 2**32 + 3, idx.astype(jnp.int64))
        traced = jax.make_jaxpr(program(KERNEL))(x, factors, weights, biases, far)
        assert "xen_moe_decode_layer" in str(traced)
        with interpreter.of_layers_alone():
            (_, y), _ = jax.jit(program(KERNEL))(x, factors, weights, biases, far)
    (_, expected), _ = jax.jit(program(xm.KernelConfig()))(x, factors, weights, biases, jnp.where(idx == 3, -1, idx))
    assert np.abs(y - expected).max() <= 3e-6 * np.abs(expected).max()


def test_counts_come_from_a_dispatch_and_its_experts_are_a_kernel():
    x, idx, factors, weights, biases = operands()
    given = x, factors, weights, biases, idx
    own = program(KERNEL, return_info=True)
    text = str(jax.make_jaxpr(own)(*given))
    assert "xen_moe_decode_experts" in text and "xen_moe_decode_layer" not in text
    with interpreter.of_layers_alone():
        (_, (y, counts)), _ = jax.jit(own)(*given)
    (_, (expected, expected_counts)), _ = jax.jit(program(xm.KernelConfig(), return_info=True))(*given)
    assert np.abs(y - expected).max() <= 3e-6 * np.abs(expected).max()
    np.testing.assert_array_equal(counts, expected_counts)


@pytest.mark.parametrize(
    "options",
    [{"capacity": 64}, {"grouped_matmul": "ragged_dot"}, {"layout": "padded"}, {"experts_of_all": 4}],
    ids=["a capacity", "a grouped matmul", "padded", "fewer experts than slots"],
)
def test_other_calls_keep_their_grouped_matmuls(options):
    """A rank with fewer experts than a token has slots has a worst case that names of one expert twice can exceed."""
    experts = options.pop("experts_of_all", EXPERTS)
    x, idx, factors, weights, biases = operands(experts)
    text = str(jax.make_jaxpr(program(KERNEL, experts, **options))(x, factors, weights, biases, idx))
    assert "xen_moe_decode" not in text and "xen_moe_dispatch" in text


def test_arguments_are_checked_as_a_dispatch_checks_them():
    x, idx, factors, weights, biases = operands()
    with pytest.raises(ValueError, match="slots_per_rank=8 without balance"):
        jax.make_jaxpr(program(KERNEL, slots_per_rank=8))(x, factors, weights, biases, idx)
    with pytest.raises((TypeError, ValueError), match="topk_idx"):
        jax.make_jaxpr(program(KERNEL))(x, factors, weights, biases, idx.astype(jnp.float32))
    with pytest.raises(ValueError, match="topk_weights"):
        jax.make_jaxpr(program(KERNEL))(x, factors[..., :1], weights, biases, idx)


def test_lists_are_arrays_as_on_other_backends():
    x, idx, factors, weights, _ = operands()
    lists = [array[:2].tolist() for array in (x, idx, factors)]
    mesh = jax.make_mesh((RANKS,), ("ep",), devices=jax.devices()[:RANKS], axis_types=(jax.sharding.AxisType.Auto,))

    def layer(weights):
        return xm.moe_mlp(*lists, **weights, num_experts=EXPERTS, axis_name="ep", config=KERNEL)

    mapped = jax.shard_map(layer, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))
    assert "xen_moe_decode_layer" in str(jax.make_jaxpr(mapped)(weights))


@pytest.mark.parametrize(("tokens", "top_k", "local"), [(1, 8, 64), (1, 1, 1), (8, 1, 256), (128, 8, 16)])
def test_every_visit_has_room_for_rows(tokens, top_k, local):
    """Also where far fewer rows come than there are experts."""
    matrices = tpu_decode.Matrices((local, 1024, 512), "bfloat16", True, False, None)
    chosen = tpu_decode_layer.layer_pieces(2**27, 1, 8, (tokens, top_k), matrices)
    assert chosen is not None and chosen.pieces.rows % GROUP == 0 < chosen.pieces.rows <= chosen.pieces.rows_at_once


@pytest.mark.parametrize(("local", "cores"), [(16, 2), (15, None)])
def test_two_cores_share_an_even_number_of_experts(local, cores):
    """They share weights of one byte with few rows, too."""
    matrices = tpu_decode.Matrices((local, 1024, 512), "bfloat16", True, False, None)
    chosen = tpu_decode_layer.layer_pieces(2**26, 2, 8, (128, 8), matrices)
    assert (chosen and chosen.cores) == cores
    few = tpu_decode_layer.layer_pieces(2**26, 2, 8, (32, 8), matrices)
    assert few is not None and few.cores == 1, "one core keeps up"
    scaled = tpu_decode_layer.layer_pieces(2**26, 2, 8, (32, 8), matrices._replace(scaled=tpu_decode.Scaled(0, True)))
    assert (scaled and scaled.cores) == cores


@pytest.mark.parametrize(
    ("ranks", "local", "mebibytes", "cores"),
    [(8, 32, 64, 2), (8, 31, 64, 1), (1, 32, 64, 1), (8, 32, 12, None)],
)
def test_one_core_takes_a_layer_that_two_cannot_share(ranks, local, mebibytes, cores):
    """A product has 48 rows. Two cores share the layer; one takes it with an odd number of experts, and on one rank;
    neither does where VMEM is too small."""
    matrices = tpu_decode.Matrices((local, 1024, 512), "bfloat16", True, False, None)
    chosen = tpu_decode_layer.layer_pieces(mebibytes * 2**20, 2, ranks, (128, 8), matrices)
    assert (chosen and chosen.cores) == cores
