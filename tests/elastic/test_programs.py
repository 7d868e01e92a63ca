"""Programs over the axis of a group give the bits that they give inside `jax.shard_map`, and fail as they should."""

import gc
import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import xen_moe_jax as xm
from tests.elastic import rank_program
from tests.support import ROOT, quick_compiler

RANKS, ABSENT = 3, 1


def inside_shard_map(number):
    """Returns the results of all ranks by name, `[RANKS, ...]`, computed on a mesh of virtual devices."""
    active = np.arange(RANKS) != ABSENT
    placement = rank_program.placement_of(RANKS).without(active)

    def one(x, idx, weights):
        results = rank_program.program(number, "ep", x[0], idx[0], weights[0], jnp.asarray(active), placement)
        return jax.tree.map(lambda a: a[None], results)

    mesh = Mesh(jax.devices()[:RANKS], ("ep",))
    run = jax.shard_map(one, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))
    return jax.tree.map(np.asarray, jax.jit(run)(*rank_program.operands(RANKS)))


def test_the_bits_of_a_mesh(tmp_path):
    members = [rank for rank in range(RANKS) if rank != ABSENT]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": quick_compiler.flags(1)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.elastic.rank_program", tmp_path / "group", str(RANKS), str(rank)]
            + [str(len(members)), tmp_path / f"{rank}.npz"],
            env=environment, cwd=ROOT,
        )
        for rank in members
    ]  # fmt: skip
    try:
        expected = [inside_shard_map(number) for number in range(len(rank_program.PROGRAMS))]
        assert [process.wait(240) for process in processes] == [0] * len(members)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for rank in members:
        found = np.load(tmp_path / f"{rank}.npz")
        for number, results in enumerate(expected):
            assert results["positions"][rank].max() >= 0 and np.abs(results["out"][rank]).max() > 0
            for name, value in results.items():
                np.testing.assert_array_equal(found[f"{name} {number}"], value[rank], err_msg=f"{name} {number}")


@pytest.fixture(scope="session")  # a process makes a group of one name once
def group(tmp_path_factory):
    with xm.elastic.Group(tmp_path_factory.mktemp("alone") / "group", 3, slot=2, axis_name="alone") as group:
        yield group


def layer(x, idx, active):
    routed = xm.dispatch(x, idx, num_experts=6, axis_name="alone", active=active)
    return xm.combine(routed.x, routed.handle), routed


def test_a_rank_alone_and_a_mask_that_is_old(group):
    x = jnp.ones((4, 8))
    idx = jnp.asarray([[0], [4], [5], [-1]], jnp.int32)  # rank 2 has experts 4 and 5
    run = jax.jit(lambda *operands: layer(*operands))  # of its own: JAX counts the programs of `layer` of all tests
    out, routed = run(x, idx, group.active())
    noted = [json.loads(text) for text in group._operations]
    assert {(o["operation"], o["top_k"], o["num_tokens"], o["layout"]) for o in noted} == {
        (name, 1, 4, "grouped") for name in ("dispatch", "combine")
    }
    xm.check()
    np.testing.assert_array_equal(out, np.asarray([0, 1, 1, 0])[:, None] * np.ones((4, 8)))
    assert routed.num_dropped == 1  # the row of expert 0, whose rank is absent
    out, routed = run(x, idx, np.ones(3, bool))
    assert np.isnan(out).all() and np.isnan(routed.x).all()
    assert (routed.handle.recv_counts == 0).all() and (routed.handle.positions == -1).all()
    with pytest.raises(xm.OperationFailed, match=r"active=\[1, 1, 1\] and the members of view 0 are \(2,\)"):
        xm.check()
    assert np.isnan(run(x, idx, group.active())[0]).all(), "a failure stays until recover"
    group.join()
    xm.check()
    np.testing.assert_array_equal(run(x, idx, group.active())[0][1], np.ones(8))
    assert run._cache_size() == 1


def test_a_closed_group_has_no_failure_and_the_process_can_open_another_one(tmp_path):
    call = jax.jit(lambda x, idx, active: xm.dispatch(x, idx, num_experts=2, axis_name="first", active=active).x)
    operands = jnp.ones((4, 8)), jnp.zeros((4, 1), jnp.int32), np.ones(1, bool)
    with xm.elastic.Group(tmp_path / "group", 1, axis_name="first") as first:
        first.join()
        assert not np.isnan(call(*operands)).any()
        assert np.isnan(call(*operands[:2], np.zeros(1, bool))).all()
        with pytest.raises(xm.OperationFailed, match=r"active=\[0\]"):
            xm.check()
        assert f"{tmp_path}/group/rows" in pathlib.Path("/proc/self/maps").read_text()
    assert f"{tmp_path}/group/rows" not in pathlib.Path("/proc/self/maps").read_text()
    xm.check()
    with xm.elastic.Group(tmp_path / "group", 1, axis_name="second") as second:
        assert second.join(timeout_s=5).joined == (0,)
        xm.check()
        assert np.isnan(call(*operands)).all()
        with pytest.raises(xm.OperationFailed, match=r"a closed elastic.Group; open another one"):
            xm.check()
    first.failed = ""  # else it stays for the other tests of this process


def test_joins_that_fail(tmp_path):
    with xm.elastic.Group(tmp_path / "group", 2, axis_name="late") as late:
        with pytest.raises(ValueError, match="start_with=3: must be at most slots=2"):
            late.join(start_with=3)
        with pytest.raises(TimeoutError, match="not let in within 0.01 s"):
            late.join(start_with=2, timeout_s=0.01)
        state = late._board.read()
        assert not state["claims"]["0"]["ready"], "the members would wait for it"
        late._board.write({**state, "claims": {}})  # let in, and left out again, before it came
        with pytest.raises(xm.elastic.Evicted, match="open a new group"):
            late.join()
        late._board.write(state)
        assert late.join().view == 1


def test_no_hidden_dimension_and_no_jit(group):
    none = jnp.zeros((4, 0)), jnp.zeros((4, 1), jnp.int32)
    assert jax.jit(layer)(*none, group.active())[0].shape == (4, 0)
    with pytest.raises(ValueError, match="concrete arrays outside jax.jit"):
        layer(jnp.ones((4, 8)), jnp.zeros((4, 1), jnp.int32), group.active())


def test_the_routed_mlp(group):
    rng = np.random.default_rng(4)
    gate, up, down = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((2, 8, 6), (2, 8, 6), (2, 6, 8)))
    x, weights = jnp.asarray(rng.standard_normal((4, 8)), jnp.float32), jnp.ones((4, 1))
    idx = jnp.asarray([[0], [4], [5], [-1]], jnp.int32)

    def mlp(x, active):
        return xm.moe_mlp(x, idx, weights, gate, up, down, num_experts=6, axis_name="alone", active=active)

    dense = [(jax.nn.silu(x[t] @ gate[e]) * (x[t] @ up[e])) @ down[e] for t, e in ((1, 0), (2, 1))]
    found = jax.jit(mlp)(x, group.active())
    np.testing.assert_allclose(found[1:3], jnp.stack(dense), rtol=1e-5)
    assert (found[0] == 0).all() and (found[3] == 0).all()


@pytest.mark.parametrize("call", [xm.all_to_all, xm.ragged_all_to_all])
def test_exchanges_that_a_group_does_not_have(group, call):
    operands = (jnp.ones((3, 2)),) if call is xm.all_to_all else (jnp.ones((3, 2)),) * 2 + (jnp.ones(3, jnp.int32),) * 4
    rest = {"split_axis": 0, "concat_axis": 0} if call is xm.all_to_all else {}
    with pytest.raises(ValueError, match="is the axis of an elastic.Group"):
        jax.jit(lambda *a: call(*a, axis_name="alone", **rest))(*operands)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "active=None over the axis"),
        ({"active": np.ones(3, bool), "balance": "exact"}, "in an elastic.Group"),
        ({"active": np.ones(3, bool), "config": xm.KernelConfig(backend="pallas")}, "through the host"),
        ({"active": np.ones(3, bool), "axis_name": "nowhere"}, "open an elastic.Group of that name"),
    ],
)
def test_calls_that_a_group_refuses(group, options, text):
    def call(x, idx):
        return xm.dispatch(x, idx, num_experts=6, **{"axis_name": "alone", **options}).x

    with pytest.raises(ValueError, match=text):
        jax.jit(call)(jnp.ones((4, 8)), jnp.zeros((4, 1), jnp.int32))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"slots": 0}, "slots=0"),
        ({"slots": 1000}, "at most 256"),
        ({"slots": 4}, "slots=4: the group in .* has 3"),
        ({"slots": 3, "slot": 3}, "must be below"),
        ({"slots": 3, "timeout_s": 0}, "positive seconds"),
        ({"slots": 3, "axis_name": "alone", "slot": 1}, "another group of that name"),
        ({"slots": 3, "placement": xm.balance.home(6, 2)}, "2 ranks"),
        (
            {"slots": 3, "placement": jax.tree.map(lambda a: np.stack([a]), xm.balance.home(6, 3))},
            r"\[1, 3, 2\], .*: must be \[R",
        ),
        ({"slots": 3, "placement": xm.balance.home(6, 3)}, "the group in .* have another one"),
    ],
)
def test_groups_that_cannot_be(group, arguments, text):
    gc.collect()  # what earlier tests have left is not counted
    files = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ValueError, match=text):
        xm.elastic.Group(group._board.folder, **arguments)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == files
    assert group._board.read()["claims"].keys() <= {str(group.rank)}
