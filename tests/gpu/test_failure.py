"""Operations that cannot succeed: poisoned at once on every rank, named by their root, and good again after reset().

Each test covers one row of the table in docs/user/failures.md, or one reported failure.
"""

from __future__ import annotations

import dataclasses
import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xen_moe_jax as xm
from tests.gpu import programs
from tests.gpu.programs import EP, assert_poisoned, dispatch, operands, over, round_trip, skipped_on, zeros_like_results
from xen_moe_jax import cuda
from xen_moe_jax.backends.cuda import module

pytestmark = pytest.mark.gpu2

TIMEOUT_S = 3.0
ABSENT = 1
CONFIG = xm.KernelConfig(backend="cuda", timeout_s=TIMEOUT_S)
PATIENT = xm.KernelConfig(backend="cuda", timeout_s=120.0)


@pytest.fixture
def mesh(gpu_mesh):
    """A mesh over four GPUs where the machine has them, else over two. Afterwards a reset must make everything usable
    again, whatever the test has broken."""
    mesh = gpu_mesh((4 if len(jax.devices()) >= 4 else 2,), ("ep",))
    yield mesh
    cuda.reset()
    xm.check()
    assert_round_trip(mesh, PATIENT)


def assert_round_trip(mesh, config, **options):
    x, idx, weights = operands(mesh)
    np.testing.assert_array_equal(np.asarray(over(mesh, round_trip(config, **options))(x, idx, weights)), np.asarray(x))


def finish(results):
    """Waits for results; a program that was refused before it launched anything has none."""
    return jax.block_until_ready(results)


def failure(*parts: str) -> str:
    """`xm.check()`'s text, which must hold every part."""
    with pytest.raises(xm.OperationFailed) as caught:
        xm.check()
    text = str(caught.value)
    for part in parts:
        assert re.search(part, text), f"{part!r} is not in: {text}"
    return text


def skip_dispatch_then_combine(config):
    def body(x, idx, weights):
        def operation():
            return dispatch(x, idx, weights, config)

        routed = skipped_on(ABSENT, operation, zeros_like_results(operation))
        return routed.x, routed.num_tokens_per_expert, xm.combine(routed.x, routed.handle, config=config)

    return body


# -- a rank that does not come -----------------------------------------------------------------------------------------


def test_a_rank_that_skips_a_dispatch_is_found_out_at_once(mesh):
    """It runs the combine behind it: another operation under the same number. No time has to pass."""
    args = operands(mesh)
    assert_round_trip(mesh, PATIENT)
    program = over(mesh, skip_dispatch_then_combine(PATIENT))
    began = time.monotonic()
    _, _, out = finish(program(*args))
    assert time.monotonic() - began < 30.0  # it compiles too; PATIENT waits four times as long
    assert_poisoned(out)
    failure(
        r"different operations under this number", r"dispatch of float32\[64, 256\]", r"combine of float32\[64, 256\]"
    )


def test_after_a_failure_the_next_call_raises_and_reset_makes_all_good(mesh):
    args = operands(mesh)
    whole, broken = over(mesh, round_trip(CONFIG)), over(mesh, skip_dispatch_then_combine(CONFIG))
    before = np.asarray(whole(*args))
    finish(broken(*args))
    for _ in range(3):  # sticky, and the same text
        with pytest.raises(Exception, match="different operations under this number"):
            finish(whole(*args))
    failure("different operations")
    cuda.reset()
    xm.check()
    np.testing.assert_array_equal(np.asarray(whole(*args)), before)
    finish(broken(*args))  # the executable that failed is not spoilt: it fails again in the same way
    failure("different operations")
    cuda.reset()
    np.testing.assert_array_equal(np.asarray(whole(*args)), before)


def never_comes(config, operation_of):
    """Rank `ABSENT` leaves `operation_of(x, idx, weights)` out and runs nothing behind it."""

    def body(x, idx, weights):
        def operation():
            return operation_of(x, idx, weights, config)

        return skipped_on(ABSENT, operation, zeros_like_results(operation))

    return body


def a_dispatch(x, idx, weights, config, **options):
    routed = dispatch(x, idx, weights, config, **options)
    return routed.x, routed.handle.positions, routed.handle.recv_counts, routed.num_tokens_per_expert


def a_quantized_dispatch(x, idx, weights, config):
    routed = dispatch(xm.quantize(x), idx, weights, config)
    return routed.x.values, routed.x.scales, routed.handle.positions, routed.num_tokens_per_expert


def a_padded_dispatch(x, idx, weights, config):
    return a_dispatch(x, idx, weights, config, layout="padded")


def a_ranked_dispatch(x, idx, weights, config):
    routed = dispatch(x, idx, weights, config, layout="ranked")
    return routed.x, routed.handle.positions, routed.handle.recv_counts, routed.topk_weights


def an_exchange(x, idx, weights, config):
    return (xm.all_to_all(x, "ep", 0, 0, tiled=True, config=config),)


def a_ragged_exchange(x, idx, weights, config):
    ranks = jax.lax.axis_size("ep")
    each = x.shape[0] // ranks
    offsets = jnp.arange(ranks, dtype=jnp.int32) * each
    sizes = jnp.full(ranks, each, jnp.int32)
    mine = jnp.full(ranks, jax.lax.axis_index("ep") * each, jnp.int32)
    return (xm.ragged_all_to_all(x, jnp.zeros_like(x), offsets, sizes, mine, sizes, axis_name="ep", config=config),)


def a_gather(x, idx, weights, config):
    return (xm.all_gather(x, "ep", config=dataclasses.replace(config, mode="throughput")),)


def a_small_gather(x, idx, weights, config):
    return (xm.all_gather(x, "ep", config=dataclasses.replace(config, mode="low_latency")),)


def a_gathered_matmul(x, idx, weights, config):
    """This rank's own rows are multiplied before the group fails."""
    config = dataclasses.replace(config, mode="throughput")
    return (
        xm.all_gather_matmul(x.astype(jnp.bfloat16), jnp.ones((x.shape[1], 64), jnp.bfloat16), "ep", config=config),
    )


def a_layer_in_float8(x, idx, weights, config):
    """Experts in fp8, by kernels: rows that did not come have NaN as scales, so that all their products are NaN."""
    local, hidden = programs.SIZES.experts // jax.lax.axis_size("ep"), x.shape[1]
    matrix = jnp.ones((local, hidden, hidden), jnp.bfloat16) / hidden
    at = {"num_experts": programs.SIZES.experts, "axis_name": "ep", "config": config}
    options = {"experts": "float8_e4m3fn", "wire": "float8_e4m3fn"}
    return (xm.moe_mlp(x.astype(jnp.bfloat16), idx, weights, matrix, matrix, matrix, **at, **options),)


OPERATIONS = [
    a_dispatch,
    a_quantized_dispatch,
    a_padded_dispatch,
    a_ranked_dispatch,
    an_exchange,
    a_ragged_exchange,
    a_gather,
    a_small_gather,
    a_gathered_matmul,
    a_layer_in_float8,
]


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda f: f.__name__)
def test_an_absent_rank_is_named_and_the_result_is_poisoned(mesh, operation):
    args = operands(mesh)
    program = over(mesh, never_comes(CONFIG, operation)).lower(*args).compile()
    began = time.monotonic()
    results = finish(program(*args))
    elapsed = time.monotonic() - began
    assert TIMEOUT_S * 0.9 < elapsed < TIMEOUT_S + 30.0
    failure(
        rf"rank {ABSENT} \(GPU {ABSENT}\) did not start it", r"rank [0-3] gave up after [34]\.\d s", r"cuda\.reset\(\)"
    )
    waiting = [a.addressable_shards[0].data for a in results]  # rank 0: the absent rank's are zeros of its own making
    assert_poisoned(waiting)
    if operation is a_quantized_dispatch:
        assert np.isnan(np.asarray(waiting[1])).all()
    if "dispatch" in operation.__name__:
        positions = next(a for a in waiting if a.ndim == 3 and a.dtype == jnp.int32)
        assert (np.asarray(positions) == -1).all()
        assert (np.asarray(waiting[-1], np.float32) == 0).all() or operation is a_ranked_dispatch


def test_absent_in_the_middle_of_a_long_program_ends_it_within_two_timeouts(mesh):
    """500 operations: those behind the failure return at once, none waits for itself."""

    def body(x, idx, weights):
        def step(i, x):
            return round_trip(CONFIG)(x, idx, weights)

        def operation():
            return jax.lax.fori_loop(0, 250, step, x)

        return skipped_on(ABSENT, operation, lambda: x)

    program = over(mesh, body).lower(*operands(mesh)).compile()
    began = time.monotonic()
    results = finish(program(*operands(mesh)))
    assert time.monotonic() - began < 2 * TIMEOUT_S
    assert_poisoned(results.addressable_shards[0].data)
    failure("did not start it")


def test_every_queued_program_ends_at_once(mesh):
    """Programs that the host queued before the failure was known end at once: none waits for its own timeout."""
    args = operands(mesh)
    broken, whole = over(mesh, never_comes(CONFIG, a_dispatch)), over(mesh, round_trip(CONFIG))
    finish(whole(*args))
    broken = broken.lower(*args).compile()
    began = time.monotonic()
    queued = [broken(*args)]
    for _ in range(20):
        try:
            queued.append(whole(*args))
        except jax.errors.JaxRuntimeError:
            break
    for results in queued:
        with_error = None
        try:
            finish(results)
        except jax.errors.JaxRuntimeError as error:
            with_error = error
        if with_error is None and results is not queued[0]:
            assert_poisoned(results)
    assert time.monotonic() - began < 2 * TIMEOUT_S


def test_gradients_of_a_failed_step_are_poisoned(mesh):
    """The backward pass runs operations too: none of them may look good, on any rank, and a loss is NaN.

    `x` goes through a round trip before the operation that rank 1 leaves out. So its gradient there, too, comes out of
    operations of the backward pass; without that it would be zero, and rightly: an operation that a rank leaves out
    does not depend on its `x`.
    """

    def body(x, idx, weights):
        def loss(x, weights):
            x = round_trip(CONFIG)(x, idx, weights)

            def operation():
                return dispatch(x, idx, weights, CONFIG)

            routed = skipped_on(ABSENT, operation, zeros_like_results(operation))
            out = xm.combine(jnp.tanh(routed.x), routed.handle, config=CONFIG)
            return jnp.sum(out**2)

        value, (dx, dw) = jax.value_and_grad(loss, argnums=(0, 1))(x, weights)
        return value.reshape(1), dx

    value, dx = finish(over(mesh, body)(*operands(mesh)))
    assert np.isnan(np.asarray(value)).all()
    assert_poisoned(dx)
    failure("rank")


def test_a_late_rank_is_waited_for(mesh):
    """Nothing fails while the time is not up: rank 1 is busy for a while first."""

    def body(x, idx, weights):
        def work(n, seed):
            return jax.lax.fori_loop(0, n, lambda i, a: jnp.tanh(a @ a) * 0.5, seed)

        seed = jnp.full((1024, 1024), 0.01) + x[0, 0] * 0
        steps = jnp.where(jax.lax.axis_index("ep") == ABSENT, 20_000, 1)
        done = work(steps, seed)
        return round_trip(PATIENT)(x + 0 * done[0, 0], idx, weights)

    x, idx, weights = operands(mesh)
    np.testing.assert_array_equal(np.asarray(over(mesh, body)(x, idx, weights)), np.asarray(x))
    xm.check()


def test_the_root_is_named_not_the_second(mesh):
    """Rank `last` is missing; all other ranks miss each other too, one operation later. Every rank must blame
    `last`."""
    last = mesh.size - 1

    def body(x, idx, weights):
        def both():
            first = round_trip(CONFIG)(x, idx, weights)
            return round_trip(CONFIG)(first, idx, weights)

        return skipped_on(last, both, lambda: x)

    finish(over(mesh, body)(*operands(mesh)))
    failure(rf"rank {last} \(GPU {last}\) did not start it")


# -- operations that differ between the ranks --------------------------------------------------------------------------


@pytest.mark.parametrize("other", ["tokens", "hidden", "dtype", "layout", "order"])
def test_ranks_that_run_different_operations_are_told_apart_at_once(mesh, other):
    """Each rank announces its operation at once; the error names both operations, with shapes."""

    def operation(which):
        def run(x, idx, weights):
            if other == "tokens" and which:
                x, idx, weights = x[:32], idx[:32], weights[:32]
            if other == "hidden" and which:
                x = x[:, :128]
            if other == "dtype" and which:
                x = x.astype(jnp.bfloat16)
            layout = "padded" if other == "layout" and which else "grouped"
            routed = dispatch(x, idx, weights, PATIENT, layout=layout)
            if other == "order" and which:  # a redispatch where the other combines
                return jnp.sum(xm.redispatch(x, routed.handle, config=PATIENT))
            return jnp.sum(xm.combine(routed.x, routed.handle, config=PATIENT).astype(jnp.float32))

        return run

    def body(x, idx, weights):
        one, another = (lambda _, f=f: f(x, idx, weights) for f in (operation(False), operation(True)))
        return jax.lax.cond(jax.lax.axis_index("ep") == ABSENT, another, one, 0).reshape(1)

    program = over(mesh, body).lower(*operands(mesh)).compile()
    began = time.monotonic()
    out = finish(program(*operands(mesh)))
    assert time.monotonic() - began < 10.0
    assert_poisoned(out)
    failure("different operations under this number", r"rank 1 .*; rank [023] runs|rank [023] .*; rank 1 runs")


def test_two_calls_of_the_same_shapes_in_two_orders_are_told_apart(mesh):
    """Rank 0 dispatches `x`, then `-x`; rank 1 the other way round. Neither rank gets the other's rows."""

    def body(x, idx, weights):
        def one(rows):
            return dispatch(rows, idx, weights, PATIENT).x

        def in_order(_):
            return one(x), one(-x)

        def turned(_):
            second, first = one(-x), one(x)
            return first, second

        return jax.lax.cond(jax.lax.axis_index("ep") == ABSENT, turned, in_order, 0)

    program = over(mesh, body).lower(*operands(mesh)).compile()
    began = time.monotonic()
    out = finish(program(*operands(mesh)))
    assert time.monotonic() - began < 10.0
    assert_poisoned(out)
    failure("different operations under this number", "two calls of the same shapes", "KernelConfig.channel")


# -- handles and arrays that are refused -------------------------------------------------------------------------------


def bad_handles():
    def negative_counts(handle):
        return dataclasses.replace(handle, recv_counts=handle.recv_counts.at[0, 0].set(-5))

    def huge_counts(handle):
        return dataclasses.replace(handle, recv_counts=handle.recv_counts + (1 << 30))

    def far_positions(handle):
        return dataclasses.replace(handle, positions=jnp.where(handle.positions >= 0, 1 << 30, handle.positions))

    def negative_positions(handle):
        return dataclasses.replace(handle, positions=jnp.full_like(handle.positions, -(1 << 31)))

    def far_experts(handle):
        return dataclasses.replace(handle, topk_idx=jnp.full_like(handle.topk_idx, 1 << 30))

    return [negative_counts, huge_counts, far_positions, negative_positions, far_experts]


@pytest.mark.parametrize("break_handle", bad_handles(), ids=lambda f: f.__name__)
@pytest.mark.parametrize("operation", ["redispatch", "combine", "weighted"])
def test_impossible_handles_write_nowhere(mesh, break_handle, operation):
    """The results are unspecified, poisoned with an error, or good; memory around them stays whole."""

    def body(x, idx, weights):
        routed = dispatch(x, idx, weights, CONFIG, alignment=8)
        handle = break_handle(routed.handle)
        guard = jnp.full((64, 1024), 7.0) + 0 * x[0, 0]
        if operation == "redispatch":
            out = xm.redispatch(x, handle, config=CONFIG)
        else:
            out = xm.combine(routed.x, handle, weighted=operation == "weighted", config=CONFIG)
        guard = jax.lax.optimization_barrier((guard, out))[0]
        return guard, routed.x, out

    args = operands(mesh)
    try:
        guard, rows, _ = finish(over(mesh, body)(*args))
        assert (np.asarray(guard) == 7.0).all()
        expected = over(mesh, lambda *a: dispatch(*a, CONFIG, alignment=8).x)
    except jax.errors.JaxRuntimeError as error:
        assert "xen_moe_jax" in str(error), error
        expected = None
    cuda.reset()
    if expected is not None:
        finish(expected(*args))
    assert_round_trip(mesh, CONFIG)


@pytest.mark.parametrize("which", ["input_offsets", "send_sizes", "output_offsets", "recv_sizes"])
@pytest.mark.parametrize("value", [-1, -(1 << 31), 1 << 30, (1 << 31) - 1])
def test_impossible_segments_write_nowhere(mesh, which, value):
    def body(x, idx, weights):
        ranks = jax.lax.axis_size("ep")
        each = x.shape[0] // ranks
        arrays = {
            "input_offsets": jnp.arange(ranks, dtype=jnp.int32) * each,
            "send_sizes": jnp.full(ranks, each, jnp.int32),
            "output_offsets": jnp.full(ranks, jax.lax.axis_index("ep") * each, jnp.int32),
            "recv_sizes": jnp.full(ranks, each, jnp.int32),
        }
        arrays[which] = arrays[which].at[0].set(value)
        guard = jnp.full((64, 1024), 7.0) + 0 * x[0, 0]
        out = xm.ragged_all_to_all(x, jnp.zeros_like(x), *arrays.values(), axis_name="ep", config=CONFIG)
        return jax.lax.optimization_barrier((guard, out))

    try:
        guard, _ = finish(over(mesh, body)(*operands(mesh)))
        assert (np.asarray(guard) == 7.0).all()
    except jax.errors.JaxRuntimeError as error:
        assert "xen_moe_jax" in str(error), error
    cuda.reset()
    assert_round_trip(mesh, CONFIG)


# -- memory ------------------------------------------------------------------------------------------------------------


def test_growth_that_fails_leaves_what_there_is(mesh):
    """A program too large for the GPU is refused when it is compiled; the small one goes on."""
    config = dataclasses.replace(PATIENT, channel=9)
    args = operands(mesh)
    small = over(mesh, round_trip(config))
    before = np.asarray(small(*args))
    large = programs.Sizes(tokens=1 << 20, hidden=32768, experts=16, top_k=4)
    shapes = [
        jax.ShapeDtypeStruct((mesh.size * large.tokens, n), d, sharding=jax.sharding.NamedSharding(mesh, EP))
        for n, d in ((large.hidden, jnp.bfloat16), (large.top_k, jnp.int32), (large.top_k, jnp.float32))
    ]
    body = lambda x, idx, w: dispatch(x, idx, w, config, large, capacity=1024).num_dropped.reshape(1)  # noqa: E731
    with pytest.raises(Exception, match="not enough GPU memory for the symmetric workspace"):
        over(mesh, body).lower(*shapes).compile()
    xm.check()
    for _ in range(3):
        np.testing.assert_array_equal(np.asarray(small(*args)), before)


def test_growth_while_a_program_runs(mesh):
    """Compiling a larger program neither stops a running one nor waits for it."""
    config = dataclasses.replace(PATIENT, channel=8)

    def loop(x, idx, weights):
        return jax.lax.fori_loop(0, 3000, lambda i, x: round_trip(config)(x, idx, weights), x)

    x, idx, weights = operands(mesh)
    long = over(mesh, loop)
    finish(long(x, idx, weights))
    running = long(x, idx, weights)
    large = programs.Sizes(tokens=2048, hidden=1024)
    more = operands(mesh, large)
    out = over(mesh, round_trip(config, large))(*more)
    np.testing.assert_array_equal(np.asarray(out), np.asarray(more[0]))
    np.testing.assert_array_equal(np.asarray(running), np.asarray(x))
    xm.check()
    for _ in range(3):
        finish(over(mesh, round_trip(config, large))(*more))
    (listed,) = [w for w in cuda.workspaces() if w["channel"] == 8]
    assert listed["generation"] >= 2 and listed["generations_held"] == 1


def test_memory_goes_with_its_last_user(mesh):
    config = dataclasses.replace(PATIENT, channel=10)
    program = over(mesh, round_trip(config))
    finish(program(*operands(mesh)))
    assert any(w["channel"] == 10 for w in cuda.workspaces())
    program.clear_cache()
    del program
    jax.clear_caches()
    import gc

    gc.collect()
    deadline = time.monotonic() + 10
    while any(w["channel"] == 10 for w in cuda.workspaces()):
        assert time.monotonic() < deadline, "the workspace outlives its program"
        time.sleep(0.05)


def test_reset_never_blocks(mesh):
    """A GPU that is busy with something else: an error in time, and everything as it was."""

    def busy(x, idx, weights):  # few kernels of tens of milliseconds, so that seconds of work are queued at once
        seed = jnp.full((16384, 16384), 0.01) + x[0, 0] * 0
        return jax.lax.fori_loop(0, 200, lambda i, a: jnp.tanh(a @ a) * 0.5, seed)[:64]

    program, ours = over(mesh, busy), over(mesh, round_trip(PATIENT))
    args = operands(mesh)
    finish(ours(*args))  # and kept: without a program of ours there is nothing to reset
    finish(program(*args))
    running = program(*args)
    time.sleep(0.3)  # until it is queued
    began = time.monotonic()
    try:
        cuda.reset(timeout_s=0.2)
        blocked = False
    except RuntimeError as error:
        blocked = "still busy" in str(error)
    assert time.monotonic() - began < 10.0
    finish(running)
    cuda.reset()
    np.testing.assert_array_equal(np.asarray(ours(*args)), np.asarray(args[0]))
    assert blocked, "the GPU was not busy long enough to tell"


def test_check_is_cheap(mesh):
    """It reads host memory: less than two microseconds."""
    assert_round_trip(mesh, PATIENT)
    xm.check()
    best = min(timed_check() for _ in range(5))
    assert best < 2e-6, f"xm.check() takes {best * 1e6:.2f} us"


def timed_check(calls: int = 20_000) -> float:
    began = time.perf_counter()
    for _ in range(calls):
        xm.check()
    return (time.perf_counter() - began) / calls


def test_the_number_of_an_operation_wraps_without_zero(mesh):
    """Flags start as zero, so zero must never be a number that a rank waits for. Two operations across the wrap."""
    assert_round_trip(mesh, PATIENT)
    module.compiled().renumber(0xFFFFFFFA)
    for _ in range(4):
        assert_round_trip(mesh, PATIENT)
    xm.check()
