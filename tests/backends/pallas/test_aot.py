"""The kernels compiled ahead of time for real chips by libtpu, and checks of the compiled programs' texts. No TPU is
needed."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("libtpu", reason="compiling for TPU needs libtpu: pip install 'xen-moe-jax[tpu]'")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import xen_moe_jax as xm
from benchmarks.tpu import bundles as tpu_bundles
from benchmarks.tpu import programs as tpu_programs
from benchmarks.tpu import topologies as tpu_topologies
from benchmarks.tpu.programs import Case

pytestmark = pytest.mark.tpu_aot

DEEPSEEK = {"hidden": 7168, "experts": 256, "top_k": 8}
FP8 = Case("fp8", 4096, "grouped", "float8_e4m3fn", "float8_e4m3fn")
BF16 = Case("bf16", 4096, "grouped", None, None)
DECODE = Case("decode", 128, "padded", "float8_e4m3fn", None)
DECODE_INT8 = Case("decode-int8", 128, "padded", "int8", "int8")
RANKED = Case("ranked", 1024, "ranked", None, None)
FUSED = [
    "xen_moe_push",
    "xen_moe_index_rows",
    "xen_moe_place",
    "xen_moe_order_pairs",
    "xen_moe_reduce_slots",
    "xen_moe_reduce_ranks",
]
DECODING = sorted(
    {"xen_moe_pack_tokens", "xen_moe_index_tokens", "xen_moe_order_tokens", *FUSED}
    - {"xen_moe_push", "xen_moe_index_rows", "xen_moe_order_pairs"}
)


def fused(case: Case, sizes: dict[str, int]) -> list[str]:
    """Kernels of a dispatch and a combine on 8 devices: XLA's all-gather brings a decode's records to every rank."""
    if tpu_programs.gathered(case, "dispatch", 8, sizes["top_k"], sizes["hidden"]):
        return DECODING
    return sorted(FUSED)


LARGEST_LIST_OF_BLOCKS = 4096
"""Blocks of `routed.x` that `place` sorts into those that hold rows and those that do not."""
IN_CI = {"v4": "decode", "v5e": "decode-int8", "v5p": "fp8", "v6e": "bf16", "tpu7x": "decode"}
"""The full-size program that every run of the suite compiles for a generation: each case and each generation once. The
other pairs take minutes and are marked slow.
"""
PROGRAMS = [
    pytest.param(generation, case, marks=[] if IN_CI[generation] == case.name else pytest.mark.slow)
    for generation in tpu_topologies.TOPOLOGIES
    for case in (FP8, BF16, DECODE, DECODE_INT8)
]


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


def copies(text: str) -> list[tuple[int, str]]:
    """(bytes, line) of every copy, transpose and reshape that XLA left as an operation of its own and that stays in
    HBM.
    """
    found = []
    for line in text.splitlines():
        match = re.match(r"\s*(?:ROOT )?%\S+ = (\w+)\[([\d,]*)\](\S*) (?:copy|transpose|reshape)\(", line)
        if match and "S(1)" not in match[3]:
            elements = int(np.prod([int(d) for d in match[2].split(",") if d] or [1]))
            found.append((elements * tpu_programs.BITS.get(match[1], 32) // 8, line.strip()[:160]))
    return found


@pytest.mark.parametrize(("generation", "case"), PROGRAMS, ids=lambda p: p if isinstance(p, str) else p.name)
def test_full_size_program(generation, case):
    """Our kernels, counts as the only collective, no full-size copy, memory as predicted."""
    compiled = tpu_programs.compile_own(generation, case, "both", DEEPSEEK)
    text = compiled.as_text()
    assert sorted(tpu_programs.kernels(text)) == fused(case, DEEPSEEK)

    tokens_bytes = case.tokens * DEEPSEEK["hidden"] * 2
    moved = tpu_programs.collectives(text)
    most = 8 * (DEEPSEEK["experts"] + 8) * 4
    if "xen_moe_pack_tokens" in tpu_programs.kernels(text):  # and no counts
        most = predicted_staging(case, "dispatch")
    assert "ragged-all-to-all" not in moved and sum(moved.values()) <= most, moved
    assert_no_large_scalar_operation(text, case)
    # the tokens that a decode gathered are copied once on v4, into its CMEM
    too_large = [c for c in copies(text) if c[0] >= tokens_bytes and "copy(%all_gather" not in c[1]]
    assert not too_large, too_large

    staged = max(predicted_staging(case, op) for op in ("dispatch", "combine"))
    rows = (
        tpu_programs.capacity_for(case.tokens, DEEPSEEK["top_k"]) if case.layout == "grouped" else 32 * 8 * case.tokens
    )
    predicted = staged + rows * DEEPSEEK["hidden"] * 2
    temp = compiled.memory_analysis().temp_size_in_bytes
    assert predicted * 0.95 <= temp <= 1.1 * predicted + 2 * 8 * case.tokens * 8 * 4 * 40, (temp, predicted)


def assert_no_large_scalar_operation(text: str, case: Case) -> None:
    entries = case.tokens * DEEPSEEK["top_k"]
    found = tpu_bundles.scalar_operations(text)
    assert all(found.get(kind, 0) <= entries for kind in ("gather", "scatter")), found
    assert found.get("sort", 0) <= max(entries, LARGEST_LIST_OF_BLOCKS), found


def predicted_staging(case: Case, operation: str) -> int:
    """Bytes of staging on one device: a record for each of 8 x T (source, token) pairs; a combine's is as large with
    top-8.
    """
    counts = tpu_programs.count_rows(64, 8, DEEPSEEK["experts"], DEEPSEEK["top_k"], 0)
    record = tpu_programs.traffic(case, operation, counts, DEEPSEEK["hidden"])["record_bytes"]
    return 8 * case.tokens * record


ODD_SIZES = [
    ("v5e", Case("one-token", 1, "padded", "float8_e4m3fn", None), {"hidden": 7168, "experts": 256, "top_k": 8}),
    ("v5p", Case("hidden-200", 100, "grouped", None, None), {"hidden": 200, "experts": 60, "top_k": 6}),
    ("v5e", Case("odd-capacity", 37, "grouped", "int8", "int8"), {"hidden": 2048, "experts": 60, "top_k": 6}),
    ("v4", Case("top2", 333, "grouped", None, "float8_e4m3fn"), {"hidden": 4096, "experts": 96, "top_k": 2}),
    ("v6e", Case("top1-ue8m0", 64, "grouped", "float8_e4m3fn:ue8m0", None), {"hidden": 384, "experts": 5, "top_k": 1}),
]


@pytest.mark.parametrize(("generation", "case", "sizes"), ODD_SIZES, ids=lambda p: getattr(p, "name", None))
def test_sizes_that_do_not_line_up(generation, case, sizes):
    text = tpu_programs.compile_own(generation, case, "both", sizes).as_text()
    assert sorted(tpu_programs.kernels(text)) == fused(case, sizes)


@pytest.mark.parametrize(
    ("generation", "dtype"),
    [("v4", "int8"), ("v5p", "float8_e4m3fn"), slow("v4", "float8_e4m3fn"), slow("v5p", "int8")],
)
def test_quantized_tokens_travel_as_they_are(generation, dtype):
    mesh = tpu_topologies.mesh(generation)
    sharding = jax.NamedSharding(mesh, P("ep"))

    def struct(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    config = xm.KernelConfig(mode="throughput")  # so few records would be gathered on all ranks

    def body(values, scales, idx):
        options = {"num_experts": 64, "axis_name": "ep", "capacity": 1024, "config": config}
        return xm.dispatch(xm.BlockScaled(values, scales), idx, **options).x

    operands = struct((8 * 128, 2048), dtype), struct((8 * 128, 16), jnp.float32), struct((8 * 128, 4), jnp.int32)
    program = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("ep"), out_specs=P("ep")))
    text = program.trace(*operands).lower(lowering_platforms=("tpu",)).compile().as_text()
    assert set(tpu_programs.kernels(text)) == {"xen_moe_push", "xen_moe_index_rows", "xen_moe_place"}


def start_done_program(generation, gradient=False, tokens=256, hidden=2048, rows=512, **mesh_options):
    mesh = tpu_topologies.mesh(generation, **mesh_options)
    axes = mesh.axis_names
    config = xm.KernelConfig(backend="pallas")
    options = {"capacity": 4 * tokens, "config": config}

    def body(x, idx, weights, a, b):
        name = axes if len(axes) == 2 else axes[0]
        flight = xm.dispatch_start(x, idx, weights, num_experts=64, axis_name=name, **options)
        flight, a = xm.overlap(flight, jnp.matmul, a, b)
        routed = xm.dispatch_done(flight)
        flight = xm.combine_start(routed.x, routed.handle, config=config)
        flight, a = xm.overlap(flight, jnp.matmul, a, b)
        return xm.combine_done(flight), a

    def loss(x, idx, weights, a, b):
        out, a = body(x, idx, weights, a, b)
        return jnp.sum(out.astype(jnp.float32)) + jnp.sum(a.astype(jnp.float32))

    function = jax.grad(loss, argnums=(0, 2, 3)) if gradient else body
    specs = (P(axes), P(axes), P(axes), P(axes), P())
    out = (P(axes), P(axes), P(axes)) if gradient else P(axes)
    program = jax.jit(jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=out))

    def struct(shape, dtype, spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, spec))

    operands = [
        struct((mesh.size * tokens, hidden), jnp.bfloat16, P(axes)),
        struct((mesh.size * tokens, 4), jnp.int32, P(axes)),
        struct((mesh.size * tokens, 4), jnp.float32, P(axes)),
        struct((mesh.size * rows, hidden), jnp.bfloat16, P(axes)),
        struct((hidden, hidden), jnp.bfloat16, P()),
    ]
    return program.trace(*operands).lower(lowering_platforms=("tpu",)).compile().as_text()


def schedule(text: str, half: str) -> list[str]:
    """The steps of a scheduled program, in its order: the caller's matmuls, and the group of `half` in each line that
    matches.
    """
    assert "is_scheduled=true" in text
    entry = text[text.index("ENTRY") :]
    matmuls = set(re.findall(r"%(\S+) \([^\n]*\n(?:(?!\n}).)*?convolution\(", text, re.DOTALL))
    order = []
    for line in entry.splitlines():
        if re.match(r"\s*(?:ROOT )?%(\S+) = ", line) is None:
            continue
        if found := re.match(half, line):
            order.append(found[found.lastindex])
        elif "xen_moe_" in line.replace("xen_moe_overlap", ""):  # the orders of a dispatch are matrix products, too
            continue
        elif " convolution(" in line or any(re.search(rf"calls=%{re.escape(m)}\b(?!\.)", line) for m in matmuls):
            order.append("matmul")
    return order


@pytest.mark.parametrize("generation", ["v5e", slow("v5p"), slow("v6e")])
def test_a_matmul_is_scheduled_between_start_and_done(generation):
    order = schedule(start_done_program(generation), r"\s*%xen_moe_(start|done)\S* = .*tpu_custom_call")
    assert order == ["start", "matmul", "done", "start", "matmul", "done"], order


@pytest.mark.parametrize(
    ("generation", "tokens", "hidden"), [("v5e", 256, 2048), slow("v5p", 256, 2048), slow("v6e", 4096, 7168)]
)
def test_a_matmul_is_scheduled_while_records_cross_slices(generation, tokens, hidden):
    """XLA makes a send and a receive of the exchange over DCN, of a record for every token and slice. Where its model
    says that a small receive takes no time, it begins one late.
    """
    text = start_done_program(
        generation, axes=("dcn", "ici"), shape=(2, 8), num_slices=2, tokens=tokens, hidden=hidden, rows=max(512, tokens)
    )
    block_rows = f"(?:{hidden // 256}|{hidden // 256 + 1})"  # a dispatch has one more for its header
    records = rf"= \(s32\[2,{tokens},{block_rows},128\]"
    sends = re.findall(rf"%(send\S*) {records}", text)
    ends = rf"= token\[\] (send-done)\(%(?:{'|'.join(map(re.escape, sends))})\)"
    order = schedule(text, rf"\s*%\S+ (?:{records}.*? (send|recv|recv-done)\(|{ends})")
    assert len(order) == 10, order
    for first, *between, last in (order[:5], order[5:]):
        assert first == "send" and last == "recv-done" and set(between) == {"recv", "matmul", "send-done"}, order
        assert between.index("matmul") < between.index("send-done"), order
        if tokens == 4096:
            assert between == ["recv", "matmul", "send-done"], order


def test_gradients_of_start_and_done_compile():
    kernels = tpu_programs.kernels(start_done_program("v5e", gradient=True))
    assert {"xen_moe_start", "xen_moe_done", "xen_moe_push", "xen_moe_reduce_slots"} <= set(kernels)


def test_a_precision_for_all_matmuls_reaches_no_kernel_for_bfloat16():
    """Mosaic refuses it for operands of less than 32 bits."""
    with jax.default_matmul_precision("highest"):
        assert "xen_moe_push" in tpu_programs.kernels(start_done_program("v5e", gradient=True))


@pytest.mark.parametrize("generation", ["v5e", slow("v5p")])
def test_two_slices(generation):
    """Rows cross DCN in XLA's all-to-all between chips of one index, ICI in our kernels; routing rides in them."""
    case = Case("two slices", 128, "grouped", None, None)
    text = tpu_programs.compile_own(
        generation, case, "dispatch", DEEPSEEK, axes=("dcn", "ici"), shape=(2, 8), num_slices=2
    ).as_text()
    kernels = ["xen_moe_forward", "xen_moe_index_rows", "xen_moe_pack", "xen_moe_place"]
    assert sorted(tpu_programs.kernels(text)) == kernels
    # a collective across slices is received from the host
    across = re.findall(r"= \((s32|s8|f32)\[([\d,]*)\][^=]* recv\(", text)
    words = [int(np.prod([int(d) for d in dims.split(",")])) for _, dims in across]
    record = tpu_programs.traffic(case, "dispatch", tpu_programs.count_rows(8, 8, 8, 1, 0), 7168)["record_bytes"] // 4
    routing = sum(n for n in words if n % record)
    counts = 16 * (DEEPSEEK["experts"] + 16 + 2)  # of all ranks; over DCN come those of a rail, in whole tiles
    dropped = 16 * case.tokens  # in a loop that turns where a rank drops rows
    within = sum(tpu_programs.collectives(text).values())
    assert routing <= counts // 2 + dropped and within <= 4 * (counts + dropped), (words, within)
    assert_no_large_scalar_operation(text, case)


def test_two_slices_combine():
    case = Case("two slices", 128, "grouped", None, None)
    text = tpu_programs.compile_own(
        "v5e", case, "combine", DEEPSEEK, axes=("dcn", "ici"), shape=(2, 8), num_slices=2
    ).as_text()
    assert sorted(tpu_programs.kernels(text)) == ["xen_moe_order_pairs", "xen_moe_reduce_ranks", "xen_moe_reduce_slots"]


def test_an_axis_across_slices_is_rejected():
    with pytest.raises(ValueError, match=r"mesh axis ep joins devices of slices \[0, 1\].*axis_name=\(slow, fast\)"):
        tpu_programs.compile_own("v5e", DECODE, "dispatch", DEEPSEEK, num_slices=2)


LARGE = Case("large", 128, "grouped", "float8_e4m3fn", None)
SIXTY_FOUR = {"topology": "v5e:8x8"}
"""More ranks than slots as on 256 chips, with the same kernels and collectives; XLA compiles fifteen times as fast."""


@pytest.mark.parametrize(
    ("generation", "experts", "where"),
    [("v5e", 48, SIXTY_FOUR), slow("v5e", 256, {"large": True}), slow("v5p", 256, {"large": True})],
    ids=["v5e-64", "v5e-256", "v5p-512"],
)
def test_large_topology(generation, experts, where):
    """More ranks than slots, packed staging, and (64 and 512 chips) ranks that have no expert."""
    sizes = DEEPSEEK | {"experts": experts}
    text = tpu_programs.compile_own(generation, LARGE, "both", sizes, **where).as_text()
    assert sorted(tpu_programs.kernels(text)) == sorted(FUSED)
    assert_only_counts_travel(text, LARGE, tpu_topologies.mesh(generation, **where).size)


@pytest.mark.parametrize("where", [SIXTY_FOUR, slow({"large": True})], ids=["v5e-64", "v5e-256"])
def test_start_and_done_on_a_large_topology(where):
    """Their routing rides in the records, too: chips exchange counts."""
    text = tpu_programs.compile_own("v5e", LARGE, "both halves", DEEPSEEK, **where).as_text()
    local = {"xen_moe_pack", "xen_moe_reduce_slots_local"}
    expected = {"xen_moe_start", "xen_moe_done", *local, *FUSED} - {"xen_moe_push", "xen_moe_reduce_slots"}
    assert sorted(tpu_programs.kernels(text)) == sorted(expected)
    assert_only_counts_travel(text, LARGE, tpu_topologies.mesh("v5e", **where).size)


def assert_only_counts_travel(text: str, case: Case, ranks: int) -> None:
    """Up to 256 ranks less than 1 MiB, and less than the routing of every rank's tokens. On more ranks: the slots of
    each rank for each expert, and twice its records for each rank, of which the routing of few tokens may be less."""
    moved = tpu_programs.collectives(text)
    most = min(2**20, ranks * case.tokens * DEEPSEEK["top_k"] * 4)
    if ranks > 256:
        most = int(1.1 * 4 * ranks * (2 * ranks + DEEPSEEK["experts"]))
    assert 0 < sum(moved.values()) < most, moved
    assert_no_large_scalar_operation(text, case)


@pytest.mark.slow
@pytest.mark.parametrize(("generation", "tokens"), [("v5e", 8192), ("v5p", 4096)])
@pytest.mark.parametrize("operation", ["dispatch", "combine"])
def test_large_topology_at_real_token_counts(generation, tokens, operation):
    """The kernels' use of SMEM does not grow with the ranks."""
    case = Case("large", tokens, "grouped", "float8_e4m3fn", None)
    text = tpu_programs.compile_own(generation, case, operation, DEEPSEEK, large=True).as_text()
    assert set(tpu_programs.kernels(text)) <= set(FUSED)
    if generation == "v5e":  # 256 chips; 512 gather twice as many counts
        assert_only_counts_travel(text, case, 256)


@pytest.mark.parametrize(
    ("generation", "operation"),
    [("v4", "all_to_all"), ("v5p", "ragged_all_to_all"), slow("v4", "ragged_all_to_all"), slow("v5p", "all_to_all")],
)
def test_drop_ins(generation, operation):
    mesh = tpu_topologies.mesh(generation)
    sharding = jax.NamedSharding(mesh, P("ep"))
    rows = jax.ShapeDtypeStruct((8 * 64, 1024), jnp.bfloat16, sharding=sharding)
    sizes = jax.ShapeDtypeStruct((8 * 8,), jnp.int32, sharding=sharding)

    def body(x, *offsets):
        if operation == "all_to_all":
            return xm.all_to_all(x, "ep", 0, 0, tiled=True)
        return xm.ragged_all_to_all(x, jnp.zeros_like(x), *offsets, axis_name="ep")

    program = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("ep"), out_specs=P("ep")))
    text = program.trace(rows, *[sizes] * 4).lower(lowering_platforms=("tpu",)).compile().as_text()
    assert tpu_programs.kernels(text) == ["xen_moe_exchange"]
    assert sum(tpu_programs.collectives(text).values()) <= 4096


# -- bad input --------------------------------------------------------------------------------------------------------


def lower(config: xm.KernelConfig, dtype=jnp.bfloat16, hidden: int = 7168, capacity: int = 4096):
    mesh = tpu_topologies.mesh("v4")
    sharding = jax.NamedSharding(mesh, P("ep"))
    x = jax.ShapeDtypeStruct((8 * 4096, hidden), dtype, sharding=sharding)
    idx = jax.ShapeDtypeStruct((8 * 4096, 8), jnp.int32, sharding=sharding)

    def body(x, idx):
        return xm.dispatch(x, idx, num_experts=256, axis_name="ep", capacity=capacity, config=config).x

    program = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("ep"), out_specs=P("ep")))
    return program.trace(x, idx).lower(lowering_platforms=("tpu",))


def test_a_block_over_the_vmem_budget_is_rejected_before_mosaic():
    with pytest.raises(
        ValueError, match=r"block_tokens=2048: the push kernel needs \d+ bytes of VMEM.*16777216 \(v4\)"
    ):
        lower(xm.KernelConfig(block_tokens=2048))


def test_a_budget_over_the_chip_is_rejected():
    with pytest.raises(ValueError, match=r"vmem_limit_bytes=33554432: v4 has 16777216 bytes of VMEM"):
        lower(xm.KernelConfig(vmem_limit_bytes=32 << 20))


def test_a_hidden_size_that_cannot_fit_is_rejected():
    with pytest.raises(ValueError, match=r"the push kernel needs \d+ bytes of VMEM for its smallest block"):
        lower(xm.KernelConfig(), hidden=1 << 19)


def test_a_table_over_the_smem_budget_is_rejected_before_mosaic():
    with pytest.raises(ValueError, match=r"place kernel needs \d+ bytes of SMEM.*at most 786432.*smaller capacity"):
        lower(xm.KernelConfig(), hidden=128, capacity=1 << 25)


def test_an_unsupported_dtype_is_rejected():
    with pytest.raises(TypeError, match=r"float16 is not supported by the Pallas kernels.*float32"):
        lower(xm.KernelConfig(), dtype=jnp.float16)


def test_the_collective_id_is_the_users():
    same = [lower(xm.KernelConfig(collective_id=n)).as_text() for n in (3, 3, 4)]
    assert same[0] == same[1] != same[2]


def test_the_highest_channel_compiles():
    lower(xm.KernelConfig(channel=15)).compile()


@pytest.mark.parametrize("layout", ["grouped", "padded"])
def test_inactive_ranks_compile_without_scalar_work(layout):
    """`active` is an argument of the compiled program: the same kernels, and no gather an entry at a time."""
    mesh = tpu_topologies.mesh("v5e")
    axes, tokens, hidden = mesh.axis_names, 64, 512

    def body(x, idx, weights, active):
        options = {"num_experts": 4 * mesh.size, "axis_name": axes[0], "layout": layout, "active": active}
        routed = xm.dispatch(x, idx, weights, **options, config=xm.KernelConfig(backend="pallas"))
        return xm.combine(routed.x, routed.handle, config=xm.KernelConfig(backend="pallas"))

    def struct(shape, dtype, spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, spec))

    rows = mesh.size * tokens
    operands = (
        struct((rows, hidden), jnp.bfloat16, P(axes)),
        struct((rows, 4), jnp.int32, P(axes)),
        struct((rows, 4), jnp.float32, P(axes)),
        struct((mesh.size,), jnp.bool_, P()),
    )
    mapped = jax.shard_map(body, mesh=mesh, in_specs=(P(axes),) * 3 + (P(),), out_specs=P(axes))
    compiled = jax.jit(mapped).lower(*operands).compile()
    assert len(compiled.input_shardings[0]) == 4
    found = tpu_bundles.scalar_operations(compiled.as_text())
    assert all(found.get(kind, 0) <= tokens * 4 for kind in ("gather", "scatter", "sort")), found
