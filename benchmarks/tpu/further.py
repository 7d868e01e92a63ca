"""Programs of the kernels that no dispatch or combine of `benchmarks.tpu.chip` has: how they are timed and counted.

These programs are a redispatch, an exchange, halves, a dispatch on two mesh axes, decode layers, and grouped matmuls.
With them, `tools/tpu_check.py` times every kernel of `pallas_kernels/` that runs on TPUs (`KERNELS`), beside its count
for the same chip. The loop that is timed and the single call that is counted are made from one
`tuning.programs.Program`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import xen_moe_jax as xm
from benchmarks.tpu import decode, programs
from benchmarks.tpu.bundles import GROUPED
from benchmarks.tpu.programs import Case
from xen_moe_jax.tuning import programs as timed
from xen_moe_jax.tuning.problem import AXIS
from xen_moe_jax.tuning.programs import Program, never

SLOW_AXIS = "slow"
SLICES = 2
"""Ranks of the slow axis, where there are two; one slice has them, too."""
BFLOAT16 = Case("throughput-bf16", 4096, "grouped", None, None)
FEW, MANY = 64, 1024
"""Tokens of all ranks together, in a decode. With `MANY` tokens an expert has more rows than one core multiplies while
HBM reads the expert's weights: where a device has two cores, both run the layer, and a second kernel adds the rows
up."""
DECODED = "Qwen3-30B-A3B"
"""Model of the decode layers."""
WIRE = "float8_e4m3fn"
"""Wire of the decode layer that is several kernels."""
ACTIVATION = "swiglu"


class Further(NamedTuple):
    """Attributes:
    operation: name of the program in the report. kernels: the kernels for whose sake the program is there; a chip may
      have some of them alone. case: function from a number of ranks to the case of the report.
    sizes: `hidden`, `experts`, `top_k`, or None for those of `chip`. slices: ranks of the mesh's slow axis; 1: it has
      none. make: function that makes the `Program`.
    """

    operation: str
    kernels: tuple[str, ...]
    case: Callable[[int], Case]
    sizes: dict[str, int] | None
    slices: int
    make: Callable[[Given], Program]


@dataclasses.dataclass(frozen=True)
class Given:
    """Attributes:
    problem: placed, or its shapes alone where programs are only compiled. config: of the kernels. small: it has the
      sizes of a rehearsal.
    """

    problem: Any
    config: xm.KernelConfig
    small: bool

    @property
    def work(self) -> Any:
        return self.problem.work


NAME = "xen_moe_jax, further"


# -- programs ---------------------------------------------------------------------------------------------------------


def redispatch(given: Given) -> Program:
    return timed.own_redispatch(given.work, given.problem.caps, given.config, NAME)


def exchange(given: Given) -> Program:
    """Rows of every slot go to their ranks, by one run to each. They are taken as sorted."""
    from benchmarks.peers.ragged import exclusive

    work, caps = given.work, given.problem.caps

    def prepare(x: jax.Array, topk_idx: jax.Array, topk_weights: jax.Array) -> tuple[jax.Array, jax.Array]:
        named = (topk_idx // work.local_experts)[..., None] == jnp.arange(work.ranks)
        sizes = jnp.sum(named, axis=(0, 1), dtype=jnp.int32)
        return jnp.repeat(x, work.top_k, axis=0), jax.lax.all_gather(sizes, AXIS)

    def step(operands: Any, there: jax.Array, topk_idx: jax.Array, topk_weights: jax.Array) -> jax.Array:
        rows, sizes = operands
        sizes, me = sizes + never(there), jax.lax.axis_index(AXIS)  # [source, destination]
        starts, landing = exclusive(sizes, 1), exclusive(sizes, 0)
        runs = starts[me], sizes[me], landing[me], sizes[:, me]
        return xm.ragged_all_to_all(rows, there, *runs, axis_name=AXIS, config=given.config)

    def initial(operands: Any, topk_idx: jax.Array, topk_weights: jax.Array) -> jax.Array:
        return jnp.zeros((caps.grouped, work.hidden), operands[0].dtype)

    return Program(NAME, "exchange", prepare, initial, step)


def _dispatch_halves(*operands: Any, **options: Any) -> Any:
    return xm.dispatch_done(xm.dispatch_start(*operands, **options))


def _combine_halves(*operands: Any, **options: Any) -> Any:
    return xm.combine_done(xm.combine_start(*operands, **options))


def _two_axes(*operands: Any, **options: Any) -> Any:
    return xm.dispatch(*operands, **options | {"axis_name": (SLOW_AXIS, AXIS)})


def dispatch_halves(given: Given) -> Program:
    return timed.own_dispatch(given.work, given.problem.caps, given.config, NAME, _dispatch_halves)


def combine_halves(given: Given) -> Program:
    return timed.own_combine(given.work, given.problem.caps, given.config, NAME, combine=_combine_halves)


def two_axes(given: Given) -> Program:
    return timed.own_dispatch(given.work, given.problem.caps, given.config, NAME, _two_axes)


def decode_layer(given: Given, wire: str | None = None) -> Program:
    """A decode layer of `DECODED`, whose output is the next call's tokens."""
    work, model = given.work, decoded(given.small)
    config = decode.config_of(model, "auto", dataclasses.replace(given.config, mode="auto"), wire)

    def prepare(x: jax.Array, topk_idx: jax.Array, topk_weights: jax.Array) -> Any:
        local, hidden, width = work.local_experts, work.hidden, model.width
        shapes = {"gate": (local, hidden, width), "up": (local, hidden, width), "down": (local, width, hidden)}
        return x, {name: drawn(n, shape, x.dtype, shape[1] ** -0.5) for n, (name, shape) in enumerate(shapes.items())}

    def step(operands: Any, x: jax.Array, topk_idx: jax.Array, topk_weights: jax.Array) -> jax.Array:
        return decode.layer(config, operands[1], x, topk_idx, topk_weights)

    return Program(NAME, "decode layer", prepare, lambda operands, *_: operands[0], step)


def experts(given: Given) -> Program:
    """The experts' grouped matmuls: gate and up with the activation, and the gradients by weights and by rows."""
    from xen_moe_jax.experts import on_tpu
    from xen_moe_jax.pallas_kernels.hopper.activations import Activation

    work = given.work
    width = 128 if given.small else 1024
    rows = -(-given.problem.caps.grouped // on_tpu.LEAST) * on_tpu.LEAST

    def prepare(x: jax.Array, topk_idx: jax.Array, topk_weights: jax.Array) -> Any:
        named = jnp.sum(topk_idx[..., None] == jnp.arange(work.experts), axis=(0, 1), dtype=jnp.int32)
        first = jax.lax.axis_index(AXIS) * work.local_experts
        sizes = jax.lax.dynamic_slice(jax.lax.psum(named, AXIS), (first,), (work.local_experts,))
        of_rows = {"cotangent": (rows, work.hidden)}
        of_weights = dict.fromkeys(("by gate", "by up"), (work.local_experts, work.hidden, width))
        shapes = of_rows | of_weights | {"by down": (work.local_experts, width, work.hidden)}
        found = {name: drawn(n, shape, x.dtype) for n, (name, shape) in enumerate(shapes.items())}
        return found | {"sizes": sizes, "factors": jnp.ones((rows,), jnp.float32)}

    def step(operands: Any, carry: jax.Array, topk_idx: jax.Array, topk_weights: jax.Array) -> jax.Array:
        cotangent = operands["cotangent"] + never(carry).astype(carry.dtype)
        weights, sizes = (operands["by gate"], operands["by up"]), operands["sizes"]
        activation = Activation(ACTIVATION)
        _, projections = on_tpu.activated_and_products(
            cotangent, weights, sizes, activation, keep=True, config=given.config
        )
        by_projections, weighted, _ = on_tpu.behind_activation(
            cotangent, operands["by down"], projections, operands["factors"], sizes, activation, given.config
        )
        by_down = on_tpu.by_weight(weighted, sizes, cotangent, given.config)
        by_rows, _ = on_tpu.by_operands(carry, weights, sizes, by_projections, given.config)
        return by_rows + never(by_down).astype(by_rows.dtype)

    return Program(NAME, "experts", prepare, lambda operands, *_: jnp.zeros_like(operands["cotangent"]), step)


def drawn(seed: int, shape: tuple[int, ...], dtype: Any, scale: float = 1.0) -> jax.Array:
    """Values of a rank, another array for each seed."""
    return (jax.random.normal(jax.random.key(seed), shape) * scale).astype(dtype)


def decoded(small: bool) -> decode.Model:
    return decode.Model(256, 128, 16, 4) if small else decode.MODELS[DECODED]


def sizes_of(model: decode.Model) -> dict[str, int]:
    return {"hidden": model.hidden, "experts": model.experts, "top_k": model.top_k}


def _few(ranks: int) -> Case:
    return Case("decode", FEW // ranks, "grouped", None, None)


def _many(ranks: int) -> Case:
    return Case("decode of many tokens", MANY // ranks, "grouped", None, None)


def _bfloat16(ranks: int) -> Case:
    return BFLOAT16


MODEL = sizes_of(decode.MODELS[DECODED])
FURTHER = (
    Further("redispatch", ("xen_moe_scatter",), _bfloat16, None, 1, redispatch),
    Further("exchange", ("xen_moe_exchange",), _bfloat16, None, 1, exchange),
    Further("dispatch halves", ("xen_moe_pack", "xen_moe_start", "xen_moe_done"), _bfloat16, None, 1, dispatch_halves),
    Further("combine halves", ("xen_moe_reduce_slots_local",), _bfloat16, None, 1, combine_halves),
    Further("dispatch, two axes", ("xen_moe_forward",), _bfloat16, None, SLICES, two_axes),
    Further("experts", GROUPED, _bfloat16, None, 1, experts),
    Further("decode layer", ("xen_moe_decode_layer",), _few, MODEL, 1, decode_layer),
    Further("decode layer", ("xen_moe_decode_layer", "xen_moe_decode_sums"), _many, MODEL, 1, decode_layer),
    Further("decode layer, fp8 wire", ("xen_moe_decode_experts",), _many, MODEL, 1,
            functools.partial(decode_layer, wire=WIRE)),
)  # fmt: skip
OF_OPERATIONS = tuple(
    f"xen_moe_{name}"
    for name in (
        *("push", "index_rows", "place", "order_pairs", "reduce_slots", "reduce_ranks"),
        *("pack_tokens", "index_tokens", "order_tokens"),
    )
)
"""Kernels of the dispatches and combines of `chip`, the last three of few tokens."""
KERNELS = (*OF_OPERATIONS, *dict.fromkeys(kernel for one in FURTHER for kernel in one.kernels))
"""All kernels that run on TPUs."""


# -- counts -----------------------------------------------------------------------------------------------------------


def counted(one: Further, given: Given, generation: str, folder: str) -> dict[str, Any]:
    """The row of the static estimate for one call: its kernels and their microseconds, or the reason why the kernels of
    `one` have no count."""
    from benchmarks.tpu import bundles, topologies
    from xen_moe_jax.tuning import timing

    chip, work = topologies.TOPOLOGIES[generation], given.work
    case = dataclasses.replace(one.case(work.ranks), tokens=work.tokens)
    program = bundles.compile_counted(lambda: timing.compile_single(one.make(given), given.problem), folder)
    row: dict[str, Any] = {"case": case.name, "operation": one.operation, "tokens": case.tokens}
    row |= {"compiled": sorted(program.kernels), "xla_us": bundles.xla_cycles(program.text) * 1e6 / chip.clock_hz}
    try:
        return row | _times(one, given, case, program, generation)
    except ValueError as error:  # small programs, or kernels that have changed, have other loops
        return row | {"kernels": {}, "uncounted": dict.fromkeys(one.kernels, str(error))}


def _times(one: Further, given: Given, case: Case, program: Any, generation: str) -> dict[str, Any]:
    """Microseconds of the kernels and of the whole call.

    Raises:
      ValueError: kernels have other loops than the counts were written for.
    """
    from benchmarks.tpu import bundles, layer, topologies

    chip, work = topologies.TOPOLOGIES[generation], given.work
    us, xla = 1e6 / chip.clock_hz, bundles.xla_cycles(program.text) * 1e6 / chip.clock_hz
    routing = bundles.uniform_routing(work.tokens, work.ranks, work.experts, work.top_k, bundles.grouping(program), 0)
    moving = bundles.moves(routing), work.hidden, work.top_k, work.ranks
    if one.sizes is not None:
        wire = WIRE if one.operation.endswith("fp8 wire") else None
        found = decode.counted(program, generation, decoded(given.small), case.tokens, work.ranks, wire=wire)
        row = {"kernels": decode.kernel_times(found), "uncounted": {}, "floor_us": found["layer_us"]}
        if not found.get("one_call"):
            row |= {"bytes_us": programs.bytes_us(chip, case, "combine", *moving)}
        return row
    if one.make is experts:
        cycles = layer.grouped_cycles(program, chip, routing.experts)
        kernels = {name: round(sum(each) * us, 3) for name, each in cycles.items()}
        return {"kernels": kernels, "uncounted": {}, "floor_us": sum(kernels.values()) + xla}
    counts, uncounted = bundles.counts_and_rest(program, routing, False, one.slices)
    kernels = {kernel: round(c.total * us, 3) for kernel, c in counts.items()}
    operation = one.operation.partition(",")[0]
    moved = programs.traffic(case, operation, *moving)
    wire_us, hbm_us = (
        chip.all_to_all_us(moved["ici_bytes"], work.ranks),
        moved["hbm_bytes"] / chip.hbm_bytes_per_s * 1e6,
    )
    return {
        "kernels": kernels,
        "uncounted": uncounted,
        "bytes_us": programs.bytes_us(chip, case, operation, *moving),
        "wire_us": wire_us,
        "hbm_us": hbm_us,
        "floor_us": max(wire_us, hbm_us, sum(kernels.values()) + xla),
    }
