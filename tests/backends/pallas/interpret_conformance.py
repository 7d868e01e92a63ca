"""The conformance class against the TPU kernels in interpret mode, with race detection.

Not collected by name: `test_interpret.py` runs it in a process of its own, because a kernel that deadlocks never
returns.
"""

from __future__ import annotations

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P

import xen_moe_jax as xm
from tests.support import conformance, interpreter, members
from tests.support.checks import assert_bits
from xen_moe_jax.backends import pallas
from xen_moe_jax.backends.pallas import combine, hardware, headers
from xen_moe_jax.pallas_kernels import exchange

NO_FLOAT16 = "float16: the TPU kernels take float32 and bfloat16 (a TypeError says so)"
NO_MXFP4 = "wire='mxfp4': the TPU kernels have none (a ValueError says so)"


MAPS = pathlib.Path("/proc/self/maps")
MOST_MAPS = 30_000
"""Most mappings of memory with which compiled programs are kept between two tests of a class. Each program has some
hundred mappings, Linux allows a process 65,530 (`vm.max_map_count`), and XLA's compiler aborts where it gets none."""


@pytest.fixture(autouse=True)
def kernels_are_clean(capfd):
    with interpreter.clean(capfd):
        yield
    if not MAPS.exists() or MAPS.read_text().count("\n") > MOST_MAPS:
        jax.clear_caches()


@pytest.fixture(autouse=True, scope="class")
def programs_of_a_class():
    """Clears JAX's caches behind each class. A class may replace parts of the backend, and the next class, whose
    kernels have equal arguments, must not get its traces. Tests of one class that differ in their routing alone share a
    program."""
    yield
    jax.clear_caches()


def config(mode: str, channel: int = 0) -> xm.KernelConfig:
    params = pltpu.InterpretParams(dma_execution_mode=mode, detect_races=True)
    # not "auto", which gathers the records of so few tokens where there are as many slots as ranks
    return xm.KernelConfig(backend="pallas", interpret=params, channel=channel, mode="throughput")


class Pallas(conformance.Conformance):
    """Four ranks: more than slots in some cases (packed staging of a combine), fewer in others."""

    num_ranks = 4
    two_axis_sizes = (2, 2)
    num_tokens = 6
    hidden = 384  # three blocks of 128: the last word of a record is only partly used
    odd_hidden = 200
    excluded = dict.fromkeys(("grouped-f16", "ranked-f16", "ranked-fp8-f16"), NO_FLOAT16)
    excluded_wires = {"mxfp4": NO_MXFP4}

    def results(self, problem):
        """In one program, the kernels of several operations meet in the case "grouped"."""
        return super().results(problem) if problem.case.name == "grouped" else self.results_one_by_one(problem)


class TestOnWait(Pallas):
    config = config("on_wait")


class TestEager(Pallas):
    config = config("eager")


class TestEightRanks(Pallas):
    config = config("on_wait")
    num_ranks = 8
    two_axis_sizes = (2, 4)


class TestGathered(Pallas):
    """Few tokens, and ranks that are no more than slots: every rank gets every record."""

    config = dataclasses.replace(config("eager"), mode="auto")


class TestTwoCores(Pallas):
    """Two cores, as v4 and v5p have them: cores share the steps of kernels that send nothing to other ranks."""

    config = config("on_wait", channel=2)

    @pytest.fixture(autouse=True)
    def two_cores(self, monkeypatch):
        monkeypatch.setattr(hardware, "SMALLEST", dataclasses.replace(hardware.SMALLEST, cores=2))


class TestWithoutHeaders(Pallas):
    """A rank's slots do not fit SMEM: routing is gathered."""

    config = config("eager", channel=3)

    @pytest.fixture(autouse=True)
    def nothing_fits(self, monkeypatch):
        monkeypatch.setattr(headers, "window", lambda spec: None)


class TestGatheredOnTwoCores(TestTwoCores):
    """Both cores pack, and each places records that the other core has packed."""

    num_tokens = 20  # a block of tokens for each core
    config = dataclasses.replace(config("on_wait", channel=4), mode="auto")


@pytest.mark.parametrize("name", ["grouped", "ranked", "padded-int8", "ranked-two-axes", "grouped-align8-uneven"])
def test_inactive_ranks(name):
    """A slice of the subsets: all, none, one, two, three of four ranks.

    In interpret mode a start is the whole operation, and programs take long to compile: one case has start and done.
    """
    case = members.Members(
        members.BY_NAME[name],
        config("on_wait"),
        num_tokens=3,
        hidden=256,
        exact_weighted=False,
        start_done="two" in name,
        apart=True,
    )
    for active in members.subsets(4)[::4]:
        case.check(active)
    assert case.traces == 1


@pytest.mark.parametrize("axes", [("dp", "ep"), ("ep", "tp")], ids="-".join)
def test_ep_beside_another_axis(axes):
    """Each row or column of the mesh is a group of its own: remote DMAs stay inside it."""
    mesh = jax.make_mesh((2, 2), axes, devices=jax.devices()[:4], axis_types=(jax.sharding.AxisType.Auto,) * 2)
    rng = np.random.default_rng(17)
    x = rng.standard_normal((4, 6, 256)).astype(np.float32)
    idx = rng.integers(-1, 4, (4, 6, 2)).astype(np.int32)
    weights = rng.random((4, 6, 2)).astype(np.float32)

    def program(config):
        def body(x, idx, weights):
            routed = xm.dispatch(x[0], idx[0], weights[0], num_experts=4, axis_name="ep", config=config)
            live = jnp.arange(routed.x.shape[0]) < jnp.sum(routed.group_sizes)
            rows = jnp.where(live[:, None], routed.x, 0)
            return rows[None], xm.combine(rows, routed.handle, config=config)[None]

        return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P(axes), out_specs=P(axes)))

    ours = program(config("on_wait"))(x, idx, weights)
    expected = program(xm.KernelConfig(backend="reference"))(x, idx, weights)
    for what, a, b in zip(("rows", "combined"), ours, expected, strict=True):
        assert_bits(a, b, what)


@pytest.mark.parametrize("mode", ["eager", "on_wait"])
def test_more_rows_than_one_wait_covers(mode):
    """Two ranks of 72 tokens: waits for 64 records, for eight and for one, whole groups of 32 pairs and a part."""
    mesh = jax.make_mesh((2,), ("ep",), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Auto,))
    rng = np.random.default_rng(5)
    x = rng.standard_normal((144, 256)).astype(jnp.bfloat16)
    idx = np.argsort(rng.random((144, 5)), axis=1)[:, :3].astype(np.int32)
    idx[rng.random(idx.shape) < 0.2] = -1
    weights = rng.random(idx.shape, np.float32)

    def program(config):
        def body(x, idx, weights):
            routed = xm.dispatch(x, idx, weights, num_experts=5, axis_name="ep", capacity=256, config=config)
            live = jnp.arange(256) < jnp.sum(routed.group_sizes)
            rows = jnp.where(live[:, None], routed.x, 0)
            return rows, xm.combine(rows, routed.handle, config=config)

        return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("ep"), out_specs=P("ep")))

    ours = program(config(mode))(x, idx, weights)
    expected = program(xm.KernelConfig(backend="reference"))(x, idx, weights)
    for what, a, b in zip(("rows", "combined"), ours, expected, strict=True):
        assert_bits(a, b, what)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("mode", ["eager", "on_wait"])
def test_each_core_reduces_the_pairs_of_half_of_the_ranks(mode, threads, monkeypatch):
    """Four ranks of 128 tokens on chips of two cores, one after the other or both at once; the second core of rank 0
    has no pairs, and the first one of rank 3 few."""
    monkeypatch.setattr(hardware, "SMALLEST", dataclasses.replace(hardware.SMALLEST, cores=2))
    shared = []
    reduce_slots = combine.slots_kernel.reduce_slots
    monkeypatch.setattr(
        combine.slots_kernel,
        "reduce_slots",
        lambda *args, cores, **options: shared.append(cores) or reduce_slots(*args, cores=cores, **options),
    )
    mesh = jax.make_mesh((4,), ("ep",), devices=jax.devices()[:4], axis_types=(jax.sharding.AxisType.Auto,))
    rng = np.random.default_rng(6)
    tokens, experts = 4 * 128, 8
    idx = np.argsort(rng.random((tokens, experts)), axis=1)[:, :3].astype(np.int32)
    idx[rng.random(idx.shape) < 0.4] = -1
    idx[256:][idx[256:] < 2] = -1
    idx[10:256][idx[10:256] >= 6] = -1
    weights = rng.random(idx.shape, np.float32)
    x = rng.standard_normal((tokens, 128)).astype(jnp.bfloat16)

    def program(config):
        def body(x, idx, weights):
            # `place` lets both cores visit the last block of an odd number, which race detection reports
            routed = xm.dispatch(x, idx, weights, num_experts=experts, axis_name="ep", capacity=1024, config=plain)
            live = jnp.arange(1024) < jnp.sum(routed.group_sizes)
            return xm.combine(jnp.where(live[:, None], routed.x, 0), routed.handle, config=config)

        return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("ep"), out_specs=P("ep")))

    plain = xm.KernelConfig(backend="reference")
    params = pltpu.InterpretParams(dma_execution_mode=mode, detect_races=True, num_cores_or_threads=threads)
    with interpreter.signals_like_libtpu():
        ours = program(xm.KernelConfig(backend="pallas", interpret=params, mode="throughput"))(x, idx, weights)
    assert shared == [2]
    assert_bits(ours, program(plain)(x, idx, weights), "combined")


@pytest.mark.parametrize("transform", ["vmap", "jacfwd", "jacrev", "hessian"])
def test_mapped_calls_are_a_loop(transform):
    """The kernels in the loop that `vmap` makes of them, by their values and by derivatives in both directions."""
    mesh = jax.make_mesh((2,), ("ep",), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Auto,))
    rng = np.random.default_rng(3)
    x, idx = rng.standard_normal((6, 128)).astype(np.float32), rng.integers(-1, 4, (6, 2)).astype(np.int32)
    weights = rng.random((6, 2), np.float32)

    def program(config):
        def body(x, idx, weights, scales):
            def sums(scales):
                scaled = weights * scales[1]
                routed = xm.dispatch(x * scales[0], idx, scaled, num_experts=4, axis_name="ep", config=config)
                return xm.combine(jnp.sin(routed.x), routed.handle, config=config)[:, :2].sum(0)

            if transform == "vmap":
                return jax.vmap(sums)(scales)[None]
            function = (lambda s: sums(s).sum()) if transform == "hessian" else sums
            return getattr(jax, transform)(function)(scales[0])[None]

        return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(*[P("ep")] * 3, P()), out_specs=P("ep")))

    scales = np.array([[1.0, 0.5], [0.25, 2.0]], np.float32)
    ours = program(config("eager"))(x, idx, weights, scales)
    expected = program(xm.KernelConfig(backend="reference"))(x, idx, weights, scales)
    assert (
        (np.abs(expected) > 1e-3).any(axis=-1).all()
    )  # the last entry of a hessian is zero: router weights are linear
    np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-5)


def exchanged_at_once(x, runs, *, rows, axes, launch):
    """`exchange.start` with the whole exchange in one kernel: interpret mode cannot return semaphores from a kernel."""
    out = exchange.exchange(x, jnp.zeros((rows, *x.shape[1:]), x.dtype), runs, axes=axes, launch=launch)
    flags = (jnp.zeros((n,), jnp.int32) for n in exchange.semaphore_counts(len(runs.ids)))
    return exchange.Started(x, out, *flags)


class TestStartAndDone(Pallas):
    """Every dispatch and combine as start and done: packing, tables, headers and placing as on a TPU, the exchange in
    one kernel. On two axes nothing is different from a TPU.
    """

    config = config("eager", channel=1)  # not a config of the classes above: programs are cached by it

    @pytest.fixture(autouse=True)
    def by_start_and_done(self, monkeypatch):
        supports_async = pallas.BACKEND.supports_async

        def as_on_a_tpu(spec, config):
            return supports_async(spec, dataclasses.replace(config, interpret=False))

        monkeypatch.setattr(pallas.BACKEND, "supports_async", as_on_a_tpu)
        monkeypatch.setattr(exchange, "start", exchanged_at_once)
        monkeypatch.setattr(exchange, "done", lambda started, *_, **__: started[:2])
        monkeypatch.setattr(xm, "dispatch", lambda *a, **k: xm.dispatch_done(xm.dispatch_start(*a, **k)))
        monkeypatch.setattr(xm, "combine", lambda *a, **k: xm.combine_done(xm.combine_start(*a, **k)))
