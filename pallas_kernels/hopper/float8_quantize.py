"""Quantizes operands of the fp8 matmuls. A thread block has a tile of 128 x 128, reads it once, and writes it in the
layout that matmuls need: wgmma reads fp8 only with the contracted dimension innermost.

Weights have a scale for 128 x 128 elements. They are written as they lie, for the gradient of rows, and transposed, for
the product. For a product, rows have a scale for 128 columns. For the gradient of weights they are transposed and have
a scale for 128 rows of a column.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from xen_moe_jax.pallas_kernels.hopper import float8_tile
from xen_moe_jax.pallas_kernels.hopper.float8_rows import (
    BLOCK,
    DTYPE,
    ROWS,
    SWIZZLED,
    WGMMA,
    Quantized,
    scales_of,
)
from xen_moe_jax.pallas_kernels.hopper.float8_tile import HALF
from xen_moe_jax.pallas_kernels.hopper.tiles import up_to_each

UNIT = 4
"""TMA copies of a row of float32 numbers begin at multiples of this many numbers, 16 bytes. A copy that begins
elsewhere is an illegal instruction (H100, CUDA 13.0)."""
TILE = plgpu.SMEM((BLOCK, BLOCK), DTYPE, transforms=SWIZZLED)


def launch(body: Any, out: Any, scratch: dict[str, Any], grid: tuple[int, ...], name: str) -> Any:
    """Returns the function that launches `body` with a thread block of one warpgroup for each tile of `grid`, whose
    axes are "x", "y" and "z"."""
    return plgpu.kernel(
        body,
        out_type=out,
        scratch_types=scratch,
        grid=grid,
        grid_names=("x", "y", "z")[: len(grid)],
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        kernel_name=f"xen_moe_float8_quantize_{name}",
    )


def _piece(source: Any, row: int) -> Any:
    """Loads 64 rows, from `row` on, of a tile in two halves: float32 `[64, 128]`."""

    def part(half: int) -> Any:
        value = plgpu.load(source.at[half, pl.ds(row, ROWS)], layout=WGMMA, optimized=False)
        return value.astype(jnp.float32)

    return jnp.concatenate([part(half) for half in range(BLOCK // HALF)], axis=1)


def _bits(x: Any) -> Any:
    """Returns the bits of the magnitudes of float32 numbers, int32 in their order; those of a NaN are the largest."""
    return lax.bitcast_convert_type(jnp.abs(x), jnp.int32)


def _scaled(x: Any, inverse: Any, finite: Any) -> Any:
    """Returns float32 numbers times the inverse of their scale, in e4m3; zeros where a block is not finite."""
    return jnp.where(finite, x * inverse, 0.0).astype(DTYPE)


@functools.partial(jax.jit, static_argnames=("product", "gradient"))
def weights(array: jax.Array, *, product: bool, gradient: bool) -> tuple[Quantized | None, Quantized | None]:
    """Quantizes weights `[L, A, B]`, bfloat16 or float16, in blocks of 128 x 128; `B` is a multiple of 64.

    Returns:
      With `product`, values `[L, B, A]` and scales `[L, B / 128, A / 128]` for the product, else None; with `gradient`,
      values `[L, A, B]` and scales `[L, A / 128, B / 128]` for the gradient of rows, else None. `A` and `B` of the
      results are padded to multiples of 128 with zeros.
    """
    local, rows, columns = array.shape
    above, beside = pl.cdiv(rows, BLOCK), pl.cdiv(columns, BLOCK)

    def body(source: Any, *refs: Any, given: Any, lying: Any, turned: Any, amax: Any, loaded: Any) -> None:
        outputs = list(refs)
        group, i, j = (lax.axis_index(name) for name in "xyz")
        for half in range(BLOCK // HALF):
            at = (group, pl.ds(i * BLOCK, BLOCK), pl.ds(j * BLOCK + half * HALF, HALF))
            plgpu.copy_gmem_to_smem(source.at[at], given.at[half], loaded)
        plgpu.barrier_wait(loaded)
        pieces = [_piece(given, row) for row in range(0, BLOCK, ROWS)]
        largest = functools.reduce(jnp.maximum, [jnp.max(_bits(piece), axis=1) for piece in pieces])
        amax[...] = largest
        plgpu.commit_smem()
        of_all = plgpu.load(amax, layout=WGMMA.reduce(0), optimized=False)
        scale, inverse, finite = scales_of(jnp.max(lax.broadcast_in_dim(of_all, (ROWS, ROWS), (1,)), axis=1))
        beside_it = [lax.broadcast_in_dim(a, (ROWS, BLOCK), (0,)) for a in (inverse, finite)]
        for m, piece in enumerate(pieces):
            lying[pl.ds(m * ROWS, ROWS)] = _scaled(piece, *beside_it)
        plgpu.commit_smem()
        if product:
            transpose(lying, turned)
            plgpu.commit_smem()
            out, scales = outputs.pop(0), outputs.pop(0)
            plgpu.copy_smem_to_gmem(turned, out.at[group, pl.ds(j * BLOCK, BLOCK), pl.ds(i * BLOCK, BLOCK)])
            store_one(scales.at[group, j, pl.ds(i, 1)], scale)
        if gradient:
            out, scales = outputs
            plgpu.copy_smem_to_gmem(lying, out.at[group, pl.ds(i * BLOCK, BLOCK), pl.ds(j * BLOCK, BLOCK)])
            store_one(scales.at[group, i, pl.ds(j, 1)], scale)
        plgpu.wait_smem_to_gmem(0)

    def out(a: int, b: int) -> list[jax.ShapeDtypeStruct]:
        values = jax.ShapeDtypeStruct((local, a * BLOCK, b * BLOCK), DTYPE)
        return [values, jax.ShapeDtypeStruct((local, a, b), jnp.float32)]

    shapes = (out(beside, above) if product else []) + (out(above, beside) if gradient else [])
    scratch = {
        "given": float8_tile.wide(array.dtype),
        "lying": TILE,
        "turned": TILE,
        "amax": plgpu.SMEM((ROWS,), jnp.int32),
        "loaded": plgpu.Barrier(num_arrivals=BLOCK // HALF),
    }
    found = launch(body, shapes, scratch, (local, above, beside), "weights")(array)
    pairs = [Quantized(*found[at : at + 2]) for at in range(0, len(found), 2)]
    return pairs[0] if product else None, pairs[-1] if gradient else None


@functools.partial(jax.jit, static_argnames=("by_row",))
def rows(array: jax.Array, *, by_row: bool = False) -> Quantized:
    """Quantizes rows `[C, A]`, bfloat16 or float16, for a product; `C` is a multiple of 8, `A` of 64.

    Returns:
      Values `[C, A]` and float32 scales `[1, A / 128, ceil(C / 128) * 128]`, a scale for 128 columns of a row; `A` is
      padded to a multiple of 128 with zeros. With `by_row` the scales are `[C, A / 128]`, the layout of a wire.
    """
    count, columns = array.shape
    above, beside = pl.cdiv(count, BLOCK), pl.cdiv(columns, BLOCK)

    def body(source: Any, out: Any, scales: Any, *, given: Any, values: Any, loaded: Any) -> None:
        i, j = (lax.axis_index(name) for name in "xy")
        float8_tile.load(source, i * BLOCK, j * BLOCK, given, loaded)
        plgpu.barrier_wait(loaded)
        if by_row:
            float8_tile.quantize_rows(given, values, scales.at[pl.ds(i * BLOCK, BLOCK), j], beside)
        else:
            float8_tile.quantize_rows(given, values, scales.at[0, j, pl.ds(i * BLOCK, BLOCK)])
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(values, out.at[pl.ds(i * BLOCK, BLOCK), pl.ds(j * BLOCK, BLOCK)])
        plgpu.wait_smem_to_gmem(0)

    shapes = [
        jax.ShapeDtypeStruct((count, beside * BLOCK), DTYPE),
        jax.ShapeDtypeStruct((above * BLOCK, beside) if by_row else (1, beside, above * BLOCK), jnp.float32),
    ]
    scratch = {
        "given": float8_tile.wide(array.dtype),
        "values": float8_tile.narrow(),
        "loaded": plgpu.Barrier(num_arrivals=BLOCK // HALF),
    }
    out, scales = launch(body, shapes, scratch, (above, beside), "rows")(array)
    return Quantized(out, scales[:count] if by_row else scales)


def blocks_of_groups(group_sizes: jax.Array, capacity: int) -> tuple[jax.Array, jax.Array]:
    """Cuts the rows of each group into blocks of 128, from the group's first row on.

    Args:
      group_sizes: int32 `[L]`.
      capacity: rows of the buffer that holds all groups.

    Returns:
      int32 `[2, N]`, the first row and the number of rows of each block, both zero behind the last block: `N` is the
      most blocks that any groups of `capacity` rows can need. int32 `[L]`, the number of blocks of each group.
    """
    local = group_sizes.shape[0]
    sizes = jnp.maximum(group_sizes.astype(jnp.int32), 0)
    starts = up_to_each(sizes)[:local] - sizes
    blocks = pl.cdiv(sizes, BLOCK)
    last = up_to_each(blocks)[:local]
    first = last - blocks
    index = jnp.arange(capacity // BLOCK + local, dtype=jnp.int32)[:, None]
    begin = (index - first) * BLOCK
    facts = jnp.stack([starts + begin, jnp.minimum(sizes - begin, BLOCK)])
    return jnp.sum(jnp.where((index >= first) & (index < last), facts, 0), axis=-1), blocks


@jax.jit
def columns(array: jax.Array | Quantized, blocks: jax.Array) -> Quantized:
    """Quantizes rows `[C, A]` by columns for the gradient of weights, which contracts the rows of a group.

    Args:
      array: bfloat16 or float16, `A` a multiple of 64, or rows that are quantized for a product; these are quantized
        again, from the float32 numbers that they stand for.
      blocks: int32 `[2, N]`, from `blocks_of_groups`.

    Returns:
      Values e4m3 `[A, N * 128]` and scales float32 `[N, A]`, a scale for the up to 128 rows of a block in a column. A
      block's values past its last row are zeros. `A` is padded to a multiple of 128 with zeros. Blocks without rows are
      unspecified.
    """
    return _by_blocks(array, blocks, product=False)[1]


@jax.jit
def both(array: jax.Array, blocks: jax.Array) -> tuple[Quantized, Quantized]:
    """Returns `rows` and `columns` of an array `[C, A]`, bfloat16 or float16, which is read once. Rows past the last
    group are unspecified. The scales of the rows are `[1, A / 128, C']` with `C'` above `C`."""
    of_rows, of_columns = _by_blocks(array, blocks, product=True)
    assert of_rows is not None
    return of_rows, of_columns


def _by_blocks(array: jax.Array | Quantized, blocks: jax.Array, *, product: bool) -> tuple[Quantized | None, Quantized]:
    """Quantizes blocks of up to 128 rows of a group, by columns and, with `product`, by rows as well.

    By rows, a thread block writes all 128 rows from its block's first on. Some of them may be of the next group, whose
    own thread block writes the same bits there.
    """
    again = isinstance(array, Quantized)
    operands = (array.values, array.scales) if isinstance(array, Quantized) else (array,)
    (count, width), total = operands[0].shape, blocks.shape[1]
    beside = pl.cdiv(width, BLOCK)

    def body(facts: Any, *refs: Any, given: Any, turned: Any, loaded: Any, factors: Any = None, values: Any = None):
        block, j = (lax.axis_index(name) for name in "xy")
        start, size = facts[0, block], facts[1, block]
        sources, outputs = refs[: len(operands)], list(refs[len(operands) :])
        of_columns, scales = outputs[-2:]
        at = scales.at[block, pl.ds(j * BLOCK, BLOCK)]

        @pl.when(size > 0)
        def _() -> None:
            first = lax.rem(start, jnp.int32(UNIT))
            if again:
                plgpu.copy_gmem_to_smem(sources[0].at[pl.ds(start, BLOCK), pl.ds(j * BLOCK, BLOCK)], given, loaded)
                place = (0, j, pl.ds(pl.multiple_of(start - first, UNIT), BLOCK + 2 * UNIT))
                plgpu.copy_gmem_to_smem(sources[1].at[place], factors, loaded)
            else:
                float8_tile.load(sources[0], start, j * BLOCK, given, loaded)
            plgpu.barrier_wait(loaded)
            if product:
                float8_tile.quantize_rows(given, values, outputs[1].at[0, j, pl.ds(start, BLOCK)])
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(values, outputs[0].at[pl.ds(start, BLOCK), pl.ds(j * BLOCK, BLOCK)])

            @pl.when(size < BLOCK)
            def _() -> None:
                float8_tile.clear(given, factors, size, first)
                plgpu.commit_smem()

            if again:
                float8_tile.quantize_columns_again(given, factors, first, turned, at)
            else:
                float8_tile.quantize_columns(given, turned, at)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(turned, of_columns.at[pl.ds(j * BLOCK, BLOCK), pl.ds(block * BLOCK, BLOCK)])
            plgpu.wait_smem_to_gmem(0)

    shapes = [
        jax.ShapeDtypeStruct((beside * BLOCK, total * BLOCK), DTYPE),
        jax.ShapeDtypeStruct((total, beside * BLOCK), jnp.float32),
    ]
    scratch: dict[str, Any] = {"turned": float8_tile.narrow(), "loaded": plgpu.Barrier(num_arrivals=2)}
    scratch["given"] = float8_tile.narrow() if again else float8_tile.wide(operands[0].dtype)
    if again:
        scratch["factors"] = plgpu.SMEM((BLOCK + 2 * UNIT,), jnp.float32)
    if product:  # a block's 128 rows may begin at the last row, so that scales are written 127 rows past it
        long = (pl.cdiv(count, BLOCK) + 1) * BLOCK
        scratch["values"] = float8_tile.narrow()
        shapes.insert(0, jax.ShapeDtypeStruct((count, beside * BLOCK), DTYPE))
        shapes.insert(1, jax.ShapeDtypeStruct((1, beside, long), jnp.float32))
    name = "rows_and_columns" if product else "columns_again" if again else "columns"
    found = launch(body, shapes, scratch, (total, beside), name)(blocks, *operands)
    return Quantized(*found[:2]) if product else None, Quantized(*found[-2:])


@plgpu.inline_mgpu(arg_types=(plgpu.RefType(), WGMMA.reduce(1)))
def store_one(context: Any, place: Any, values: Any) -> None:
    """Stores one of `values [64]`, which are all the same, to `place [1]` in the GPU's memory, by one thread."""
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import memref, scf, vector

    one = scf.IfOp(utils.single_thread_predicate(utils.ThreadSubset.WARPGROUP))  # type: ignore[call-arg]
    with ir.InsertionPoint(one.then_block):
        value = vector.extract(values.registers.flat[0], dynamic_position=[], static_position=[0])
        memref.store(value, place, [utils.c(0, ir.IndexType.get())])
        scf.YieldOp([])


@plgpu.inline_mgpu(arg_types=(plgpu.RefType(SWIZZLED), plgpu.RefType(SWIZZLED)))
def transpose(context: Any, source: Any, target: Any) -> None:
    """Transposes a tile of bytes `[128, 128]` in shared memory, whose rows are swizzled by 128 bytes.

    A thread reads four columns of 16 rows, a word from each row, and writes 16 bytes of each column. The swizzle is
    that of `float8_tile`: the lowest three bits of a row's number change bits 4 to 6 of the place of a byte in the row.
    """
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import llvm

    names = [f"w{n}" for n in range(16)] + [f"o{n}" for n in range(16)] + [f"t{n}" for n in range(4)]
    lines = [f".reg .b32 {','.join(names)}, tid, item, cw, g, from, to, at, odd;", "mov.u32 tid, %tid.x;"]
    lines += ["and.b32 tid, tid, 127;"]
    for task in range(BLOCK * BLOCK // (4 * 16) // 128):
        lines += [f"add.u32 item, tid, {task * 128};", "and.b32 cw, item, 31;", "shr.u32 g, item, 5;"]
        lines += ["mad.lo.u32 from, g, 2048, $0;", "shl.b32 at, cw, 2;"]
        for row in range(16):
            lines += [f"xor.b32 to, at, {(row % 8) * 16};", "add.u32 to, to, from;"]
            lines += [f"ld.shared.b32 w{row}, [to+{row * 128}];"]
        for four in range(4):
            a, b, c, d = (f"w{4 * four + n}" for n in range(4))
            lines += [f"prmt.b32 t0, {a}, {b}, 0x5140;", f"prmt.b32 t1, {c}, {d}, 0x5140;"]
            lines += [f"prmt.b32 t2, {a}, {b}, 0x7362;", f"prmt.b32 t3, {c}, {d}, 0x7362;"]
            for column, (left, right, pick) in enumerate(
                (("t0", "t1", "0x5410"), ("t0", "t1", "0x7632"), ("t2", "t3", "0x5410"), ("t2", "t3", "0x7632"))
            ):
                lines += [f"prmt.b32 o{4 * column + four}, {left}, {right}, {pick};"]
        lines += ["and.b32 odd, cw, 1;", "shl.b32 odd, odd, 2;", "mad.lo.u32 from, cw, 512, $1;"]
        for column in range(4):
            lines += [
                f"add.u32 to, odd, {column};",
                "xor.b32 to, to, g;",
                "shl.b32 to, to, 4;",
                "add.u32 to, to, from;",
            ]
            words = ",".join(f"o{4 * column + four}" for four in range(4))
            lines += [f"st.shared.v4.b32 [to+{column * 128}], {{{words}}};"]
    i32 = ir.IntegerType.get_signless(32)
    pointers = [llvm.ptrtoint(i32, utils.memref_ptr(ref)) for ref in (source, target)]
    void = ir.Type.parse("!llvm.void")
    text = "{ " + " ".join(lines) + " }"
    llvm.inline_asm(void, pointers, text, "r,r,~{memory}", asm_dialect=0, has_side_effects=True)
