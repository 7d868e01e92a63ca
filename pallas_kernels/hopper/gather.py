"""Gathers rows into the ring: a stage of one operand is copied row by row, by an index, instead of as a block by TMA.

A kernel reads row `index[c]` of an operand `[T, A]` where it would read row `c` of a sorted copy `[C, A]`. TMA of a
Hopper GPU reads blocks alone, so that the loading warpgroup copies 16 bytes a thread (`cp.async`) to the places where
TMA would have put them, swizzled by 128 bytes. The threads arrive at a barrier of the stage when their copies are done,
and wait for nothing themselves.

An index outside `[0, T)` gives a row of zeros.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from xen_moe_jax.pallas_kernels.hopper.tiles import Tiles

CHUNK = 16
"""Bytes that a thread copies at a time."""
SWIZZLE = 128
"""Bytes of a row in shared memory that lie side by side; a row of a stage is one or more of these."""
AT_ONCE = SWIZZLE // CHUNK
"""Threads that copy one row side by side."""
THREADS = 128
ROWS_AT_ONCE = THREADS // AT_ONCE
PADDING = 256
"""Entries behind the last row of an index: tiles end past it."""


@dataclasses.dataclass(frozen=True)
class Gathered:
    """The operand of a ring that is gathered.

    Attributes:
      copy: `(k, numbers, left, right)` begins the copies of stage `k`, by one call of `copy`.
      numbers: `k -> numbers` of the rows of stage `k`, or None where all stages have the same rows.
    """

    copy: Callable[[Any, Any, Any, Any], None]
    numbers: Callable[[Any], Any] | None = None


def padded(index: jax.Array) -> jax.Array:
    """Returns the index of a kernel's rows as int32, with entries for rows of zeros behind the last one."""
    return jnp.pad(index.astype(jnp.int32), (0, PADDING), constant_values=-1)


def check(tiles: Tiles, rows: jax.Array) -> None:
    """Raises ValueError for tiles whose operands cannot be gathered."""
    if tiles.swizzle != SWIZZLE:
        raise ValueError(f"{tiles}: rows are gathered into swizzles of {SWIZZLE} bytes alone")
    if rows.shape[1] * rows.dtype.itemsize % SWIZZLE:
        raise ValueError(f"rows {list(rows.shape)}: rows of a multiple of {SWIZZLE} bytes are gathered")


def numbers(index: Any, first: Any, count: int) -> Any:
    """Returns `index[first : first + count]`, a register for each of a thread's rows, from which `places` computes
    places. A load from memory takes long: it should begin a stage before its result is needed."""
    layout = plgpu.Layout.WG_STRIDED((count * AT_ONCE,), vec_size=1)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT(())),
        return_type=plgpu.ShapeDtypeStruct((count * AT_ONCE,), jnp.int32, layout=layout),
    )
    def read(_: Any, index: Any, first: Any) -> Any:
        from jax.experimental.mosaic import gpu as mgpu
        from jax.experimental.mosaic.gpu import utils
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import arith, llvm, vector

        i32 = ir.IntegerType.get_signless(32)
        base = utils.getelementptr(utils.memref_ptr(index), [arith.addi(first.registers.item(), _row(utils))], i32)
        registers = [
            vector.broadcast(
                ir.VectorType.get((1,), i32), llvm.load(i32, utils.getelementptr(base, [number * ROWS_AT_ONCE], i32))
            )
            for number in range(count // ROWS_AT_ONCE)
        ]
        return mgpu.FragmentedArray(
            _registers=np.asarray(registers, dtype=object), _layout=layout.to_mgpu(), _is_signed=True
        )

    return read(index, first)


def places(numbers: Any, rows: Any, low: Any = 0, high: Any = PADDING) -> Any:
    """Returns the places at which the rows of these numbers begin in `rows [T, A]`, for `copy`: numbers of chunks of 16
    bytes, or -1 for a row of zeros. Rows outside `[low, high)`, counted from the stage's first row, are zeros: they are
    not read, and multiplying zeros takes less power than multiplying other rows."""
    tokens, columns = rows.shape
    pitch = columns * jnp.dtype(rows.dtype).itemsize // CHUNK
    layout = plgpu.Layout.WG_STRIDED(numbers.shape, vec_size=1)

    @plgpu.inline_mgpu(
        arg_types=(layout, *[plgpu.Layout.WG_SPLAT(())] * 2),
        return_type=plgpu.ShapeDtypeStruct(numbers.shape, jnp.int32, layout=layout),
    )
    def convert(_: Any, numbers: Any, low: Any, high: Any) -> Any:
        from jax.experimental.mosaic import gpu as mgpu
        from jax.experimental.mosaic.gpu import utils
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import arith, vector

        i32, below = ir.IntegerType.get_signless(32), arith.CmpIPredicate.ult
        low, high = (scalar.registers.item() for scalar in (low, high))
        # one comparison for both ends: rows below the first one wrap around
        used, own = arith.subi(high, low), arith.subi(_row(utils), low)
        registers = []
        for turn, register in enumerate(numbers.registers.flat):
            row = vector.extract(register, dynamic_position=[], static_position=[0])
            here = arith.addi(own, utils.c(turn * ROWS_AT_ONCE, i32))
            inside = arith.andi(arith.cmpi(below, row, utils.c(tokens, i32)), arith.cmpi(below, here, used))
            place = arith.select(inside, arith.muli(row, utils.c(pitch, i32)), utils.c(-1, i32))
            registers.append(vector.broadcast(ir.VectorType.get((1,), i32), place))
        return mgpu.FragmentedArray(
            _registers=np.asarray(registers, dtype=object), _layout=layout.to_mgpu(), _is_signed=True
        )

    return convert(numbers, *(jnp.int32(scalar) for scalar in (low, high)))


def copy(rows: Any, places: Any, column: Any, stage: Any) -> None:
    """Begins to copy the rows at `places`, from `column` on, into `stage [count, width]`; zeros past their last column.
    `column` and `width` are multiples of 128 bytes."""
    itemsize = jnp.dtype(rows.dtype).itemsize
    count, width = stage.shape
    blocks, limit = width * itemsize // SWIZZLE, rows.shape[1] * itemsize // CHUNK
    tiling = plgpu.TilingTransform((8, SWIZZLE // itemsize)), plgpu.SwizzleTransform(SWIZZLE)  # type: ignore[abstract]

    @plgpu.inline_mgpu(
        arg_types=(
            plgpu.RefType(),
            plgpu.Layout.WG_STRIDED((count * AT_ONCE,), vec_size=1),
            plgpu.Layout.WG_SPLAT(()),
            plgpu.RefType(tiling),
        )
    )
    def start(_: Any, rows: Any, places: Any, chunk: Any, stage: Any) -> None:
        from jax.experimental.mosaic.gpu import utils
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import arith, vector

        i8, i32, i64 = (ir.IntegerType.get_signless(bits) for bits in (8, 32, 64))
        greater = arith.CmpIPredicate.sge

        def number(value: int) -> Any:
            return utils.c(value, i32)

        row, at = _row(utils), _chunk(utils)
        # rows 8 to 15 of a block of 16 are in the second of two blocks of 8 rows, behind all columns of the first
        below = arith.muli(arith.shrui(row, number(3)), number(8 * SWIZZLE * blocks))
        in_eight = arith.andi(row, number(7))
        swizzled = arith.muli(arith.xori(at, in_eight), number(CHUNK))
        offset = arith.addi(arith.addi(below, arith.muli(in_eight, number(SWIZZLE))), swizzled)
        target = utils.getelementptr(utils.memref_ptr(stage), [offset], i8)
        source = utils.memref_ptr(rows)
        first = arith.addi(chunk.registers.item(), at)
        for block in range(blocks):
            here = arith.addi(first, number(block * AT_ONCE))
            inside = arith.cmpi(arith.CmpIPredicate.slt, here, number(limit))
            for turn, register in enumerate(places.registers.flat):
                place = vector.extract(register, dynamic_position=[], static_position=[0])
                used = arith.andi(inside, arith.cmpi(greater, place, number(0)))
                size = arith.select(used, number(CHUNK), number(0))
                distance = arith.muli(arith.extsi(i64, arith.addi(place, here)), utils.c(CHUNK, i64))
                utils.inline_ptx(
                    f"cp.async.cg.shared.global [$0], [$1], {CHUNK}, $2;",
                    utils.getelementptr(target, [(turn * 2 * blocks + block) * 8 * SWIZZLE], i8),
                    utils.getelementptr(source, [distance], i8),
                    size,
                    has_side_effects=True,
                )

    start(rows, places, lax.div(column, jnp.int32(CHUNK // itemsize)), stage)


def scratch(tiles: Tiles) -> dict[str, Any]:
    """Barriers of the stages at which 128 threads arrive when their copies are done: 8 bytes each. Pallas' own barriers
    have no arrival that waits for `cp.async`."""
    return {"gathered": plgpu.SMEM((2 * tiles.stages,), jnp.int32)}


@plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
def begin(_: Any, barriers: Any) -> None:
    """Initializes the barriers. All threads of the block call it before anything else."""
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import gpu, nvvm

    i32, i64 = (ir.IntegerType.get_signless(bits) for bits in (32, 64))
    base = utils.memref_ptr(barriers)
    one = utils.single_thread_predicate(utils.ThreadSubset.BLOCK)
    for number in range(ir.MemRefType(barriers.type).shape[0] // 2):
        nvvm.mbarrier_init(utils.getelementptr(base, [number], i64), utils.c(THREADS, i32), predicate=one)
    gpu.barrier()


@plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT(())))
def announce(_: Any, barriers: Any, slot: Any) -> None:
    """Lets this thread arrive at a stage's barrier when all copies that it has begun are done. It does not wait."""
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir import ir

    at = utils.getelementptr(utils.memref_ptr(barriers), [slot.registers.item()], ir.IntegerType.get_signless(64))
    utils.inline_ptx("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [$0];", at, has_side_effects=True)


@plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT(()), plgpu.Layout.WG_SPLAT(())))
def wait(_: Any, barriers: Any, slot: Any, turn: Any) -> None:
    """Waits until a stage has been copied for the `turn`-th time, and orders the copies before reads by wgmma."""
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, nvvm

    i32, i64 = (ir.IntegerType.get_signless(bits) for bits in (32, 64))
    at = utils.getelementptr(utils.memref_ptr(barriers), [slot.registers.item()], i64)
    parity = arith.andi(turn.registers.item(), utils.c(1, i32))
    nvvm.mbarrier_try_wait_parity(at, parity, utils.c(10_000_000, i32))
    utils.inline_ptx("fence.proxy.async.shared::cta;", has_side_effects=True)


def _thread(utils: Any) -> Any:
    from jaxlib.mlir.dialects import arith

    thread = utils.thread_idx()
    return arith.remui(thread, utils.c(THREADS, thread.type))


def _row(utils: Any) -> Any:
    """A thread's first row of a stage; the others follow at distances of 16."""
    from jaxlib.mlir.dialects import arith

    thread = _thread(utils)
    return arith.divui(thread, utils.c(AT_ONCE, thread.type))


def _chunk(utils: Any) -> Any:
    """The chunk that a thread copies of each of its rows."""
    from jaxlib.mlir.dialects import arith

    thread = _thread(utils)
    return arith.remui(thread, utils.c(AT_ONCE, thread.type))
