"""The protocol by which a rank may write into a peer: all its interleavings, and checks that the kernels follow it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P

import xen_moe_jax as xm
from tests.backends.pallas.barrier_model import Kernel, explore
from xen_moe_jax import _mesh
from xen_moe_jax.backends.pallas import barriers
from xen_moe_jax.pallas_kernels import exchange, peers, send
from xen_moe_jax.pallas_kernels.launch import Launch

ALL = {2: ((0, 1),), 3: ((0, 1, 2),)}
LEFT, RIGHT = ((0, 1), (2,)), ((0,), (1, 2))
"""Two ways of cutting three ranks, as two mesh axes do."""


def late(steps):
    """The barrier awaited after the sends."""
    others = [s for s in steps if s not in peers.AWAIT]
    at = others.index(peers.Send()) + 1
    return (*others[:at], *peers.AWAIT, *others[at:])


def without_credits(steps):
    return tuple(s for s in steps if getattr(s, "semaphore", None) != peers.CREDITS)


def sequences(steps):
    """Two kernels in a row with the given steps, in every arrangement: (kernels, ranks)."""
    for ranks, delayed in ((2, True), (3, False)):
        for traffic in ((True, True), (False, True), (False, False)):
            yield [Kernel(steps, ALL[ranks], 0, t) for t in traffic], ranks, delayed
    for first, second in ((LEFT, ALL[3]), (ALL[3], LEFT), (LEFT, RIGHT)):
        for traffic in (True, False):
            yield [Kernel(steps, first, 1, traffic), Kernel(steps, second, 2)], 3, False


def wrong(arrangements) -> set[str]:
    found = set()
    for kernels, ranks, delayed in arrangements:
        found |= explore(kernels, ranks, delayed=delayed)[0]
    return found


def test_the_protocol_is_right():
    assert wrong(sequences(peers.KERNEL)) == set()


def test_start_and_done_are_right():
    kernels = [Kernel(peers.START, ALL[2], 0), Kernel(peers.KERNEL, ALL[2], 0), Kernel(peers.DONE, ALL[2], 0, starts=0)]
    assert explore(kernels, 2, delayed=True)[0] == set()
    assert explore([kernels[0], kernels[2]._replace(starts=0)], 2, delayed=True)[0] == set()


def test_one_barrier_for_different_groups_is_found():
    shared = [([k._replace(barrier=0) for k in kernels], *rest) for kernels, *rest in sequences(peers.KERNEL)]
    assert {"early send", "borrowed"} <= wrong(shared)


def test_a_barrier_awaited_late_is_found():
    assert "early send" in wrong(sequences(late(peers.KERNEL)))


def test_missing_credits_are_found():
    assert "borrowed" in wrong(sequences(without_credits(peers.KERNEL)))


def test_a_missing_announcement_is_found():
    steps = tuple(s for s in peers.KERNEL if s not in peers.ANNOUNCE)
    assert "deadlock" in wrong(sequences(steps))


def test_unawaited_credits_are_found():
    steps = tuple(s for s in peers.KERNEL if s not in peers.LEAVE)
    assert {"stray", "not at rest"} & wrong(sequences(steps))


# -- the kernels follow the model --------------------------------------------------------------------------------------


class Recorder:
    """Records the signals, waits and sends of kernels, in the order in which they are traced."""

    def __init__(self, monkeypatch):
        self.steps: list = []
        self.barriers: list = []
        barrier, signal, wait = pltpu.get_barrier_semaphore, pl.semaphore_signal, pl.semaphore_wait
        remote, drain_runs = pltpu.make_async_remote_copy, send.Link.drain_runs

        def get_barrier():
            self.barriers.append(barrier())
            return self.barriers[-1]

        def name(semaphore):
            return peers.BARRIER if any(semaphore is b for b in self.barriers) else peers.CREDITS

        def recorded(make, function):
            def call(*args, **kwargs):
                step = make(args)
                if step == peers.Drain() and args[0].axes is None and not args[0].count:
                    return function(*args, **kwargs)
                if not self.steps or self.steps[-1] != step:
                    self.steps.append(step)
                return function(*args, **kwargs)

            return call

        monkeypatch.setattr(pltpu, "get_barrier_semaphore", get_barrier)
        monkeypatch.setattr(pl, "semaphore_signal", recorded(lambda a: peers.Signal(name(a[0])), signal))
        monkeypatch.setattr(pl, "semaphore_wait", recorded(lambda a: peers.Wait(name(a[0])), wait))
        monkeypatch.setattr(pltpu, "make_async_remote_copy", recorded(lambda a: peers.Send(), remote))
        records = recorded(lambda a: peers.Drain(), send.Link.await_records)
        monkeypatch.setattr(send.Link, "await_records", records)
        monkeypatch.setattr(send.Link, "drain_runs", recorded(lambda a: peers.Drain(), drain_runs))


def lowered(function, *shapes, axes=("ep",), sizes=(2,), **options):
    """The text of a program for a TPU; nothing runs."""
    auto = (jax.sharding.AxisType.Auto,) * len(axes)
    mesh = jax.make_mesh(sizes, axes, devices=jax.devices()[: int(np.prod(sizes))], axis_types=auto)
    program = jax.jit(jax.shard_map(function, mesh=mesh, in_specs=P(axes), out_specs=P(axes), **options))
    operands = [jax.ShapeDtypeStruct(s, d) for s, d in shapes]
    return program.trace(*operands).lower(lowering_platforms=("tpu",)).as_text()


X, IDX = ((2 * 16, 256), jnp.float32), ((2 * 16, 2), jnp.int32)


THROUGHPUT = xm.KernelConfig(mode="throughput")
"""Not "auto", which sends the records of so few tokens by an all-gather."""


def dispatch(x, idx):
    return xm.dispatch(x, idx, num_experts=4, axis_name="ep", config=THROUGHPUT).x


def round_trip(x, idx):
    routed = xm.dispatch(x, idx, num_experts=4, axis_name="ep", config=THROUGHPUT)
    return xm.combine(routed.x, routed.handle)


def test_every_kernel_follows_the_protocol(monkeypatch):
    recorder = Recorder(monkeypatch)
    lowered(dispatch, X, IDX)
    assert tuple(recorder.steps) == peers.KERNEL
    recorder.steps.clear()
    lowered(round_trip, X, IDX)
    assert tuple(recorder.steps) == 2 * peers.KERNEL
    recorder.steps.clear()
    lowered(lambda x: xm.all_to_all(x, "ep", 0, 0, tiled=True), X)
    assert tuple(recorder.steps) == peers.KERNEL


def test_few_tokens_are_lowered_where_the_mesh_tells_no_generation():
    """By other kernels than on a chip, since Pallas would ask which chip it is."""

    def decode(x, idx):
        routed = xm.dispatch(x, idx, num_experts=4, axis_name="ep")
        return xm.combine(routed.x, routed.handle)

    text = lowered(decode, X, IDX)
    assert "xen_moe_index_rows" in text and "xen_moe_order_pairs" in text
    assert "xen_moe_index_tokens" not in text and "xen_moe_order_tokens" not in text


def test_forward_follows_the_protocol(monkeypatch):
    recorder = Recorder(monkeypatch)

    def body(x, idx):
        return xm.dispatch(x, idx, num_experts=4, axis_name=("dcn", "ici")).x

    lowered(body, ((4 * 16, 256), jnp.float32), ((4 * 16, 2), jnp.int32), axes=("dcn", "ici"), sizes=(2, 2))
    assert tuple(recorder.steps) == peers.KERNEL


def test_start_and_done_follow_the_protocol(monkeypatch):
    recorder = Recorder(monkeypatch)
    axes, launch = peers.Axes(("ep",), (2,)), Launch(1)

    def body(x):
        rows, counts = x.reshape(16, 2, 128), jnp.full((2,), 4, jnp.int32)
        ids = jnp.arange(2, dtype=jnp.int32)
        runs = exchange.Runs(ids, jax.lax.axis_index("ep").reshape(1), 4 * ids, counts, 4 * ids, counts)
        started = exchange.start(rows, runs, rows=16, axes=axes, launch=launch)
        return exchange.done(started, counts, counts, launch=launch)[1].reshape(x.shape)

    lowered(body, ((2 * 16, 256), jnp.int32))
    assert tuple(recorder.steps) == (*peers.START, *peers.DONE)


@pytest.mark.parametrize("bug", ["late", "no credits"])
def test_a_kernel_that_does_not_is_noticed(monkeypatch, bug):
    """Both of these survive interpret mode."""
    if bug == "late":
        original, start_block = send.Link.await_peers, send.Link.start_block
        monkeypatch.setattr(send.Link, "await_peers", lambda link: None)
        monkeypatch.setattr(send.Link, "start_block", lambda link, *a: (start_block(link, *a), original(link))[0])
    else:
        monkeypatch.setattr(peers, "AWAIT", peers.AWAIT[:1])
        monkeypatch.setattr(peers, "LEAVE", ())
    recorder = Recorder(monkeypatch)
    lowered(dispatch, X, IDX)
    assert tuple(recorder.steps) != peers.KERNEL


# -- which barrier semaphore -------------------------------------------------------------------------------------------


def barrier_id(axes, sizes, *, mesh, groups=None, **config):
    with _mesh.lowering_for(mesh, 0):
        return barriers.collective_id(peers.Axes(axes, sizes), groups, xm.KernelConfig(**config))


def test_barriers_belong_to_groups():
    mesh = jax.make_mesh((2, 4), ("dp", "ep"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    ep = barrier_id(("ep",), (4,), mesh=mesh)
    others = [
        barrier_id(("dp",), (2,), mesh=mesh),
        barrier_id(("dp", "ep"), (2, 4), mesh=mesh),
        barrier_id(("ep",), (4,), mesh=mesh, groups=((0, 1), (2, 3))),
        barrier_id(("ep",), (4,), mesh=mesh, groups=((0, 2), (1, 3))),
        barrier_id(("ep",), (4,), mesh=mesh, channel=1),
    ]
    assert len({ep, *others}) == 6
    assert all(barriers.FIRST <= n <= barriers.LAST for n in (ep, *others))
    # the same groups of devices under another name are the same groups
    renamed = jax.sharding.Mesh(np.array(mesh.devices), ("a", "b"))
    assert barrier_id(("b",), (4,), mesh=renamed) == ep
    assert barrier_id(("ep",), (4,), mesh=mesh, collective_id=7) == 7


def test_two_groups_with_one_barrier_are_refused(monkeypatch):
    monkeypatch.setattr(barriers, "LAST", barriers.FIRST)
    monkeypatch.setattr(barriers, "_owners", {})
    mesh = jax.make_mesh((2, 4), ("dp", "ep"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    barrier_id(("ep",), (4,), mesh=mesh)
    with pytest.raises(ValueError, match=r"barrier semaphore 256 .*\('dp',\).*collective_id"):
        barrier_id(("dp",), (2,), mesh=mesh)


def test_an_automatic_axis_is_a_named_error():
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 2), ("dp", "ep"), devices=jax.devices()[:4], axis_types=auto)
    program = jax.shard_map(dispatch, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"), axis_names={"ep"})
    operands = [jax.ShapeDtypeStruct(s, d) for s, d in (X, IDX)]
    with pytest.raises(ValueError, match=r"mesh axes \['dp'\] are automatic here"):
        jax.jit(program).trace(*operands).lower(lowering_platforms=("tpu",))
