"""The CUDA backend's Python half, without GPUs: groups, schedules, sizes, attributes in the lowered program."""

import itertools
import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import xen_moe_jax as xm
from xen_moe_jax import backends
from xen_moe_jax._quantize import Wire
from xen_moe_jax._spec import Spec
from xen_moe_jax.backends import load
from xen_moe_jax.backends.base import BackendUnavailable
from xen_moe_jax.backends.cuda import call as cuda_call
from xen_moe_jax.backends.cuda import devices, module
from xen_moe_jax.backends.cuda import schedule as schedules

try:
    load("cuda")
except BackendUnavailable as reason:
    assert not os.environ.get("XEN_MOE_EXPECT_CUDA"), f"the module must be here: {reason}"
    pytest.skip(f"the CUDA module is not built: {reason}", allow_module_level=True)


def spec(tokens: int, ranks: int = 4, layout: str = "grouped", top_k: int = 8, experts: int = 256) -> Spec:
    return Spec(("ep",), (ranks,), experts, tokens, top_k, layout, ranks * tokens * top_k)


@pytest.mark.parametrize("axis", ["dp", "ep"])
def test_groups_follow_the_mesh(axis):
    mesh = jax.sharding.AbstractMesh((2, 3), ("dp", "ep"))
    partitions = -1 - devices.groups(mesh, (axis,))
    grid = np.arange(6).reshape(2, 3)
    np.testing.assert_array_equal(partitions, grid.T if axis == "dp" else grid)


def test_index_groups_split_a_group_further():
    mesh = jax.sharding.AbstractMesh((4,), ("ep",))
    np.testing.assert_array_equal(-1 - devices.groups(mesh, ("ep",), ((0, 3), (2, 1))), [[0, 3], [2, 1]])


@pytest.mark.parametrize("plan", [schedules.dispatch, schedules.combine], ids=["dispatch", "combine"])
def test_every_schedule_fits(plan):
    """Roles fit in the blocks, parts in the row, and positions in a block's shared memory."""
    wires = (None, Wire("float8_e4m3fn"), Wire("mxfp4"))
    for tokens, sms, hidden, ranks, wire in itertools.product(
        (1, 7, 128, 4096), (1, 2, 8, 64, 132), (8, 512, 7168), (1, 4, 16), wires
    ):
        for layout in ("grouped", "ranked", "padded"):
            schedule = plan(spec(tokens, ranks, layout), hidden, xm.KernelConfig(num_sms=sms), 132, wire=wire)
            assert schedule.blocks == sms
            assert 1 <= schedule.push_blocks <= sms and 1 <= schedule.layout_blocks <= sms
            assert schedule.parts == 1 or schedule.parts * schedules.MIN_PART_ELEMENTS <= hidden
            assert schedule.segment_tokens >= 1


def test_mode_says_how_fine_rows_are_cut():
    parts = [
        schedules.dispatch(spec(64), 7168, xm.KernelConfig(mode=mode), 132).parts
        for mode in ("throughput", "auto", "low_latency")
    ]
    assert parts[0] == 1 and parts[0] < parts[1] < parts[2]


def test_small_batches_take_the_low_latency_kernels():
    def takes(tokens: int, hidden: int = 7168, dtype=jnp.bfloat16, mode: str = "auto", **kw) -> bool:
        wire, combine = kw.pop("wire", None), kw.pop("combine", False)
        return schedules.use_low_latency(
            spec(tokens, **kw), hidden, dtype, xm.KernelConfig(mode=mode), wire=wire, combine=combine
        )

    for combine in (False, True):
        assert takes(1, combine=combine) and takes(384, combine=combine) and not takes(385, combine=combine)
        assert not takes(4096, combine=combine) and not takes(64, mode="throughput", combine=combine)
        assert not takes(64, hidden=130, combine=combine), "a row of 260 bytes"
        assert not takes(64, top_k=16, combine=combine)
        assert not takes(64, wire=Wire("float8_e4m3fn", "float32"), combine=combine)
        assert takes(512, ranks=2, mode="low_latency", combine=combine)
        assert not takes(8192, mode="low_latency", combine=combine)
    assert takes(128, dtype=jnp.float8_e4m3fn) and not takes(128, hidden=7168 + 128, dtype=jnp.float8_e4m3fn), "scales"
    two_axes = Spec(("dcn", "ep"), (2, 2), 256, 64, 8, "grouped", 4096)
    assert schedules.use_low_latency(two_axes, 7168, jnp.bfloat16, xm.KernelConfig(), wire=None)
    assert not schedules.use_low_latency(two_axes, 7168, jnp.bfloat16, xm.KernelConfig(), wire=None, combine=True)


@pytest.mark.parametrize("low_latency", [False, True], ids=["rows", "low_latency"])
def test_low_latency_blocks_have_roles(low_latency):
    for sms in (1, 2, 5, 64, 96, 132):
        for plan in (schedules.dispatch, schedules.combine):
            schedule = plan(spec(64), 7168, xm.KernelConfig(num_sms=sms), 132, low_latency=low_latency)
            assert schedule.low_latency == low_latency and schedule.blocks == sms
            assert 1 <= schedule.push_blocks <= sms and 1 <= schedule.layout_blocks <= sms
            if low_latency and sms >= 5:
                assert schedule.push_blocks + schedule.layout_blocks < sms, "no block is left to receive"


@pytest.mark.parametrize("hidden", [2048, 7168])
@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_memory_stays_within_the_bound(ranks, hidden):
    for tokens in (1, 128, 4096):
        size = xm.buffer_size_hint(num_tokens=tokens, hidden=hidden, num_ranks=ranks, backend="cuda")
        rows = 2 * ranks * tokens * hidden * 2
        assert rows <= size <= rows + 64 * 2**20


def test_memory_of_one_rank_does_for_every_operation():
    """A dispatch of rows of 16 bytes needs none there. A redispatch and a combine of the same rows do."""
    sizes = {"num_tokens": 2048, "num_ranks": 1, "top_k": 8, "dtype": jnp.float32, "backend": "cuda"}
    for hidden in (4, 8):
        assert xm.buffer_size_hint(hidden=hidden, **sizes) >= 2 * 2048 * hidden * 4


@pytest.mark.parametrize("ranks", [1, 2, 16])
def test_memory_of_a_small_dispatch_does_for_its_combine(ranks):
    """No low-latency kernel takes rows of 8 bytes, and a combine does not number rows as a small dispatch does."""
    config, of = xm.KernelConfig(), spec(8, ranks)
    made = schedules.combine(of, 4, config, devices.HOPPER_SMS)
    needed = module.compiled().dispatch_staging_bytes(cuda_call.attributes(of, 4, jnp.bfloat16, made, config))
    sizes = {"num_tokens": 8, "hidden": 4, "num_ranks": ranks, "num_experts": 256, "backend": "cuda"}
    assert needed <= xm.buffer_size_hint(**sizes)


@pytest.mark.parametrize("ranks", [18, 72, 256])
def test_memory_of_many_ranks_goes_through_rings(ranks):
    """Rows take at most 256 MiB, or 256 tokens of every rank; routing and flags stay whole."""
    found = []
    for tokens in (128, 256, 1024, 4096, 8192):
        sizes = {"num_tokens": tokens, "hidden": 7168, "num_ranks": ranks, "top_k": 8, "backend": "cuda"}
        found.append(xm.buffer_size_hint(**sizes))
        small = 64 * 2**20 if tokens > 256 else 3 * 2 * ranks * tokens * 7168 * 2
        routing = 2 * ranks * tokens * (8 * 8 + 7 * 4 * 16 + 64)
        assert found[-1] <= max(256 * 2**20, 2 * ranks * 256 * 7168 * 2) + routing + small
    assert found[-1] < 2 * ranks * 8192 * 7168 * 2 / 4


def test_lowered_program_carries_groups_and_sizes():
    mesh = jax.make_mesh((2, 2), ("dp", "ep"))

    def body(x, idx, weights):
        routed = xm.dispatch(x, idx, weights, num_experts=8, axis_name="ep", config=xm.KernelConfig(channel=3))
        return xm.combine(routed.x, routed.handle)

    both = P(("dp", "ep"))
    shapes = [
        jax.ShapeDtypeStruct((4 * 16, n), dtype, sharding=NamedSharding(mesh, both))
        for n, dtype in ((256, jnp.bfloat16), (2, jnp.int32), (2, jnp.float32))
    ]
    program = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(both,) * 3, out_specs=both))
    text = program.trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    (dispatch,) = [line for line in text.splitlines() if "@xen_moe_dispatch" in line]
    assert "@xen_moe_combine" in text
    attributes = dict(re.findall(r"(\w+) = (-?\d+) : i64", dispatch))
    wanted = {"ranks": 2, "num_tokens": 16, "hidden": 256, "top_k": 2, "num_experts": 8, "channel": 3, "dtype": 0}
    assert {name: int(attributes[name]) for name in wanted} == wanted
    assert "devices = dense<[-1, -2, -3, -4]>" in dispatch


def sites_of(function, name: str) -> list[str]:
    """The site of each dispatch in the program of `function`, lowered for CUDA."""
    mesh = jax.make_mesh((2,), ("ep",))

    def body(x, idx, weights):
        return function(lambda rows: xm.dispatch(rows, idx, weights, num_experts=8, axis_name="ep").x, x)

    shapes = [
        jax.ShapeDtypeStruct((2 * 16, n), dtype, sharding=NamedSharding(mesh, P("ep")))
        for n, dtype in ((256, jnp.bfloat16), (2, jnp.int32), (2, jnp.float32))
    ]
    mapped = jax.shard_map(body, mesh=mesh, in_specs=(P("ep"),) * 3, out_specs=P("ep"))
    mapped.__name__ = name
    text = jax.jit(mapped).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    calls = [line for line in text.splitlines() if "@xen_moe_dispatch(" in line]
    return [re.search(r"site = (-?\d+) : i64", line).group(1) for line in calls]


def twice(dispatch, x):
    return dispatch(x), dispatch(-x)


def test_two_calls_of_the_same_shapes_are_two_sites():
    sites = sites_of(twice, "step")
    assert len(sites) == 2 and len(set(sites)) == 2 and all(0 < int(s) < 2**32 for s in sites)


def test_a_site_is_the_same_in_every_process_and_another_in_another_program():
    """The number depends on the program alone: no address, no hash that changes from run to run, no count of other
    traces."""
    first = sites_of(twice, "step")
    sites_of(lambda dispatch, x: dispatch(x), "something_else")
    assert sites_of(twice, "step") == first
    assert not set(sites_of(twice, "another_step")) & set(first)


def test_too_many_ranks_are_refused_with_a_remedy():
    from xen_moe_jax.backends.cuda import call

    with pytest.raises(ValueError, match=r"at most 256 ranks, not 257.*reference"):
        call.check_limits(spec(8, ranks=257))


def test_a_combine_by_home_has_room_for_the_rows_of_every_slot():
    """With few ranks that is more than the partial rows of a usual combine, `K` rows of a token in place of `R`."""
    sizes = {"num_tokens": 4096, "hidden": 4096, "top_k": 8, "num_experts": 64, "backend": "cuda"}
    plain, placed = (
        [xm.buffer_size_hint(num_ranks=ranks, slots_per_rank=slots, **sizes) for ranks in (2, 8)]
        for slots in (None, 36)
    )
    rows = 2 * 4096 * 4096 * 2  # of one slot, in both halves
    assert placed[1] == pytest.approx(plain[1], rel=0.01)
    assert plain[0] == pytest.approx(2 * rows, rel=0.05) and placed[0] == pytest.approx(8 * rows, rel=0.02)
    apart = xm.buffer_size_hint(num_ranks=2, slots_per_rank=36, ranks_per_node=1, **sizes)
    assert apart < placed[0], "between nodes slots travel one after another"


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("drop, rows", [("source", (1, 8)), ("weight", (1, 128))])
def test_what_a_rule_of_drops_needs_is_gathered_by_a_dispatch(drop, rows, masked):
    """Every rank is an expert, and no collective of XLA waits for an inactive rank."""

    def body(x, idx, weights):
        active = jnp.array([True, False, True, True]) if masked else None
        options = {"num_experts": 8, "axis_name": "ep", "capacity": 16, "drop": drop, "active": active}
        return xm.dispatch(x, idx, weights, **options).x

    text = lowered_for_nodes(body)
    assert "all_gather" not in text and "all_to_all" not in text
    calls = calls_in(text)
    assert [name for name, _ in calls] == ["xen_moe_dispatch"] * 2
    gathering, moving = (attributes for _, attributes in calls)
    assert (gathering["num_tokens"], gathering["hidden"]) == rows and gathering["num_experts"] == gathering[
        "top_k"
    ] == 4
    assert gathering["masked"] == moving["masked"] == masked and gathering["site"] != moving["site"]


# -- nodes -------------------------------------------------------------------------------------------------------------


def lowered_for_nodes(body, sizes=(4,), axes=("ep",), tokens=16, hidden=256) -> str:
    """The text of `body(x, idx, weights)` for CUDA, on an axis or two."""
    mesh = jax.make_mesh(sizes, axes, devices=jax.devices()[: int(np.prod(sizes))])
    shapes = [
        jax.ShapeDtypeStruct((mesh.size * tokens, n), dtype, sharding=NamedSharding(mesh, P(axes)))
        for n, dtype in ((hidden, jnp.bfloat16), (4, jnp.int32), (4, jnp.float32))
    ]
    mapped = jax.shard_map(body, mesh=mesh, in_specs=(P(axes),) * 3, out_specs=P(axes), check_vma=False)
    return jax.jit(mapped).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()


def calls_in(text: str) -> list[tuple[str, dict[str, int]]]:
    """Name and integer attributes of every operation."""
    lines = [line for line in text.splitlines() if "custom_call @xen_moe" in line]
    return [
        (
            re.search(r"@(xen_moe_\w+)\(", line).group(1),
            {name: int(value) for name, value in re.findall(r"(\w+) = (-?\d+) : i64", line)},
        )
        for line in lines
    ]


def nodes_of(per_node: int, **fields) -> xm.KernelConfig:
    return xm.KernelConfig(ranks_per_node=per_node, **fields)


def there_and_back(config, axes=("ep",), **options):
    def body(x, idx, weights):
        routed = xm.dispatch(x, idx, weights, num_experts=8, axis_name=axes, config=config, **options)
        return xm.combine(routed.x, routed.handle, config=config)

    return body


@pytest.mark.parametrize(
    ("sizes", "axes", "per_node", "wanted", "chunks"),
    [
        ((4,), ("ep",), 2, 2, True),
        ((4,), ("ep",), 1, 1, True),
        ((2, 2), ("node", "gpu"), 2, 2, True),
        ((2, 2), ("node", "gpu"), None, 2, False),
        ((4,), ("ep",), 4, 4, False),
        ((4,), ("ep",), None, 4, False),
    ],
    ids=str,
)
@pytest.mark.parametrize("mode", ["auto", "throughput", "low_latency"])
def test_kernels_across_nodes_run_where_ranks_per_node_says_so(sizes, axes, per_node, wanted, chunks, mode):
    """A second axis alone changes the numerics, and not the kernels."""
    config = xm.KernelConfig(ranks_per_node=per_node, mode=mode)
    for options in ({}, {"active": jnp.ones(4, bool)}):
        found = calls_in(lowered_for_nodes(there_and_back(config, axes, **options), sizes, axes))
        assert [name for name, _ in found] == ["xen_moe_dispatch", "xen_moe_combine"]
        for name, attributes in found:
            assert attributes["ranks"] == 4 and attributes["ranks_per_node"] == wanted
            assert (attributes["chunk_tokens"] > 0) == chunks and attributes["masked"] == bool(options)
            two_axes = name == "xen_moe_combine" and wanted < 4 and not chunks  # over NVLink: never with few tokens
            assert attributes["low_latency"] == (mode != "throughput" and not two_axes)


def test_gradients_and_async_operations_stay_between_nodes():
    """Gradients of rows and weights run by the same kernels, with no exchange beside them; a start is the whole
    operation."""
    config = nodes_of(2)

    def loss(x, weights, idx):
        flight = xm.dispatch_start(x, idx, weights, num_experts=8, axis_name="ep", config=config)
        routed = xm.dispatch_done(flight)
        done = xm.combine_done(xm.combine_start(routed.x, routed.handle, config=config))
        return jnp.sum(done.astype(jnp.float32))

    found = calls_in(lowered_for_nodes(lambda x, idx, weights: jax.grad(loss, (0, 1))(x, weights, idx)))
    names = [name for name, _ in found]
    assert {"xen_moe_dispatch", "xen_moe_redispatch", "xen_moe_combine"} == set(names)
    assert len(found) >= 4 and all(attributes["chunk_tokens"] > 0 for _, attributes in found)


@pytest.mark.parametrize("layout", ["grouped", "ranked", "padded"])
def test_every_layout_and_wire_goes_between_nodes(layout):
    for wire in (None, "float8_e4m3fn", "int8:ue8m0"):

        def body(x, idx, weights, wire=wire):
            routed = xm.dispatch(
                x, idx, weights, num_experts=8, axis_name="ep", layout=layout, wire=wire, config=nodes_of(2)
            )
            return xm.combine(routed.x, routed.handle, weighted=False, wire=wire, config=nodes_of(2))

        assert all(attributes["chunk_tokens"] > 0 for _, attributes in calls_in(lowered_for_nodes(body)))


def test_chunks_hold_every_token():
    for tokens, asked in itertools.product((1, 5, 64, 257, 4096, 8192), (None, 1, 7, 32, 1000)):
        chunk = schedules.chunk_tokens(spec(tokens), nodes_of(2, chunk_tokens=asked))
        assert 1 <= chunk <= 32 and -(-tokens // chunk) <= 256
    assert schedules.chunk_tokens(spec(4096), nodes_of(4)) == schedules.chunk_tokens(spec(4096), xm.KernelConfig()) == 0
    with pytest.raises(
        ValueError, match=r"num_tokens=8193: between nodes.* at most 8192 tokens a rank; split the batch"
    ):
        schedules.chunk_tokens(spec(8193), nodes_of(2))


def test_few_tokens_go_straight_between_nodes_where_little_more_crosses():
    """A row for each rank in place of one for each node, as far as that takes no longer than a hop over NVLink."""

    def takes(tokens: int, config, hidden: int = 7168, dtype=jnp.bfloat16, **kw) -> bool:
        return schedules.use_low_latency(spec(tokens, **kw), hidden, dtype, config, wire=None)

    assert takes(1, nodes_of(2)) and takes(11, nodes_of(2)) and not takes(12, nodes_of(2))
    assert takes(22, nodes_of(2), dtype=jnp.float8_e4m3fn) and not takes(23, nodes_of(2), dtype=jnp.float8_e4m3fn)
    assert takes(4, nodes_of(8), ranks=16) and not takes(5, nodes_of(8), ranks=16)
    assert takes(384, nodes_of(1)) and not takes(385, nodes_of(1)), "the same rows either way"
    asked = nodes_of(2, mode="low_latency")
    assert takes(512, asked) and not takes(513, asked), "sixteen chunks of 32"
    assert not takes(1, nodes_of(2, mode="throughput"))
    assert schedules.chunk_tokens(spec(512), asked, low_latency=True) == 32
    assert schedules.chunk_tokens(spec(512), nodes_of(2, chunk_tokens=7), low_latency=True) == 7
    assert not takes(113, nodes_of(2, chunk_tokens=7, mode="low_latency"))
    schedule = schedules.dispatch(spec(128), 7168, asked, 132, low_latency=True)
    assert (
        schedule.layout_blocks == 8
        and schedule.blocks - schedule.layout_blocks - schedule.push_blocks > schedule.blocks // 2
    )


def test_processes_run_the_same_kernels_between_nodes_as_one_process(monkeypatch):
    """Few tokens, and inactive ranks: over NCCL as by pointer."""
    from xen_moe_jax.backends.cuda import call

    monkeypatch.setattr(jax, "process_count", lambda: 4)
    for mode in ("auto", "low_latency"):
        config = nodes_of(2, mode=mode)
        assert schedules.use_low_latency(spec(4), 7168, jnp.bfloat16, config, wire=None)
        schedule = schedules.dispatch(spec(4), 7168, config, 132, low_latency=True)
        found = call.attributes(spec(4), 7168, jnp.bfloat16, schedule, config, masked=True)
        assert found["masked"] and found["low_latency"] and found["ranks_per_node"] == 2


def test_which_kernels_gather():
    """Small operands of whole vectors go through lines, and rows between nodes by a dispatch."""

    def gather(shape, config=xm.KernelConfig(), dtype=jnp.bfloat16, **options):  # noqa: B008  it is frozen
        text = lowered_for_nodes(lambda x, *_: xm.all_gather(jnp.zeros(shape, dtype), "ep", config=config, **options))
        (call,) = calls_in(text)
        return call

    target, small = gather((128, 7168))
    assert target == "xen_moe_exchange" and small["gather"] and small["low_latency"] and not small["ragged"]
    assert (small["operand_units"], small["output_units"], small["unit_bytes"]) == (128, 512, 2 * 7168)
    assert gather((1, 64))[1]["lanes"] == 1, "a block moves 7680 bytes"
    assert not gather((3, 5))[1]["low_latency"], "30 bytes"
    assert not gather((4096, 7168))[1]["low_latency"]
    assert gather((1024, 7168), xm.KernelConfig(mode="low_latency"))[1]["low_latency"]
    assert not gather((128, 7168), xm.KernelConfig(mode="throughput"))[1]["low_latency"]
    target, wire = gather((128, 7168), wire="int8")
    assert target == "xen_moe_exchange" and wire["unit_bytes"] * wire["operand_units"] == 128 * (7168 + 4 * 56)
    target, far = gather((128, 7168), nodes_of(2))
    assert target == "xen_moe_dispatch" and far["ranks_per_node"] == 2 and far["top_k"] == 4
    assert gather((6, 3), nodes_of(2), jnp.bool_)[0] == "xen_moe_dispatch"
    with pytest.raises(ValueError, match="all_gather of complex64 between nodes"):
        gather((6, 3), nodes_of(2), jnp.complex64)
    with pytest.raises(ValueError, match=r"groups .*of 2 ranks with KernelConfig.ranks_per_node=1"):
        gather((6, 3), nodes_of(1), axis_index_groups=[[0, 1], [2, 3]])
    assert gather((6, 3), nodes_of(2), axis_index_groups=[[0, 1], [2, 3]])[0] == "xen_moe_exchange"
    with pytest.raises(ValueError, match=r"groups .*of 2 ranks with KernelConfig.ranks_per_node=2.*share a node"):
        gather((6, 3), nodes_of(2), axis_index_groups=[[0, 2], [1, 3]])


def test_when_rows_are_multiplied_rank_by_rank():
    def calls(rows, columns, config=xm.KernelConfig(), dtype=jnp.bfloat16):  # noqa: B008  it is frozen
        def body(*_):
            return xm.all_gather_matmul(
                jnp.zeros((rows, 4096), dtype), jnp.zeros((4096, columns), dtype), "ep", config=config
            )

        (call,) = calls_in(lowered_for_nodes(body))
        return call

    target, large = calls(4096, 7168)
    assert target == "xen_moe_gather_matmul"
    assert (large["lanes"], large["depth"], large["columns"], large["dtype"]) == (8 * 16, 4096, 7168, 0)
    assert (
        calls(4096, 4096)[1]["lanes"] == 14 * 16
        and calls(4096, 128, xm.KernelConfig(mode="throughput"))[1]["lanes"] == 24 * 16
    )
    assert calls(128, 7168)[0] == "xen_moe_exchange", "its matmul hides nothing"
    assert calls(128, 7168, xm.KernelConfig(mode="throughput"))[0] == "xen_moe_gather_matmul"
    assert calls(4096, 7168, dtype=jnp.float32)[0] == "xen_moe_exchange"
    assert calls(4096, 7168, nodes_of(2))[0] == "xen_moe_dispatch"


def test_nodes_that_the_backend_finds_count_as_given_ones(monkeypatch):
    """In a job on several nodes, no kernel of a drop-in stores at another node by pointer."""
    monkeypatch.setattr(backends, "ranks_per_node", lambda sizes, backend: 2)
    config, rows = xm.KernelConfig(mode="throughput"), jnp.zeros((512, 256), jnp.bfloat16)

    def gathered(x, *_):
        out, pull = jax.vjp(lambda w: xm.all_gather_matmul(rows, w, "ep", config=config), x)
        return pull(out)[0]

    names = [name for name, _ in calls_in(lowered_for_nodes(gathered, tokens=256))]
    assert names == 2 * ["xen_moe_dispatch"], names
    at = jnp.arange(4, dtype=jnp.int32)
    for name, call in (
        ("all_to_all", lambda x, *_: xm.all_to_all(x, "ep", 0, 0, tiled=True)),
        ("ragged_all_to_all", lambda x, *_: xm.ragged_all_to_all(x, x, at, at, at, at, axis_name="ep")),
    ):
        with pytest.raises(ValueError, match=rf"{name}.* of 4 ranks with KernelConfig.ranks_per_node=2, .* found"):
            lowered_for_nodes(call)


def test_what_does_not_cross_between_nodes_is_refused(monkeypatch):
    """It says so itself, and no error about its mesh names nodes as a remedy."""
    across = []
    monkeypatch.setattr(devices, "prepare", lambda keys, per_node, between_nodes: across.append(between_nodes))
    at, halves = jnp.arange(4, dtype=jnp.int32), ((0, 1), (2, 3))
    lowered_for_nodes(lambda x, *_: xm.all_to_all(x, "ep", 0, 0, tiled=True))
    lowered_for_nodes(lambda x, *_: xm.ragged_all_to_all(x, x, at, at, at, at, axis_name="ep"))
    lowered_for_nodes(lambda x, *_: xm.all_gather(x, "ep", axis_index_groups=halves))
    lowered_for_nodes(lambda x, *_: xm.all_gather(x, "ep"))
    assert across == [False, False, False, True]
    with pytest.raises(ValueError, match=r"all_to_all.* of 4 ranks with KernelConfig.ranks_per_node=2.*'reference'"):
        lowered_for_nodes(lambda x, *_: xm.all_to_all(x, "ep", 0, 0, tiled=True, config=nodes_of(2)))


@pytest.mark.parametrize(("ranks", "per_node"), [(32, 8), (72, 8), (256, 8), (18, 3)])
@pytest.mark.parametrize("mode", ["throughput", "low_latency"])
def test_many_ranks_go_between_nodes(ranks, per_node, mode):
    """Also with inactive ranks, and few tokens from rank to rank as far as low-latency kernels go within a node."""
    from xen_moe_jax.backends.cuda import call

    config, few = nodes_of(per_node, mode=mode), spec(32, ranks)
    low_latency = schedules.use_low_latency(few, 7168, jnp.bfloat16, config, wire=None)
    assert low_latency == (mode == "low_latency")
    schedule = schedules.dispatch(few, 7168, config, 132, low_latency=low_latency)
    found = call.attributes(few, 7168, jnp.bfloat16, schedule, config, masked=True)
    assert (found["ranks"], found["ranks_per_node"], found["masked"]) == (ranks, per_node, 1)
    assert found["low_latency"] == low_latency and 1 <= found["chunk_tokens"] <= 32
    assert not low_latency or schedule.layout_blocks + schedule.push_blocks < schedule.blocks, (
        "no block is left to receive"
    )
    most = 16383 // ranks  # rows that these kernels take of all ranks
    takes = [
        schedules.use_low_latency(spec(n, ranks), 7168, jnp.bfloat16, nodes_of(per_node, mode="low_latency"), wire=None)
        for n in (min(most, 512), most + 1)
    ]
    assert takes == [True, False]


def test_what_is_too_many_between_nodes_is_refused_with_a_remedy():
    from xen_moe_jax.backends.cuda import call

    call.check_nodes(spec(8, ranks=256), nodes_of(8))
    with pytest.raises(ValueError, match=r"ranks_per_node=2 on an axis of 66 ranks makes 33 nodes.* at most 32: put.*"):
        call.check_nodes(spec(8, ranks=66), nodes_of(2))
    with pytest.raises(ValueError, match=r"at most 256 ranks, not 264.*reference"):
        call.attributes(
            spec(8, ranks=264), 7168, jnp.bfloat16, schedules.Schedule(4, 2, 2, 1, 8), nodes_of(8), masked=False
        )


@pytest.mark.parametrize("ranks", [4, 16, 32, 72])
def test_memory_between_nodes_stays_within_the_bound(ranks):
    """The bound is the memory of one node that keeps its rows whole, and a chunk of every token for every node, there
    and back."""
    for tokens in (1, 128, 4096):
        sizes = {"num_tokens": tokens, "hidden": 7168, "num_ranks": ranks, "backend": "cuda"}
        one = xm.buffer_size_hint(**sizes)
        # more ranks of one node have rings; between nodes rows are whole, and their bytes go as the ranks
        whole = xm.buffer_size_hint(**sizes | {"num_ranks": 16}) * ranks // 16 if ranks > 16 else one
        for per_node in (n for n in (1, 2, 8, ranks // 2) if n < ranks <= 32 * n):
            chunks = 2 * 2 * (ranks // per_node) * (tokens + 32) * (7168 * 2 + 64 + 16)
            found = xm.buffer_size_hint(ranks_per_node=per_node, **sizes)
            assert found <= whole + chunks + 64 * 2**20 and (
                tokens < 4096 or found > one
            )  # few tokens leave out the low-latency kernels
        assert xm.buffer_size_hint(ranks_per_node=ranks, **sizes) == one
