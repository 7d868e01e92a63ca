"""The two front ends: equal outputs for equal weights, parameters with shardings, checkpoints, optimisers."""

import dataclasses
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax", reason="needs xen-moe-jax[flax]")

import flax.linen as nn
from flax import nnx

from tests.support.layers import CONFIG, DEEPSEEK, H, layer, make_mesh, run, tokens, weights_of
from xen_moe_jax.flax import updated_bias
from xen_moe_jax.flax.linen import MoE as LinenMoE
from xen_moe_jax.flax.nnx import MoE, RouterBias


def linen_variables(moe):
    weights = weights_of(moe)
    bias = weights.pop("router_bias", None)
    return {"params": weights} | ({} if bias is None else {"router_state": {"router_bias": bias}})


def specs_of(moe):
    return nnx.to_pure_dict(nnx.get_partition_spec(nnx.state(moe)))


@pytest.mark.parametrize("config", [CONFIG, DEEPSEEK], ids=["softmax", "DeepSeek-V3"])
def test_front_ends_agree(config):
    mesh = make_mesh((2, 4), ("dp", "ep"))
    moe, x = layer(config), tokens(8, 4)
    y, metrics = run(moe, x, mesh)
    with jax.set_mesh(mesh):
        linen_y, linen_metrics = jax.jit(LinenMoE(config).apply)(linen_variables(moe), x)
    np.testing.assert_array_equal(linen_y, y)
    chex.assert_trees_all_equal(linen_metrics, metrics, strict=True)


@pytest.mark.parametrize("config", [CONFIG, DEEPSEEK], ids=["softmax", "DeepSeek-V3"])
def test_same_parameters(config):
    moe = MoE(config, rngs=nnx.Rngs(0))
    variables = nn.unbox(jax.eval_shape(LinenMoE(config).init, jax.random.key(0), jnp.zeros((8, H))))
    chex.assert_trees_all_equal_shapes_and_dtypes(variables, linen_variables(moe))


def test_initial_weights_keep_the_size_of_activations():
    """Unit fan-in variance for every expert: the expert dimension is a batch, not a fan."""
    weights = weights_of(MoE(dataclasses.replace(CONFIG, hidden_size=64, intermediate_size=96), rngs=nnx.Rngs(0)))
    for name, fan_in in (("router", 64), ("gate", 64), ("up", 64), ("down", 96)):
        assert weights[name].std() == pytest.approx(fan_in**-0.5, rel=0.1), name


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_shardings(kind):
    mesh = make_mesh((2, 4), ("dp", "ep"), jax.sharding.AxisType[kind])
    expected = {
        "router": jax.P(None, None),
        "gate": jax.P("ep", None, None),
        "up": jax.P("ep", None, None),
        "down": jax.P("ep", None, None),
    }
    with jax.set_mesh(mesh):
        moe = MoE(CONFIG, rngs=nnx.Rngs(0))
        variables = jax.jit(LinenMoE(CONFIG).init)(jax.random.key(0), jnp.zeros((8, H)))
    assert specs_of(moe) == expected
    assert nn.get_partition_spec(variables)["params"] == expected
    # Not only a name: a rank holds its own two experts.
    assert {shard.data.shape for shard in moe.gate[...].addressable_shards} == {(2, H, 24)}


def test_shardings_of_your_own_and_of_no_mesh():
    named = dataclasses.replace(CONFIG, expert_sharding=("expert", "embed", "mlp"))
    moe = MoE(named, rngs=nnx.Rngs(0))  # no mesh: the names are kept for later
    assert specs_of(moe)["gate"] == jax.P("expert", "embed", "mlp")
    assert specs_of(moe)["down"] == jax.P("expert", "mlp", "embed")


def test_uneven_experts_are_replicated():
    with jax.set_mesh(make_mesh((2, 4), ("dp", "ep"))):
        moe = MoE(dataclasses.replace(CONFIG, num_experts=10), rngs=nnx.Rngs(0))
    assert specs_of(moe)["gate"] == jax.P(None, None, None)


def test_checkpoint_restores_on_another_mesh(tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint", reason="needs xen-moe-jax[flax]")
    x = tokens(8, 4)
    first, second = make_mesh((2, 4), ("dp", "ep")), make_mesh((1, 8), ("dp", "ep"))
    with jax.set_mesh(first):
        moe = layer(DEEPSEEK, seed=5)
    y, metrics = run(moe, x, first)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "moe", nnx.to_pure_dict(nnx.state(moe)))
        checkpointer.wait_until_finished()

        graph, abstract = nnx.get_abstract_model(lambda: MoE(DEEPSEEK, rngs=nnx.Rngs(0)), second)
        restored = checkpointer.restore(tmp_path / "moe", nnx.to_pure_dict(abstract))
    assert {shard.data.shape for shard in restored["gate"].addressable_shards} == {(1, H, 24)}
    nnx.replace_by_pure_dict(abstract, restored)
    again = nnx.merge(graph, abstract)
    y_again, metrics_again = run(again, x, second)
    chex.assert_trees_all_equal(weights_of(again), weights_of(moe), strict=True)
    np.testing.assert_allclose(y_again, y, rtol=1e-6, atol=1e-6)  # other ranks, another order of the float32 sums
    np.testing.assert_array_equal(metrics_again.tokens_per_expert, metrics.tokens_per_expert)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_checkpoint_restores_by_the_shapes_of_eval_shape(kind, tmp_path):
    """Under `jax.set_mesh` these shapes name an abstract mesh, on which Orbax places no array: they get the mesh."""
    ocp = pytest.importorskip("orbax.checkpoint", reason="needs xen-moe-jax[flax]")
    mesh = make_mesh((8,), ("ep",), jax.sharding.AxisType[kind])
    with jax.set_mesh(mesh), ocp.StandardCheckpointer() as checkpointer:
        moe = layer(DEEPSEEK, seed=5)
        checkpointer.save(tmp_path / "moe", nnx.to_pure_dict(nnx.state(moe)))
        checkpointer.wait_until_finished()

        graph, state = nnx.split(nnx.eval_shape(lambda: MoE(DEEPSEEK, rngs=nnx.Rngs(0))))
        target = jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            state,
            nnx.get_named_sharding(state, mesh),
        )
        restored = checkpointer.restore(tmp_path / "moe", nnx.to_pure_dict(target))
    assert {shard.data.shape for shard in restored["gate"].addressable_shards} == {(1, H, 24)}
    nnx.replace_by_pure_dict(state, restored)
    chex.assert_trees_all_equal(weights_of(nnx.merge(graph, state)), weights_of(moe), strict=True)


def test_optax_steps_lower_the_loss_nnx():
    optax = pytest.importorskip("optax", reason="needs xen-moe-jax[flax]")
    config = dataclasses.replace(DEEPSEEK, bias_update_rate=0.01)
    x, target = tokens(64), np.abs(tokens(64, seed=3))
    with jax.set_mesh(make_mesh((2, 4), ("dp", "ep"))):
        moe = MoE(config, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(moe, optax.adam(1e-2), wrt=nnx.Param)

        @nnx.jit
        def step(moe, optimizer):
            def loss(moe):
                y, metrics = moe(x)
                return jnp.mean((y - target) ** 2) + metrics.aux_loss, metrics

            (value, metrics), gradients = nnx.value_and_grad(loss, has_aux=True)(moe)
            optimizer.update(moe, gradients)
            moe.update_bias(metrics)
            return value

        losses = [float(step(moe, optimizer)) for _ in range(20)]
        assert moe.gate[...].sharding.spec == jax.P("ep", None, None), "a step keeps the sharding"
    assert losses[-1] < 0.7 * losses[0]
    assert np.abs(np.asarray(moe.router_bias[...])).max() >= 0.01
    assert isinstance(moe.router_bias, RouterBias) and not isinstance(moe.router_bias, nnx.Param)


def test_optax_steps_lower_the_loss_linen():
    optax = pytest.importorskip("optax", reason="needs xen-moe-jax[flax]")
    x, target = tokens(64), np.abs(tokens(64, seed=3))
    moe, tx = LinenMoE(CONFIG), optax.adam(1e-2)
    with jax.set_mesh(make_mesh((2, 4), ("dp", "ep"))):
        params = nn.unbox(jax.jit(moe.init)(jax.random.key(0), x))["params"]
        state = tx.init(params)

        @jax.jit
        def step(params, state):
            def loss(params):
                y, metrics = moe.apply({"params": params}, x)
                return jnp.mean((y - target) ** 2) + metrics.aux_loss

            value, gradients = jax.value_and_grad(loss)(params)
            updates, state = tx.update(gradients, state)
            return optax.apply_updates(params, updates), state, value

        losses = []
        for _ in range(20):
            params, state, value = step(params, state)
            losses.append(float(value))
    assert losses[-1] < 0.7 * losses[0]


def test_linen_bias_moves_only_when_mutable():
    moe, x = layer(DEEPSEEK), tokens(64)
    variables = linen_variables(moe)
    linen = LinenMoE(DEEPSEEK)
    (_, metrics), moved = jax.jit(lambda v, x: linen.apply(v, x, mutable=["router_state"]))(variables, x)
    before = variables["router_state"]["router_bias"]
    after = moved["router_state"]["router_bias"]
    np.testing.assert_array_equal(after, updated_bias(before, metrics.tokens_per_expert, DEEPSEEK.bias_update_rate))
    assert not np.array_equal(after, before)
    initial = jax.jit(linen.init)(jax.random.key(0), x)["router_state"]["router_bias"]
    assert not np.asarray(initial).any(), "making the parameters moves nothing"


def forward(moe, x):
    return moe(x)[0]


def without_state(moe, x):
    graph, state = nnx.split(moe)
    return jax.jit(lambda state, x: forward(nnx.merge(graph, state), x)).lower(state, x).compile()


WAYS = {  # of a call that assigns nothing -> its compiled program
    "nnx.jit": lambda moe, x: nnx.jit(forward).lower(moe, x).compile(),
    "graph_updates=False": lambda moe, x: nnx.jit(forward, graph_updates=False).lower(moe, x).compile(),
    "nnx.split and jax.jit": without_state,
}


def test_a_call_that_assigns_nothing_returns_and_copies_no_weights():
    """The ways that docs/user/flax.md shows; Flax's default returns every weight, and XLA copies what it returns."""
    moe, x = layer(CONFIG), tokens(8)
    weights = weights_of(moe)
    returned, copies = {}, {}
    for name, compiled in WAYS.items():
        program = compiled(moe, x)
        returned[name] = program.memory_analysis().output_size_in_bytes
        copies[name] = len(re.findall(r"= f32\[[\d,]+\]\S* copy\(", program.as_text()))
    default, *others = WAYS
    assert [returned[name] for name in others] == [x.nbytes] * len(others)
    assert returned[default] >= x.nbytes + sum(w.nbytes for w in weights.values())
    assert [copies[default] - copies[name] for name in others] == [len(weights)] * len(others)
