"""Chunks and remat change the lifetime of arrays, and nothing else."""

import dataclasses
import math
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax", reason="needs xen-moe-jax[flax]")

from flax import nnx

import xen_moe_jax as xm
from benchmarks.tpu import topologies as tpu_topologies
from tests.support.layers import (
    CONFIG,
    GPT_OSS,
    H,
    assert_same_gradients,
    biased,
    layer,
    make_mesh,
    run_with_gradients,
    tokens,
)
from xen_moe_jax.flax import _chunks

SPLIT = xm.KernelConfig(backend="pallas")
"""A backend with asynchronous operations: its programs can be traced here, and are not run."""


@pytest.fixture(scope="module")
def whole():
    """One piece, nothing recomputed; 2 x 5 tokens."""
    mesh = make_mesh((2,), ("ep",))
    config = dataclasses.replace(CONFIG, num_shared_experts=1, aux_loss_weight=0.5)
    moe, x, target = layer(config), tokens(10), tokens(10, seed=9)
    return config, mesh, x, target, run_with_gradients(moe, x, target, mesh)


@pytest.mark.parametrize(
    ("remat", "flights"),
    [("none", False), ("experts", False), ("all", False), ("none", True), ("experts", True)],
    ids=["none", "experts", "all", "none, flights", "experts, flights"],
)
def test_same_results_in_chunks(remat, flights, whole, monkeypatch):
    """Three chunks of a rank's five tokens: the last one is filled up. `flights`: by start and done, which are whole
    operations here."""
    if flights:
        monkeypatch.setattr(_chunks, "_overlaps", lambda *_: True)
    config, mesh, x, target, (y, metrics, gradients) = whole
    chunked = layer(dataclasses.replace(config, num_chunks=3, remat=remat))
    y_chunked, metrics_chunked, gradients_chunked = run_with_gradients(chunked, x, target, mesh)
    np.testing.assert_allclose(y_chunked, y, rtol=1e-6, atol=1e-6)
    chex.assert_trees_all_close(metrics_chunked, metrics, rtol=1e-6)
    assert_same_gradients(gradients_chunked, gradients, rtol=1e-5, atol=1e-5)


def test_same_results_in_chunks_padded_with_biases():
    mesh = make_mesh((2,), ("ep",))
    config = dataclasses.replace(GPT_OSS, layout="padded")
    x, target = tokens(8), tokens(8, seed=9)
    one = run_with_gradients(biased(layer(config)), x, target, mesh)
    two = run_with_gradients(biased(layer(dataclasses.replace(config, num_chunks=2, remat="all"))), x, target, mesh)
    np.testing.assert_allclose(two[0], one[0], rtol=1e-6, atol=1e-6)
    assert_same_gradients(two[2], one[2], rtol=1e-5, atol=1e-5)


def test_a_capacity_is_divided_by_the_chunks():
    config = dataclasses.replace(CONFIG, capacity=10, num_chunks=4)
    assert config.chunk_capacity(4, 2) == 3
    assert dataclasses.replace(CONFIG, capacity_factor=1.25, num_chunks=4).chunk_capacity(8, 4) == 20  # of 8 tokens


def gradient_program(config, policy=None):
    """The gradient's jaxpr on 4 ranks of 8 tokens; a policy rematerialises the whole layer."""
    graph, state = nnx.split(layer(config))

    def apply(state, x):
        return nnx.merge(graph, state)(x)[0]

    if policy is not None:
        apply = jax.checkpoint(apply, policy=policy)
    with jax.set_mesh(make_mesh((4,), ("ep",))):
        loss = jax.grad(lambda state, x: (apply(state, x) ** 2).sum(), argnums=(0, 1))
        return list(every_equation(jax.make_jaxpr(loss)(state, tokens(32)).jaxpr))


def every_equation(jaxpr):
    """Equations of a jaxpr and of all jaxprs that it calls, once for each call; in a loop, once for each turn."""
    for equation in jaxpr.eqns:
        yield equation
        times = equation.params["length"] if equation.primitive.name == "scan" else 1
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                for _ in range(times):
                    yield from every_equation(inner)


def count(program, primitive):
    return sum(equation.primitive.name == primitive for equation in program)


@pytest.mark.parametrize("kernel", [xm.KernelConfig(), SPLIT], ids=["whole", "start-done"])
@pytest.mark.parametrize("num_chunks", [1, 3])
def test_how_often_the_backward_pass_dispatches(num_chunks, kernel):
    """Whole where there is one chunk, or one at a time; started where chunks overlap."""
    config = dataclasses.replace(CONFIG, num_chunks=num_chunks, kernel=kernel)
    programs = {
        remat: gradient_program(dataclasses.replace(config, remat=remat)) for remat in ("none", "experts", "all")
    }
    starts = {remat: count(program, "xen_moe_dispatch_start") for remat, program in programs.items()}
    started = num_chunks if num_chunks > 1 and kernel == SPLIT else 0
    assert starts == {"none": started, "experts": started, "all": 0}
    dispatches = {remat: starts[remat] + count(program, "xen_moe_dispatch") for remat, program in programs.items()}
    assert dispatches == {"none": num_chunks, "experts": num_chunks, "all": 2 * num_chunks}
    matmuls = {remat: count(program, "ragged_dot_general") for remat, program in programs.items()}
    # forward, and two a matmul backward; then all of them again but the one whose result only the output needs
    assert matmuls["none"] == 9 * num_chunks < matmuls["experts"] <= 12 * num_chunks


def test_a_policy_of_your_own_repeats_no_dispatch():
    """The example of docs/user/performance.md, beside the policy that saves nothing."""
    names = jax.checkpoint_policies.save_only_these_names("xen_moe_rows", "xen_moe_handle", "xen_moe_out")
    nothing = jax.checkpoint_policies.nothing_saveable
    for config in (CONFIG, dataclasses.replace(CONFIG, layout="padded"), dataclasses.replace(CONFIG, num_chunks=2)):
        assert count(gradient_program(config, policy=names), "xen_moe_dispatch") == config.num_chunks
        assert count(gradient_program(config, policy=nothing), "xen_moe_dispatch") == 2 * config.num_chunks
    # chunks whose operations overlap: their rows are named behind the barrier too
    config = dataclasses.replace(CONFIG, num_chunks=2, kernel=SPLIT)
    assert count(gradient_program(config, policy=names), "xen_moe_dispatch_start") == 2
    assert count(gradient_program(config, policy=nothing), "xen_moe_dispatch_start") == 4


def test_worst_case_rows_shrink_by_the_chunks():
    for num_chunks in (1, 4):
        program = gradient_program(dataclasses.replace(CONFIG, num_chunks=num_chunks))
        rows = {e.outvars[0].aval.shape for e in program if e.primitive.name == "xen_moe_dispatch"}
        assert rows == {(4 * 8 * 2 // num_chunks, H)}, "ranks x tokens x slots"


def test_memory_of_the_compiled_program_shrinks():
    """Compares XLA's figures of the memory besides arguments and results, forward and with the backward pass."""

    def temporary_bytes(gradient, **changes):
        # wide tokens and narrow experts: the rows, not the CPU's masks for `ragged_dot`, decide
        config = dataclasses.replace(CONFIG, hidden_size=256, intermediate_size=8, num_experts=4, **changes)
        graph, state = nnx.split(layer(config))
        x = jnp.zeros((512, 256))

        def loss(state, x):
            return (nnx.merge(graph, state)(x)[0] ** 2).sum()

        with jax.set_mesh(make_mesh((2,), ("ep",))):
            call = jax.grad(loss, argnums=(0, 1)) if gradient else loss
            return jax.jit(call).lower(state, x).compile().memory_analysis().temp_size_in_bytes

    # Chunks do not shrink the memory of the tokens and of the exchange itself: less than half of one piece's at these
    # sizes.
    forward = [temporary_bytes(False, num_chunks=c) for c in (1, 4)]
    backward = [temporary_bytes(True), temporary_bytes(True, num_chunks=4, remat="all")]
    assert forward[1] < 0.6 * forward[0]
    assert backward[1] < 0.6 * backward[0]


@pytest.mark.parametrize("remat", ["experts", "all"])
def test_gradients_of_the_weights_are_one_sum(remat):
    """There is one sum and the addend of one chunk, not one addend for each chunk; the weights are far larger than the
    rows."""
    config = dataclasses.replace(CONFIG, hidden_size=64, intermediate_size=128, num_chunks=8, remat=remat)
    graph, state = nnx.split(layer(config))

    def loss(state, x):
        return (nnx.merge(graph, state)(x)[0] ** 2).sum()

    with jax.set_mesh(make_mesh((2,), ("ep",))):
        compiled = jax.jit(jax.grad(loss)).lower(state, jnp.zeros((32, 64))).compile()
    experts = 3 * config.num_experts // 2 * 64 * 128 * 4
    assert 0 < compiled.memory_analysis().temp_size_in_bytes < 3.5 * experts


def test_start_and_done_are_tied_to_the_experts():
    """With asynchronous operations, barriers write the order into the program: start, experts, done."""
    config = dataclasses.replace(CONFIG, num_chunks=3, kernel=SPLIT)
    graph, state = nnx.split(layer(config))
    with jax.set_mesh(make_mesh((4,), ("ep",))):
        jaxpr = jax.make_jaxpr(lambda state, x: nnx.merge(graph, state)(x)[0])(state, tokens(48))
    inner = next(e for e in _equations(jaxpr.jaxpr) if e.primitive.name == "shard_map").params["jaxpr"]
    order = [e.primitive.name.removeprefix("xen_moe_") for e in _equations(inner)]
    kept = [name for name in order if name.startswith(("dispatch_", "combine_")) or name == "ragged_dot_general"]
    experts = ["ragged_dot_general"] * 3
    assert kept == [
        *("dispatch_start", "dispatch_done", "dispatch_start", *experts, "combine_start"),
        *("dispatch_done", "dispatch_start", *experts, "combine_done", "combine_start"),
        *("dispatch_done", *experts, "combine_done", "combine_start", "combine_done"),
    ]
    depends = _dependencies(inner)
    by_name = {name: [i for i, other in enumerate(order) if other == name] for name in set(order)}
    first_matmul = by_name["ragged_dot_general"][::3]
    last_matmul = by_name["ragged_dot_general"][2::3]
    for i in range(2):
        assert by_name["dispatch_start"][i + 1] in depends[first_matmul[i]], "the wire works under the experts"
        assert last_matmul[i] in depends[by_name["dispatch_done"][i + 1]], "rows land when their room is free"
        assert last_matmul[i + 1] in depends[by_name["combine_done"][i]], "the experts hide the way back"


def _equations(jaxpr):
    for equation in jaxpr.eqns:
        inner = [v for v in equation.params.values() if hasattr(v, "eqns") or hasattr(v, "jaxpr")]
        if equation.primitive.name in ("jit", "pjit") and inner:
            yield from _equations(getattr(inner[0], "jaxpr", inner[0]))
        else:
            yield equation


def _dependencies(jaxpr):
    """For each equation in `_equations` order, the numbers of the equations that must run before it."""
    made, before = {}, []

    def walk(jaxpr):
        for equation in jaxpr.eqns:
            inner = [v for v in equation.params.values() if hasattr(v, "eqns") or hasattr(v, "jaxpr")]
            needs = set()
            for variable in equation.invars:
                needs |= made.get(id(variable), set())
            if equation.primitive.name in ("jit", "pjit") and inner:
                body = getattr(inner[0], "jaxpr", inner[0])
                for outside, inside in zip(equation.invars, body.invars, strict=True):
                    made[id(inside)] = made.get(id(outside), set())
                walk(body)
                for outside, inside in zip(equation.outvars, body.outvars, strict=True):
                    made[id(outside)] = made.get(id(inside), set())
                continue
            before.append(needs)
            for variable in equation.outvars:
                made[id(variable)] = needs | {len(before) - 1}

    walk(jaxpr)
    return before


def test_chunks_take_turns_where_operations_do_not_overlap(monkeypatch):
    """Operations are synchronous, as on GPUs, and each chunk's dispatch follows the combine of the previous chunk."""
    monkeypatch.setattr(_chunks, "OVERLAPPING", ())
    config = dataclasses.replace(CONFIG, num_chunks=4, kernel=SPLIT)  # unlike any traced before
    graph, state = nnx.split(layer(config))
    with jax.set_mesh(make_mesh((4,), ("ep",))):
        jaxpr = jax.make_jaxpr(lambda state, x: nnx.merge(graph, state)(x)[0])(state, tokens(48))
    inner = next(e for e in _equations(jaxpr.jaxpr) if e.primitive.name == "shard_map").params["jaxpr"]
    order = [e.primitive.name for e in _equations(inner)]
    assert not any(name.endswith(("_start", "_done")) for name in order)
    depends = _dependencies(inner)
    sent, back = ([i for i, name in enumerate(order) if name == f"xen_moe_{what}"] for what in ("dispatch", "combine"))
    assert len(sent) == len(back) == 4
    for i in range(3):
        assert back[i] in depends[sent[i + 1]]


def test_chunks_of_more_than_there_are_tokens():
    config = dataclasses.replace(CONFIG, num_chunks=4)
    moe, x = layer(config), tokens(3)
    y, _ = moe(jnp.asarray(x))
    np.testing.assert_allclose(y, layer(CONFIG)(jnp.asarray(x))[0], rtol=1e-6, atol=1e-6)
    assert math.isfinite(float(y.sum()))


@pytest.mark.tpu_aot
def test_the_compiled_tpu_program_keeps_the_order():
    """The scheduled program for a v5e: the wire works under the experts of both chunks."""
    pytest.importorskip("libtpu", reason="needs libtpu, from xen-moe-jax[tpu]")
    mesh = tpu_topologies.mesh("v5e")
    config = dataclasses.replace(CONFIG, hidden_size=256, intermediate_size=128, num_chunks=2, dtype=jnp.bfloat16)
    graph, state = nnx.split(layer(config))
    specs = nnx.get_partition_spec(state)

    def abstract(a, spec):
        return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=jax.NamedSharding(mesh, spec))

    given = jax.tree.map(abstract, nnx.to_pure_dict(state), nnx.to_pure_dict(specs))

    def apply(weights, x):
        nnx.replace_by_pure_dict(state, weights)
        return nnx.merge(graph, state)(x)[0]

    x = abstract(jnp.zeros((512, 256), jnp.bfloat16), jax.P("ep"))
    with jax.set_mesh(mesh):
        text = jax.jit(apply).lower(given, x).compile().as_text()
    kernel = re.compile(
        r"\s*(?:ROOT )?%(xen_moe_start|xen_moe_done|ragged-dot-none|xen_moe_decode_experts)\S* = .*custom-call\("
    )
    order = []
    for line in text[text.index("\nENTRY") :].splitlines():
        if (found := kernel.match(line)) and order[-1:] != [found[1]]:
            order.append(found[1])
    start, done, experts = "xen_moe_start", "xen_moe_done", "xen_moe_decode_experts"
    there, back = [start, experts, done], [start, experts, done]  # the second chunk's dispatch, the first one's combine
    assert order == [start, done, *there, *back, start, done]
