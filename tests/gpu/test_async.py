"""Start and done on GPUs: the bits of synchronous operations, several pending at once, gradients, and failures."""

from __future__ import annotations

import dataclasses
import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xen_moe_jax as xm
from tests.gpu import async_programs
from tests.gpu.programs import assert_poisoned, dispatch, operands, over, round_trip, skipped_on, zeros_like_results
from tests.support import conformance
from xen_moe_jax import cuda

CONFIG = xm.KernelConfig(backend="cuda", timeout_s=20.0)
HASTY = dataclasses.replace(CONFIG, timeout_s=3.0)


class StartAndDone(conformance.Conformance):
    config = dataclasses.replace(CONFIG, channel=1)  # programs are cached by it: not one of whole operations

    @pytest.fixture(autouse=True)
    def by_start_and_done(self, monkeypatch, request):
        monkeypatch.setattr(xm, "dispatch", lambda *a, **k: xm.dispatch_done(xm.dispatch_start(*a, **k)))
        monkeypatch.setattr(xm, "combine", lambda *a, **k: xm.combine_done(xm.combine_start(*a, **k)))
        yield
        if request.node.name.startswith("test_dispatch_and_combine"):
            assert launched(1) > 0  # the halves ran: asynchronous operations have memory of their own


def launched(channel: int) -> int:
    return sum(w["launches"] for w in cuda.workspaces() if w["flights"] and w["channel"] == channel)


@pytest.mark.gpu1
class TestOneRank(StartAndDone):
    num_ranks = 1
    two_axis_sizes = None


@pytest.mark.gpu2
class TestTwoRanks(StartAndDone):
    num_ranks = 2
    two_axis_sizes = None


@pytest.mark.gpu4
class TestFourRanks(StartAndDone):
    num_ranks = 4
    two_axis_sizes = (2, 2)


def mesh_of(*sizes):
    """Returns a fixture: a mesh of each of these numbers of ranks."""

    @pytest.fixture(params=[pytest.param(ranks, marks=getattr(pytest.mark, f"gpu{ranks}")) for ranks in sizes])
    def mesh(request, gpu_mesh):
        yield gpu_mesh((request.param,), ("ep",))
        cuda.reset()
        xm.check()

    return mesh


mesh = mesh_of(1, 2, 4)
several = mesh_of(2, 4)
"""Meshes for tests in which one rank behaves differently from the rest."""


def assert_same(mesh, body, *args, **options):
    """`body(way, ...)` gives the same bits by start and done as synchronously."""
    whole = over(mesh, lambda *a: body(async_programs.WHOLE, CONFIG, *a), len(args), **options)(*args)
    program = over(mesh, lambda *a: body(async_programs.SPLIT, CONFIG, *a), len(args), **options)
    for _ in range(3):
        before = launched(0)
        split = program(*args)
        for got, wanted in zip(jax.tree.leaves(split), jax.tree.leaves(whole), strict=True):
            np.testing.assert_array_equal(np.asarray(got), np.asarray(wanted))
        assert launched(0) > before


@pytest.mark.parametrize("name", async_programs.BODIES)
def test_the_same_bits(mesh, name):
    assert_same(mesh, async_programs.BODIES[name], *async_programs.arguments(mesh))


@pytest.mark.parametrize("layout", ["grouped", "ranked", "padded"])
@pytest.mark.parametrize("remat", ["none", "all", "names"])
def test_gradients(mesh, layout, remat):
    assert_same(mesh, async_programs.gradients(layout, remat), *async_programs.arguments(mesh))


@pytest.mark.parametrize("options", [{"gradient_wire": "float8_e4m3fn"}, {"wire": "mxfp4", "gradient_wire": "mxfp4"}])
def test_gradients_travel_by_their_own_wire(mesh, options):
    assert_same(mesh, async_programs.gradients("grouped", "none", **options), *async_programs.arguments(mesh))


def test_a_flight_that_xla_moves_is_an_error_or_right(mesh):
    """Carried through a loop its buffers may be copied, too early."""
    x, idx, weights = operands(mesh)

    def body(x, idx, weights):
        def turn(carry, _):
            flight, total = carry
            routed = xm.dispatch_done(flight)
            again = xm.dispatch_start(x, idx, weights, num_experts=16, axis_name="ep", config=CONFIG)
            return (again, total + jnp.sum(routed.weights)), None

        first = xm.dispatch_start(x, idx, weights, num_experts=16, axis_name="ep", config=CONFIG)
        (last, total), _ = jax.lax.scan(turn, (first, jnp.zeros(())), length=4)
        return xm.combine(xm.dispatch_done(last).x, xm.dispatch(x, idx, weights, num_experts=16, axis_name="ep").handle)

    try:
        out = np.asarray(over(mesh, body)(x, idx, weights))
    except Exception as error:
        assert re.search("no flight lands in the buffers|started and never finished", str(error))
    else:
        np.testing.assert_array_equal(out, np.asarray(x))


def dispatch_and_combine(x, idx, weights):
    routed = xm.dispatch_done(xm.dispatch_start(x, idx, weights, num_experts=16, axis_name="ep", config=HASTY))
    return routed.x, routed.handle.positions, routed.num_tokens_per_expert, routed.handle


def test_a_rank_that_does_not_start_is_named(several):
    args = operands(several)

    def body(x, idx, weights):
        def operation():
            return dispatch_and_combine(x, idx, weights)

        return skipped_on(1, operation, zeros_like_results(operation))[:3]

    began = time.monotonic()
    program = over(several, body)  # its memory goes with it
    rows, positions, counts = jax.block_until_ready(program(*args))
    assert time.monotonic() - began < 30.0
    per_rank = rows.shape[0] // several.size
    assert_poisoned(np.asarray(rows)[:per_rank])
    assert np.all(np.asarray(counts)[: counts.shape[0] // several.size] == 0)
    with pytest.raises(xm.OperationFailed, match=r"GPU 1"):
        xm.check()
    with pytest.raises(Exception, match=r"GPU 1"):  # whole operations of the channel too
        jax.block_until_ready(over(several, round_trip(HASTY))(*args))


def test_another_operation_under_the_number_is_named(several):
    args = operands(several)

    def body(x, idx, weights):
        routed = dispatch(x, idx, weights, CONFIG)

        def one(_):
            return xm.combine_done(xm.combine_start(routed.x, routed.handle, config=CONFIG))

        def other(_):
            return xm.combine_done(xm.combine_start(routed.x, routed.handle, weighted=False, config=CONFIG))

        return jax.lax.cond(jax.lax.axis_index("ep") == 1, one, other, 0)

    out = jax.block_until_ready(over(several, body)(*args))
    assert_poisoned(np.asarray(out))
    with pytest.raises(xm.OperationFailed, match="different operations under this number"):
        xm.check()


def test_async_operations_grow_their_own_memory(mesh):
    """A larger operation is compiled while a smaller one's memory is in use; the smaller one then runs in the larger
    memory."""
    small, large = operands(mesh), async_programs.arguments(mesh)[:3]
    config = dataclasses.replace(CONFIG, channel=5)

    def body(x, idx, weights):
        routed = xm.dispatch_done(xm.dispatch_start(x, idx, weights, num_experts=16, axis_name="ep", config=config))
        return xm.combine_done(xm.combine_start(routed.x, routed.handle, config=config))

    program = over(mesh, body)
    first = np.asarray(program(*small))
    for args in (large, small, large):
        out = np.asarray(program(*args))
        if args is small:
            np.testing.assert_array_equal(out, first)
    (memory,) = [w for w in cuda.workspaces() if w["flights"] and w["channel"] == 5 and w["launches"]]
    assert memory["generation"] >= 2
