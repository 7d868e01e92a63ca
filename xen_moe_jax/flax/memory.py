"""`xen-moe-jax memory`: bytes of the buffers that one rank needs for one MoE layer, by capacity, chunks and remat.

Nothing runs and no accelerator is needed: shapes come from the layer itself, traced for the given number of ranks. The
backward pass keeps the arrays that `jax.vjp` of the layer holds; weights, tokens and gradients are the caller's and are
left out, but for a table of the experts' weights in the formats in which they are shipped. XLA may keep less, by
fusing, and needs work space of its own.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from xen_moe_jax import _validate
from xen_moe_jax._command_line import Parser
from xen_moe_jax._quantized_weight import MXFP4_BLOCK, QuantizedWeight
from xen_moe_jax._spec import exact_capacity, worst_case_capacity
from xen_moe_jax.experts import grouped_matmul, hopper, quantized
from xen_moe_jax.flax._chunks import Chunk, through_experts
from xen_moe_jax.flax._config import MoEConfig
from xen_moe_jax.flax._parameters import ROUTER_PARAMETERS, parameter_table


@dataclasses.dataclass(frozen=True)
class MemoryEntry:
    """One line of the table: the name of an array, its shape and dtype, and how many of these arrays live at a time."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    count: int = 1

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize * self.count


def chunk_rows(config: MoEConfig, num_tokens: int, num_ranks: int) -> int:
    """Rows of the buffers of one chunk, with `num_tokens` tokens a rank."""
    tokens = -(-num_tokens // config.num_chunks)
    if config.balance is not None:
        slots = rank_slots(config, num_ranks)
        return exact_capacity(num_tokens=tokens, top_k=config.top_k, slots=slots, alignment=config.alignment)
    asked = config.chunk_capacity(tokens, num_ranks, config.expert_entries)
    if asked is not None:
        return asked
    return worst_case_capacity(
        layout=config.layout,
        num_ranks=num_ranks,
        num_tokens=tokens,
        top_k=config.top_k,
        num_experts=config.expert_entries,
        alignment=config.alignment,
    )


def rank_slots(config: MoEConfig, num_ranks: int) -> int:
    """Experts of which a rank may have rows."""
    if config.balance is not None:
        return _validate.exact_slots(config.slots_per_rank, config.num_experts, num_ranks, "memory")
    return -(-config.expert_entries // num_ranks)


def forward_buffers(config: MoEConfig, num_tokens: int, num_ranks: int, dtype: Any = jnp.bfloat16) -> list[MemoryEntry]:
    """Arrays of one chunk on one rank, from the dispatch to the combine; the arrays of the next chunk take their
    place."""
    tokens = -(-num_tokens // config.num_chunks)
    rows, name = chunk_rows(config, num_tokens, num_ranks), jnp.dtype(config.dtype or dtype).name
    slots = rank_slots(config, num_ranks)
    hidden, width = config.hidden_size, config.intermediate_size
    placed = [MemoryEntry("rows on their way back", (config.top_k * tokens, hidden), name)]
    lent = [MemoryEntry("expert weights in slots", (slots, hidden, width), name, 3 if config.gated else 2)]
    return [
        MemoryEntry("rows that came", (rows, hidden), name),
        MemoryEntry("expert projections", (rows, width), name, 2 if config.gated else 1),
        MemoryEntry("expert activation", (rows, width), name),
        MemoryEntry("rows that go back", (rows, hidden), name),
        MemoryEntry("combined tokens", (tokens, hidden), name),
        MemoryEntry("handle: positions", (num_ranks, tokens, config.top_k), "int32"),
        MemoryEntry("handle: counts", (num_ranks, slots), "int32"),
        MemoryEntry("handle: weights", (rows,), "float32"),
        MemoryEntry("handle: experts", (tokens, config.top_k), "int32"),
        *(placed if config.balance or config.num_slots else []),
        *(lent if config.balance else []),
    ]


def kept_buffers(config: MoEConfig, num_tokens: int, num_ranks: int, dtype: Any = jnp.bfloat16) -> list[MemoryEntry]:
    """Arrays that one rank keeps from the forward to the backward pass: residuals of dispatch, experts and combine."""
    config = dataclasses.replace(config, tensor_axis=None, expert_sharding=None)
    dtype = jnp.dtype(config.dtype or dtype)
    sizes = (num_ranks,) if len(config.expert_axes) == 1 else (1, num_ranks)
    mesh = AbstractMesh(sizes, config.expert_axes, axis_types=(AxisType.Auto,) * len(sizes))
    table = {n: p for n, p in parameter_table(config).items() if n not in ROUTER_PARAMETERS}
    local = -(-config.num_experts // num_ranks)
    weights = {
        n: jax.ShapeDtypeStruct((num_ranks * local, *p.shape[1:]), dtype)
        for n, p in table.items()
        if not n.startswith("shared_")
    }
    slots = (num_ranks * num_tokens, config.top_k)
    tokens = (
        jax.ShapeDtypeStruct((num_ranks * num_tokens, config.hidden_size), dtype),
        jax.ShapeDtypeStruct(slots, jnp.int32),
        jax.ShapeDtypeStruct(slots, jnp.float32),
    )
    kept: list[Any] = []

    def on_rank(weights: Any, x: jax.Array, topk_idx: jax.Array, topk_weights: jax.Array) -> jax.Array:
        def layer(weights: Any, x: jax.Array, topk_weights: jax.Array) -> jax.Array:
            return through_experts(config, weights, Chunk(x, topk_idx, topk_weights))[0]

        out, pull_back = jax.vjp(layer, weights, x, topk_weights)
        given = {id(a) for a in jax.tree.leaves((weights, x, topk_idx, topk_weights))}
        by_identity = {id(a): a for a in jax.tree.leaves(pull_back) if isinstance(a, jax.Array)}
        kept.extend(jax.typeof(a) for key, a in by_identity.items() if key not in given)
        return out

    split = PartitionSpec(config.axis_name)
    jax.eval_shape(jax.shard_map(on_rank, mesh=mesh, in_specs=split, out_specs=split), weights, *tokens)
    counts: dict[tuple[tuple[int, ...], str], int] = {}
    for aval in kept:
        counts[aval.shape, aval.dtype.name] = counts.get((aval.shape, aval.dtype.name), 0) + 1
    return [MemoryEntry("kept", shape, name, count) for (shape, name), count in sorted(counts.items(), key=str)]


@dataclasses.dataclass(frozen=True)
class WeightsEntry:
    """One line of the table of weights: bytes of a rank's experts in a format, and of the copies that multiply them.

    Attributes:
      few_rows, more_rows: bytes of the widened copy that is made on a Hopper GPU in front of a matmul, at most, with up
        to 64 rows an expert and with more.
    """

    name: str
    nbytes: int
    few_rows: int
    more_rows: int


BLOCKS = {
    "float8_e4m3fn in blocks of 128 x 128": ("float8_e4m3fn", (128, 128)),
    "int8, a scale a channel": ("int8", None),
    "MXFP4": ("uint8", (MXFP4_BLOCK, 1)),
}
"""Formats of kept weights: dtype of the values, and the block of a scale, None for a whole column."""


def weight_formats(config: MoEConfig, num_ranks: int, dtype: Any = jnp.bfloat16) -> list[WeightsEntry]:
    """Bytes of the matrices of one rank's experts, in `dtype` and in every format that `keep_quantised=True` keeps."""
    dtype, local = jnp.dtype(config.dtype or dtype), rank_slots(config, num_ranks)
    hidden, width = config.hidden_size, config.intermediate_size
    first, last = (local, hidden, width), (local, width, hidden)
    matrices = [[first] * (2 if config.gated else 1), [last]]
    sizes = [sum(math.prod(shape) for shape in shapes) * dtype.itemsize for shapes in matrices]
    entries = [WeightsEntry(dtype.name, sum(sizes), 0, 0)]
    for name, (values, block) in BLOCKS.items():
        if values == "uint8" and (hidden % MXFP4_BLOCK or width % MXFP4_BLOCK):
            continue  # blocks divide the weight
        nbytes, few = 0, 0
        for shapes, size in zip(matrices, sizes, strict=True):
            given = [_shapes_of(shape, values, block or (shape[1], 1)) for shape in shapes]
            nbytes += sum(weight.nbytes for weight in given)
            rows = jax.ShapeDtypeStruct((hopper.FEW_ROWS * local, shapes[0][1]), dtype)
            few = max(few, 0 if quantized.why_not(rows, given) is None else size)
        entries.append(WeightsEntry(name, nbytes, few, max(sizes)))
    return entries


def _shapes_of(shape: tuple[int, ...], values: str, block: tuple[int, int]) -> QuantizedWeight:
    """Returns a weight of `shape` without arrays."""
    scales = "uint8" if values == "uint8" else "float32"
    empty = QuantizedWeight(jax.ShapeDtypeStruct(shape, values), None, block)
    of_values, of_scales = empty.part_shapes(shape)
    return QuantizedWeight(jax.ShapeDtypeStruct(of_values, values), jax.ShapeDtypeStruct(of_scales, scales), block)


def total(buffers: Iterable[MemoryEntry]) -> int:
    """Bytes of all entries."""
    return sum(buffer.nbytes for buffer in buffers)


PLANS: dict[str, dict[str, Any]] = {
    "no capacity": {},
    "no capacity, 4 chunks": {"num_chunks": 4},
    "no capacity, remat experts": {"remat": "experts"},
    "no capacity, 4 chunks, remat experts": {"num_chunks": 4, "remat": "experts"},
    "no capacity, 4 chunks, remat all": {"num_chunks": 4, "remat": "all"},
    "capacity 1.25": {"capacity_factor": 1.25},
    "capacity 1.25, weights in front": {"capacity_factor": 1.25, "apply_weights_to": "activation"},
    "capacity 1.25, remat experts": {"capacity_factor": 1.25, "remat": "experts"},
    "capacity 1.25, 4 chunks, remat all": {"capacity_factor": 1.25, "num_chunks": 4, "remat": "all"},
}
"""Rows of the table, as changes of a `MoEConfig`."""


BUFFER_PLANS = ("no capacity", "no capacity, 4 chunks", "capacity 1.25", "capacity 1.25, 4 chunks, remat all")
"""Plans whose buffers the table lists one by one. Plans with remat have the same forward buffers as without."""


def render(config: MoEConfig, num_tokens: int, num_ranks: int, dtype: Any = jnp.bfloat16) -> str:
    """Four tables in Markdown for one rank and one layer: sums, every buffer of the forward pass, the arrays that are
    kept, and the experts' weights in every format."""
    plans = {name: dataclasses.replace(config, **changes) for name, changes in PLANS.items()}
    forward = {name: forward_buffers(plan, num_tokens, num_ranks, dtype) for name, plan in plans.items()}
    kept = {name: kept_buffers(plan, num_tokens, num_ranks, dtype) for name, plan in plans.items()}
    lines = [
        "| plan | rows of a chunk | forward, MiB | kept for the backward pass, MiB |",
        "|---|---:|---:|---:|",
    ]
    for name, plan in plans.items():
        sums = " | ".join(f"{total(buffers[name]) / 2**20:.1f}" for buffers in (forward, kept))
        lines.append(f"| {name} | {chunk_rows(plan, num_tokens, num_ranks)} | {sums} |")
    columns = [name.removesuffix(", remat all") for name in BUFFER_PLANS]
    lines += ["", f"| buffer, forward, MiB | shape, no capacity | {' | '.join(columns)} |", "|---|---|" + "---:|" * 4]
    for same in zip(*(forward[name] for name in BUFFER_PLANS), strict=True):
        sizes = " | ".join(f"{buffer.nbytes / 2**20:.2f}" for buffer in same)
        lines.append(f"| {same[0].name} | {described(same[0])} | {sizes} |")
    lines += ["", "| plan | arrays kept for the backward pass | the rest, MiB |", "|---|---|---:|"]
    for name, buffers in kept.items():
        large = sorted((b for b in buffers if 100 * b.nbytes >= total(buffers)), key=lambda b: -b.nbytes)
        rest = (total(buffers) - total(large)) / 2**20
        lines.append(f"| {name} | {', '.join(map(described, large))} | {rest:.2f} |")
    lines += ["", "| a rank's experts in | MiB | copied to be widened, few rows | more rows |", "|---|---:|---:|---:|"]
    for entry in weight_formats(config, num_ranks, dtype):
        mebibytes = [f"{size / 2**20:.1f}" for size in (entry.nbytes, entry.few_rows, entry.more_rows)]
        lines.append(f"| {entry.name} | {' | '.join(mebibytes)} |")
    local = -(-config.num_experts // num_ranks)
    answer = grouped_matmul.on_hopper(config.hidden_size, config.intermediate_size, config.dtype or dtype, local)
    lines += ["", f"On a Hopper GPU: {answer.detail}."]
    return "\n".join(lines)


def described(buffer: MemoryEntry) -> str:
    times = f"{buffer.count} x " if buffer.count > 1 else ""
    return f"{times}{buffer.dtype}{list(buffer.shape)}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the tables for the sizes asked for."""
    parser = Parser(
        prog="xen-moe-jax memory",
        description="Prints the bytes of the largest buffers of one MoE layer on one rank, without and with remat, for "
        "several capacities and chunks. Nothing is run or allocated: the programs are only traced.",
    )
    sizes = {
        "tokens": (4096, "tokens of one rank in a training step"),
        "ranks": (4, "expert-parallel ranks"),
        "hidden": (4096, "elements of a token"),
        "width": (1536, "features inside an expert"),
        "experts": (64, "experts of the layer, over all ranks"),
        "top-k": (8, "experts that a token is sent to"),
    }
    for name, (default, text) in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{text} (default: %(default)s)")
    parser.add_argument("--activation", default="swiglu", help="of the experts, as in MoEConfig (default: %(default)s)")
    dtypes = ("bfloat16", "float16", "float32")
    parser.add_argument("--dtype", default="bfloat16", choices=dtypes, help="of the tokens (default: %(default)s)")
    options = parser.parse_args(arguments)
    for name in sizes:
        value = getattr(options, name.replace("-", "_"))
        if not 1 <= value < 2**31:
            parser.error(f"--{name} {value}: must be at least 1 and below 2**31")
    try:
        config = MoEConfig(
            hidden_size=options.hidden,
            intermediate_size=options.width,
            num_experts=options.experts,
            top_k=options.top_k,
            activation=options.activation,
        )
    except ValueError as error:
        parser.error(str(error))
    try:
        jax.devices()  # JAX traces for a platform
    except (RuntimeError, AssertionError) as error:  # JAX asserts that there is a backend
        reason = str(error) or "it has no plugin for it"
        parser.error(f"JAX starts no platform here ({reason}): set JAX_PLATFORMS=cpu, nothing is run on it")
    try:
        print(render(config, options.tokens, options.ranks, options.dtype))
    except ValueError as error:  # an operation has fewer rows or experts than that
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
