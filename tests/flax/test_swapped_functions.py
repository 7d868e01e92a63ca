"""Functions of JAX that are replaced while a layer is traced, as qwix does: no program outlives the replacement."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax", reason="needs xen-moe-jax[flax]")

from flax import nnx

from tests.support.layers import CONFIG, layer, make_mesh, tokens
from xen_moe_jax.flax import _shared_jit
from xen_moe_jax.flax.linen import MoE as LinenMoE

RAGGED_DOT = dataclasses.replace(CONFIG, grouped_matmul="ragged_dot", hidden_size=16)
CALLS = {
    "eager": lambda moe, x: moe(x)[0],
    "nnx.jit": lambda moe, x: nnx.jit(lambda moe, x: moe(x)[0])(moe, x),
    "gradient": lambda moe, x: jax.grad(lambda x: (moe(x)[0] ** 2).sum())(x),
}


def twice(function):
    return lambda *args, **kwargs: 2 * function(*args, **kwargs)


@pytest.mark.parametrize("where", [None, (2, 2)], ids=["one device", "dp x ep"])
@pytest.mark.parametrize("how", CALLS)
def test_a_replaced_function_is_seen_and_leaves_nothing_behind(how, where, monkeypatch):
    mesh = where and make_mesh(where, ("dp", "ep"))
    moe, x, call = layer(RAGGED_DOT, mesh=mesh), jnp.asarray(tokens(8)), CALLS[how]
    before = call(moe, x)  # traced before
    with monkeypatch.context() as swap:
        swap.setattr(jax.lax, "ragged_dot", twice(jax.lax.ragged_dot))
        during = call(moe, x)
        swap.setattr(jax.lax, "ragged_dot", twice(jax.lax.ragged_dot))
        again = call(moe, x)  # another replacement of the same function
    after, new = call(moe, x), call(layer(RAGGED_DOT, mesh=mesh), x)
    assert not np.allclose(during, before, rtol=0.1)
    assert not np.allclose(again, during, rtol=0.1)
    np.testing.assert_array_equal(after, before)
    np.testing.assert_array_equal(new, before)


def test_new_code_in_a_function_is_seen(monkeypatch):
    """qwix replaces the code object of a function, so that every alias of it is replaced."""
    moe, x = layer(RAGGED_DOT), jnp.asarray(tokens(8))
    before = moe(x)[0]
    original = types.FunctionType(jax.lax.ragged_dot.__code__, jax.lax.ragged_dot.__globals__)
    original.__defaults__, original.__kwdefaults__ = jax.lax.ragged_dot.__defaults__, jax.lax.ragged_dot.__kwdefaults__
    jax.lax.ragged_dot.__globals__["_original_ragged_dot"] = original

    def twice_by_code(*args, **kwargs):
        return 2 * _original_ragged_dot(*args, **kwargs)  # noqa: F821

    try:
        monkeypatch.setattr(jax.lax.ragged_dot, "__code__", twice_by_code.__code__)
        assert _shared_jit.swapped() == "jax.lax.ragged_dot"
        during = moe(x)[0]
    finally:
        monkeypatch.undo()
        del jax.lax.ragged_dot.__globals__["_original_ragged_dot"]
    assert _shared_jit.swapped() is None
    assert not np.allclose(during, before, rtol=0.1)
    np.testing.assert_array_equal(moe(x)[0], before)


def test_calls_alike_are_traced_once():
    traced = []

    def function(scale, x):
        traced.append(scale)
        return scale * x

    shared = _shared_jit.shared_jit(function, num_static=1)
    for _ in range(3):
        shared(2, jnp.ones(3))
    assert traced == [2]


def test_state_that_a_replacement_keeps_in_the_module_is_a_clear_error(monkeypatch):
    moe, x = layer(RAGGED_DOT), jnp.asarray(tokens(8))
    original = jax.lax.ragged_dot

    def keeping(*args, **kwargs):
        moe.kept = nnx.Variable(jnp.zeros(()))
        return original(*args, **kwargs)

    monkeypatch.setattr(jax.lax, "ragged_dot", keeping)
    with pytest.raises(NotImplementedError, match=r"jax\.lax\.ragged_dot was replaced .* PTQ and LoRA"):
        moe(x)


def qwix():
    return pytest.importorskip("qwix", reason="needs qwix, which is no dependency: pip install qwix")


@pytest.mark.parametrize(
    "config", [RAGGED_DOT, dataclasses.replace(CONFIG, layout="padded")], ids=["grouped", "padded"]
)
@pytest.mark.parametrize("how", ["eager", "nnx.jit"])
def test_qwix_qt(config, how):
    """int8 experts, by the same numbers as int8 operands of the experts' matmuls give."""
    library, call = qwix(), CALLS[how]
    moe, x = layer(config), jnp.asarray(tokens(32))
    before = call(moe, x)
    op = "ragged_dot" if config.layout == "grouped" else "einsum"
    rule = library.QtRule(module_path=".*", weight_qtype="int8", act_qtype="int8", op_names=(op,))
    quantized = library.quantize_model(moe, library.QtProvider([rule]), x)
    error = np.linalg.norm(call(quantized, x) - before) / np.linalg.norm(before)
    assert 1e-3 < error < 5e-2, "quantized, and not to nothing"
    np.testing.assert_array_equal(call(moe, x), before)
    np.testing.assert_array_equal(call(layer(config), x), before)
    gradient = jax.grad(lambda x: (quantized(x)[0] ** 2).sum())(x)
    assert np.isfinite(gradient).all() and np.abs(gradient).max() > 0


def test_qwix_qt_linen():
    library = qwix()
    x, moe = jnp.asarray(tokens(32)), LinenMoE(RAGGED_DOT)
    variables = moe.init(jax.random.key(0), x)
    before = moe.apply(variables, x)[0]
    rule = library.QtRule(module_path=".*", weight_qtype="int8", act_qtype="int8", op_names=("ragged_dot",))
    during = library.quantize_model(moe, library.QtProvider([rule])).apply(variables, x)[0]
    error = np.linalg.norm(during - before) / np.linalg.norm(before)
    assert 1e-3 < error < 5e-2
    np.testing.assert_array_equal(moe.apply(variables, x)[0], before)


@pytest.mark.parametrize("kind", ["PTQ", "LoRA"])
def test_qwix_ptq_and_lora_are_clear_errors_unless_rules_leave_the_layer_out(kind):
    library = qwix()

    def applied(module_path):
        if kind == "PTQ":
            provider = library.PtqProvider([library.QuantizationRule(module_path=module_path, weight_qtype="int8")])
        else:
            provider = library.LoraProvider([library.LoraRule(module_path=module_path, rank=2, alpha=1.0)])
        extra = {} if kind == "PTQ" else {"rngs": nnx.Rngs(0)}
        return library.quantize_model(layer(RAGGED_DOT), provider, jnp.asarray(tokens(8)), **extra)

    with pytest.raises(NotImplementedError, match="they do not support this layer"):
        applied(".*")
    x = jnp.asarray(tokens(8))
    np.testing.assert_array_equal(applied("another")(x)[0], layer(RAGGED_DOT)(x)[0])
