"""Grouped matmuls in fp8 (e4m3): rows with a scale for 128 elements times weights with a scale for 128 x 128
(DeepSeek-V3, arXiv:2412.19437, section 3.3.2).

wgmma adds up 128 elements of the contracted dimension in accumulators. These are multiplied by both scales and added
to float32 sums in other registers, while wgmma computes the next product. Shared memory holds both operands with the
contracted dimension innermost, the only way in which wgmma reads fp8.

An expert's activation is quantized where it is computed: a warpgroup has 128 columns of a row, so that it finds their
largest magnitude and their scale without another warpgroup.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from xen_moe_jax.pallas_kernels.hopper import claims, ring
from xen_moe_jax.pallas_kernels.hopper.activations import Activation
from xen_moe_jax.pallas_kernels.hopper.tiles import COMPUTE_WARPGROUPS, ROW_ALIGNMENT, Tiles, row_tiles

BLOCK = 128
"""Elements of the contracted dimension that are added up before they are scaled."""
DTYPE = jnp.float8_e4m3fn
SHARED_MEMORY = 227 * 1024 - 256
"""Bytes for stages and pieces; barriers have the rest of a multiprocessor's 227 KiB for one thread block."""
REDUCTION = 2048
"""Bytes of shared memory that Mosaic sets aside for the reduction of a row."""
CLAIMS = 1024
"""Bytes of shared memory for claims, with their alignment."""
LARGEST, MIN_AMAX = 448.0, 2.0**-96
WGMMA = plgpu.Layout.WGMMA
ROWS = 64
"""Rows that a wgmma multiplies."""
SWIZZLED: Any = (plgpu.TilingTransform((8, BLOCK)), plgpu.SwizzleTransform(BLOCK))  # type: ignore[abstract]
DESCRIPTOR = 1 << 62 | 64 << 32 | 1 << 16
"""The constant part of the descriptors of wgmma's operands in shared memory (PTX ISA, "Matrix Descriptor Format"). It
says that rows are swizzled by 128 bytes and that eight rows have 1,024 bytes, which a descriptor counts in units of
16."""


@dataclasses.dataclass(frozen=True)
class Quantized:
    """A matrix in fp8.

    Attributes:
      values: e4m3 `[C, A]` of rows; `[L, B, A]` of weights, contracted along `A`, a multiple of 128.
      scales: float32. Of rows `[1, A / 128, C]`, or `[N, A / 128, M]` where each of `N` tiles of `M` rows has its own.
        Of weights `[L, B / 128, A / 128]`.
    """

    values: jax.Array
    scales: jax.Array


jax.tree_util.register_dataclass(Quantized, ["values", "scales"], [])


@functools.partial(jax.jit, static_argnames=("columns", "dtype", "tiles", "num_sms"))
def rows_by_weights(
    pairs: Sequence[tuple[Quantized, Quantized]],
    group_sizes: jax.Array,
    *,
    columns: int,
    dtype: Any,
    tiles: Tiles,
    num_sms: int | None = None,
) -> jax.Array:
    """Returns the sum of the products of rows by the weights of their groups, `[C, columns]` in `dtype`; rows past the
    last group are unspecified.

    Args:
      pairs: rows `[C, A]` and weights `[L, B, A]`, `B` at least `columns`; one product for each pair.
      group_sizes: int32 `[L]`.
      columns: columns of the result.
      dtype: bfloat16 or float16.
      tiles: 128 deep, and a multiple of 128 wide.
      num_sms: multiprocessors that the kernel may take; None for all of the GPU.
    """

    def epilogue(part: Part) -> Iterator[Any]:
        for number, total in enumerate(part.totals):
            for n in range(0, BLOCK, ring.STORE_TILE):
                value = total[:, n : n + ring.STORE_TILE].astype(dtype)
                yield value, part.store(part.outputs[0], number * BLOCK + n)

    out = [jax.ShapeDtypeStruct((pairs[0][0].values.shape[0], columns), dtype)]
    return _product([(rows, (w,)) for rows, w in pairs], group_sizes, epilogue, out, tiles, num_sms, "rows", dtype)[0]


@functools.partial(jax.jit, static_argnames=("width", "activation", "projections", "tiles", "num_sms"))
def activated_rows(
    rows: Quantized,
    weights: tuple[Quantized, ...],
    group_sizes: jax.Array,
    *,
    width: int,
    activation: Activation,
    projections: Any,
    tiles: Tiles,
    num_sms: int | None = None,
) -> tuple[Quantized, tuple[jax.Array, ...]]:
    """Returns the activation of the rows' projections, computed in float32 and quantized, and the projections.

    Args:
      rows: `[C, A]`.
      weights: `[L, B, A]` each, `gate` and `up`, or `up` alone where the activation is not gated.
      group_sizes: int32 `[L]`.
      width: columns `F` of the projections, at most `B`.
      projections: dtype in which the projections are stored, or None to store none.
      tiles: 128 deep, and 256 wide where the activation is gated: 128 columns of each projection.
      num_sms: multiprocessors that the kernel may take; None for all of the GPU.

    Returns:
      Values `[C, B]` (`F` rounded up to a multiple of 128) with a scale for 128 columns in each tile of rows, and the
      projections, `[C, F]` each. Rows past the last group are unspecified.
    """
    return _activated(rows, weights, group_sizes, width, activation, projections, tiles, num_sms)


def _activated(
    rows: Quantized,
    weights: tuple[Quantized, ...],
    group_sizes: jax.Array,
    width: int,
    activation: Activation,
    projections: Any,
    tiles: Tiles,
    num_sms: int | None,
) -> tuple[Quantized, tuple[jax.Array, ...]]:
    beside, count = len(weights), rows.values.shape[0]
    padded = -(-width // BLOCK) * BLOCK

    def epilogue(part: Part) -> Iterator[Any]:
        for number in range(0, len(part.totals), beside):
            values = part.totals[number : number + beside]
            column = number // beside * BLOCK
            if projections is not None:
                for value, output in zip(values, part.outputs[2:], strict=True):
                    for n in range(0, BLOCK, ring.STORE_TILE):
                        piece = value[:, n : n + ring.STORE_TILE].astype(projections)
                        yield piece, part.store(output, column + n)
            codes, scales = quantized(activation(*values))
            part.store_scales(part.outputs[1], column, scales)
            yield codes, part.store(part.outputs[0], column)

    most = row_tiles(group_sizes, count, tiles.m)[0].shape[1]
    out = [
        jax.ShapeDtypeStruct((count, padded), DTYPE),
        jax.ShapeDtypeStruct((most, padded // BLOCK, tiles.m), jnp.float32),
    ]
    kind = jnp.bfloat16 if projections is None else projections
    out += [] if projections is None else [jax.ShapeDtypeStruct((count, width), projections)] * beside
    values, scales, *kept = _product(
        [(rows, weights)], group_sizes, epilogue, out, tiles, num_sms, activation.name, kind
    )
    return Quantized(values, scales), tuple(kept)


def scales_of(amax_bits: Any) -> tuple[Any, Any, Any]:
    """Returns the scales of blocks (NaN of one that is not finite), the inverses of the scales, and whether the blocks
    are finite, by the rule of `xen_moe_jax._quantize`.

    Divisions are approximate in this kernel. One correction by the remainder makes a quotient right, but at times for
    its last bit.

    Args:
      amax_bits: int32, the bits of the blocks' largest magnitudes as float32; those of a NaN are the largest.
    """
    finite = amax_bits < 0x7F800000
    amax = jnp.maximum(lax.bitcast_convert_type(amax_bits, jnp.float32), MIN_AMAX)
    scale = amax * (1 / LARGEST)
    scale = scale + (amax - scale * LARGEST) * (1 / LARGEST)
    inverse = LARGEST / amax
    inverse = inverse + (LARGEST - inverse * amax) * (inverse * (1 / LARGEST))
    return jnp.where(finite, scale, jnp.nan), jnp.where(finite, inverse, 0.0), finite


def quantized(rows: Any) -> tuple[Any, Any]:
    """Quantizes float32 `[M, 128]`: returns values e4m3 `[M, 128]` and float32 scales `[M]`."""
    bits = lax.bitcast_convert_type(jnp.abs(rows), jnp.int32)
    scale, inverse, finite = scales_of(jnp.max(bits, axis=1))
    scaled = rows * lax.broadcast_in_dim(inverse, rows.shape, (0,))
    scaled = jnp.where(lax.broadcast_in_dim(finite, rows.shape, (0,)), scaled, 0.0)
    return scaled.astype(DTYPE), scale


@dataclasses.dataclass(frozen=True)
class Part:
    """A warpgroup's part of a tile, once its sums are complete.

    Attributes:
      totals: float32 `[64, 128]` each: the sums of the columns of the tile, side by side.
      outputs: references to the results.
      store: `(output, column)` -> a function that copies a buffer to `output`, from `column` of the part on.
      store_scales: `(output, column, scales [64])`: stores the scales of the 128 columns from `column` on.
    """

    totals: tuple[Any, ...]
    outputs: tuple[Any, ...]
    store: Callable[[Any, int], Callable[[Any], None]]
    store_scales: Callable[[Any, int, Any], None]


def _product(
    pairs: Sequence[tuple[Quantized, tuple[Quantized, ...]]],
    group_sizes: jax.Array,
    epilogue: Callable[[Part], Iterator[Any]],
    out: list[jax.ShapeDtypeStruct],
    tiles: Tiles,
    num_sms: int | None,
    name: str,
    stored: Any,
) -> list[jax.Array]:
    """Runs the kernel: multiplies the rows of each of `pairs` by its weights, whose columns stand side by side in a
    tile, and adds up the products of all pairs.

    Args:
      epilogue: yields pieces of a `Part` in `stored` or in fp8, each with the function that copies it from a buffer.
      out: shapes of the results.
      name: end of the kernel's name.
      stored: the 16-bit dtype of pieces.
    """
    (capacity, depth), beside = pairs[0][0].values.shape, len(pairs[0][1])
    width = pairs[0][1][0].values.shape[1]
    parts, halves = tiles.n // BLOCK, tiles.n // BLOCK // beside
    n_tiles, k_steps = pl.cdiv(width, halves * BLOCK), depth // BLOCK
    tables = row_tiles(group_sizes, capacity, tiles.m)
    operands = [a.values for rows, weights in pairs for a in (rows, *weights)]
    scales = [a.scales for rows, weights in pairs for a in (rows, *weights)]
    by_tile = pairs[0][0].scales.shape[0] > 1
    last_block = pairs[0][1][0].scales.shape[1] - 1

    def body(*refs: Any, **s: Any) -> None:
        count = len(operands)
        matrices, factors, (facts, up_to), outputs = (
            refs[:count],
            refs[count : 2 * count],
            refs[2 * count : 2 * count + 2],
            refs[2 * count + 2 :],
        )
        wg = lax.axis_index("wg")
        m_tiles = up_to[group_sizes.shape[0] - 1]
        grid = (m_tiles * n_tiles,)

        def place(index: Any) -> tuple[Any, Any, Any]:
            m, n = tiles.at(index[0], m_tiles, n_tiles)
            row = pl.multiple_of(facts[1, m], ROW_ALIGNMENT)
            return m, row, n * (halves * BLOCK)

        def load_all() -> None:
            plgpu.set_max_registers(ring.LOAD_REGISTERS, action="decrease")

            def tile(index: Any, carry: Any) -> Any:
                m, row, column = place(index)
                group = facts[0, m]

                def load_of(number: int) -> Callable[..., None]:
                    rows, *weights = matrices[number * (1 + beside) : (number + 1) * (1 + beside)]
                    of_rows = factors[number * (1 + beside)]

                    def load(k: Any, left: Any, right: Any, barrier: Any, slot: Any) -> None:
                        depth_at = pl.ds(k * BLOCK, BLOCK)
                        plgpu.copy_gmem_to_smem(rows.at[pl.ds(row, tiles.m), depth_at], left, barrier)
                        for place, matrix in enumerate(weights):
                            half = right.at[pl.ds(place * halves * BLOCK, halves * BLOCK)]
                            plgpu.copy_gmem_to_smem(
                                matrix.at[group, pl.ds(column, halves * BLOCK), depth_at],
                                half,
                                barrier,
                            )
                        at = (m, k, pl.ds(0, tiles.m)) if by_tile else (0, k, pl.ds(row, tiles.m))
                        plgpu.copy_gmem_to_smem(of_rows.at[at], s["scales"].at[slot], barrier)

                    return load

                for number in range(len(pairs)):
                    carry = load_steps(tiles, s, k_steps, carry, load_of(number))
                return carry

            done = claims.loads(tiles, s, up_to, grid, tile)
            ring.drain(tiles, s, done)

        def multiply_all() -> None:
            plgpu.set_max_registers(ring.COMPUTE_REGISTERS, action="increase")
            m_at = pl.ds(wg * tiles.warpgroup_m, tiles.warpgroup_m)

            def tile(index: Any, carry: Any) -> Any:
                m, row, column = place(index)
                group = facts[0, m]
                low, high, offset = facts[2, m], facts[3, m], wg * tiles.warpgroup_m
                zero = plgpu.layout_cast(jnp.zeros((tiles.warpgroup_m, BLOCK), jnp.float32), WGMMA)
                product, totals, never = zero, (zero,) * parts, (low < 0).astype(jnp.int32)
                block = lax.div(column, jnp.int32(BLOCK))
                for number in range(len(pairs)):
                    of_weights = factors[number * (1 + beside) + 1 : (number + 1) * (1 + beside)]

                    def scales_of(k: Any, of_weights: Any = of_weights) -> tuple[Any, ...]:
                        at = [jnp.minimum(block + half, last_block) for half in range(halves)]
                        return tuple(ref[group, b, k] for ref in of_weights for b in at)

                    def step(k: Any, carry: Any, scales_of: Any = scales_of) -> Any:
                        count, now, product, *totals = carry
                        slot = lax.rem(count, jnp.int32(tiles.stages))
                        after = scales_of(jnp.minimum(k + 1, k_steps - 1))  # loaded while this step multiplies
                        plgpu.barrier_wait(s["loaded"].at[slot])
                        of_rows = plgpu.load(s["scales"].at[slot, m_at], layout=WGMMA.reduce(1), optimized=False)
                        left, right = s["left"].at[slot, m_at], s["right"].at[slot]
                        factors = [of_rows * now[number] for number in range(parts)]
                        product, totals = multiply(left, right, product, totals, factors, None, never)
                        plgpu.barrier_arrive(s["released"].at[slot])
                        return count + 1, after, product, *totals

                    given = (carry, scales_of(0), product, *totals)
                    carry, _, product, *totals = lax.fori_loop(0, k_steps, step, given)
                row = row + offset

                def store(out: Any, n: int) -> Callable[[Any], None]:
                    def copy(buffer: Any) -> None:
                        piece_low = jnp.clip(low - offset, 0, ring.STORE_TILE)
                        piece_high = jnp.clip(high - offset, 0, ring.STORE_TILE)
                        ring.store_rows(buffer, out, row, column + n, piece_low, piece_high)

                    return copy

                def store_scales(out: Any, n: int, scales: Any) -> None:
                    at = pl.ds(wg * tiles.warpgroup_m, tiles.warpgroup_m)

                    @pl.when(block + n // BLOCK <= last_block)  # unlike TMA, a store would go on past the last block
                    def _() -> None:
                        out[m, block + n // BLOCK, at] = scales

                ring_store(epilogue(Part(tuple(totals), outputs, store, store_scales)), s, wg)
                return carry

            claims.multiplies(tiles, s, grid, tile)
            plgpu.wait_smem_to_gmem(0)

        lax.cond(wg == COMPUTE_WARPGROUPS, load_all, multiply_all)

    reserved = REDUCTION if any(shape.dtype == DTYPE for shape in out) else 0
    sizes: dict[str, int] = {"loads": 2 + beside, "scales": tiles.m, "reserved": reserved}
    scratch = scratch_of(tiles, (tiles.m, BLOCK), (tiles.n, BLOCK), stored, **sizes)
    scratch["scales"] = plgpu.SMEM((tiles.stages, tiles.m), jnp.float32)
    run = ring.kernel(body, tiles, num_sms, out, scratch, f"xen_moe_float8_{name}")
    return list(run(*operands, *scales, *tables))


def multiply(
    left: Any, right: Any, product: Any, totals: Sequence[Any], rows: Sequence[Any], columns: Any, never: Any
) -> Any:
    """Multiplies a stage and adds it to the totals: `left [64, 128]` times `right [256, 128]` transposed, both e4m3 in
    shared memory, times scales. Returns `product`, whose registers the next call takes, and the totals.

    Args:
      product: float32 `[64, 128]`: registers for the products, which take them in turns. Their values are not used.
      totals: float32 `[64, 128]` each: the sums of 128 columns of `right` each, side by side.
      rows: float32 scales `[64]` of the rows, for each of `totals`.
      columns: float32 scales `[256]` of the columns in shared memory, or None if `rows` holds the whole scales.
      never: int32 zero that ptxas does not know to be zero. The first of the four wgmma of a product overwrites the
        accumulators unless it is another number. If ptxas knew it, it would let that wgmma begin in other registers
        before the last product is added up, and it has too few of them.

    While a product of 64 columns is added up, the next one is computed. With scales of columns a product has 128
    columns: half as many products read the rows half as often from shared memory, from which the scales are read as
    well (gradient of weights, H100: 559 us instead of 589).
    """
    refs = [SWIZZLED, SWIZZLED] if columns is None else [SWIZZLED, SWIZZLED, ()]
    kinds = [*(plgpu.RefType(kind) for kind in refs), WGMMA, *[WGMMA] * len(totals)]
    kinds += [*[WGMMA.reduce(1)] * len(rows), plgpu.Layout.WG_SPLAT(())]
    tile = plgpu.ShapeDtypeStruct((ROWS, BLOCK), jnp.float32, layout=WGMMA)
    run = plgpu.inline_mgpu(arg_types=tuple(kinds), return_type=(tile,) * (1 + len(totals)))(_multiply)
    given = [left, right] if columns is None else [left, right, columns]
    product, *sums = run(*given, product, *totals, *rows, never)
    return product, sums


def _multiply(context: Any, left: Any, right: Any, *rest: Any) -> Any:
    from jax.experimental.mosaic.gpu import fragmented_array, utils
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, llvm

    i32, i64 = (ir.IntegerType.get_signless(bits) for bits in (32, 64))
    vector = ir.VectorType.get((1,), ir.F32Type.get())
    columns = None if isinstance(rest[0], fragmented_array.FragmentedArray) else rest[0]
    *arrays, never = rest[columns is not None :]
    parts = (len(arrays) - 1) // 2
    tiles, rows = arrays[: 1 + parts], arrays[1 + parts :]

    def descriptor(ref: Any) -> Any:
        pointer = llvm.ptrtoint(i64, utils.memref_ptr(ref))
        address = arith.andi(arith.shrui(pointer, utils.c(4, i64)), utils.c(0x3FFF, i64))
        return arith.ori(address, utils.c(DESCRIPTOR, i64))

    tiles = [tile.to_layout(fragmented_array.WGMMA_LAYOUT_ACC_32BIT) for tile in tiles]
    given = [register for tile in tiles for register in tile.registers.flat]
    factors = [register for each in rows for register in each.registers.flat]
    operands = [*given, *factors, descriptor(left), descriptor(right), never.registers.item()]
    operands += [] if columns is None else [llvm.ptrtoint(i32, utils.memref_ptr(columns))]
    count = len(given)
    names = [f"${count + number}" for number in range(count, len(operands))]  # inputs behind the tied ones
    text = _multiplication(parts, names[: 2 * parts], names[2 * parts :])
    constraints = ["=f"] * count + [str(number) for number in range(count)]
    constraints += ["f"] * len(factors) + ["l", "l", "r"] + ["r"] * (columns is not None)
    struct = llvm.StructType.get_literal([vector] * count)
    result = llvm.inline_asm(struct, operands, text, ",".join(constraints), asm_dialect=0, has_side_effects=True)
    outs = []
    for number, tile in enumerate(tiles):
        registers = np.empty(tile.registers.shape, dtype=object)
        for n in range(registers.size):
            registers.flat[n] = llvm.extractvalue(vector, result, [number * registers.size + n])
        out = fragmented_array.FragmentedArray(_registers=registers, _layout=tile.layout, _is_signed=None)
        outs.append(out.to_layout(fragmented_array.WGMMA_LAYOUT))
    return tuple(outs)


def _multiplication(parts: int, rows: list[str], names: list[str]) -> str:
    """PTX of `multiply`. `$0` to `$63` are the products' registers, followed by 64 for each of the totals. A thread has
    the rows `r` and `r + 8`, and two of each 8 columns.

    `rows` names two registers of scales for each of the totals. `names` are the descriptors of both operands, `never`,
    and the address of the columns' scales if there are any.
    """
    left, right, never, *columns = names
    width = BLOCK if columns else BLOCK // 2
    pieces, size, turns = parts * BLOCK // width, width // 2, BLOCK // width
    lines = [".reg .pred first, more; .reg .b64 a, b; .reg .f32 c0, c1, s; .reg .b32 at;"]
    lines += [f"setp.ne.b32 first, {never}, 0;", "setp.eq.b32 more, 0, 0;"]
    if columns:
        lines += ["mov.u32 at, %tid.x;", "and.b32 at, at, 3;", f"mad.lo.u32 at, at, 8, {columns[0]};"]

    def product(piece: int) -> list[str]:
        into = ",".join(f"${piece % turns * size + n}" for n in range(size))
        found = ["wgmma.fence.sync.aligned;"]
        for step in range(BLOCK // 32):
            found += [f"add.s64 a, {left}, {2 * step};", f"add.s64 b, {right}, {piece * width * 8 + 2 * step};"]
            kind = f"wgmma.mma_async.sync.aligned.m64n{width}k32.f32.e4m3.e4m3"
            found += [f"{kind} {{{into}}}, a, b, {'more' if step else 'first'}, 1, 1;"]
        return [*found, "wgmma.commit_group.sync.aligned;"]

    for piece in range(turns):
        lines += product(piece)
    for piece in range(pieces):
        lines += [f"wgmma.wait_group.sync.aligned {min(turns, pieces - piece) - 1};"]
        part = piece * width // BLOCK
        for eight in range(width // 8):
            if columns:
                lines += [f"ld.shared.v2.f32 {{c0,c1}}, [at+{(piece * width + eight * 8) * 4}];"]
            for n in range(4):
                value, total = f"${piece % turns * size + eight * 4 + n}", f"${(turns + piece) * size + eight * 4 + n}"
                if columns:
                    lines += [f"mul.f32 s, {value}, c{n % 2};"]
                lines += [f"fma.rn.f32 {total}, {'s' if columns else value}, {rows[2 * part + n // 2]}, {total};"]
        if piece + turns < pieces:
            lines += product(piece + turns)
    return "{ " + " ".join(lines) + " }"


def scratch_of(
    tiles: Tiles, left: tuple[int, ...], right: tuple[int, ...], stored: Any, loads: int, scales: int, reserved: int = 0
) -> dict[str, Any]:
    """Returns the scratch of a kernel as `ring.scratch` does, with operands in fp8, and pieces of output in `stored`
    and in fp8, which share their place.

    A stage has, beside its operands, `scales` float32 numbers, which the caller adds to the scratch. A warpgroup has
    four, two or one piece, as many as fit into shared memory beside the stages and `reserved` bytes.
    """
    stage = (left[0] + right[0]) * BLOCK + scales * 4
    piece = COMPUTE_WARPGROUPS * ring.STORE_TILE * BLOCK
    reserved += CLAIMS if tiles.claimed else 0
    room = SHARED_MEMORY - tiles.stages * stage - reserved
    buffers = next(count for count in (4, 2, 1) if count * piece <= room or count == 1)
    return claims.scratch(tiles) | {
        "left": plgpu.SMEM((tiles.stages, *left), DTYPE, transforms=SWIZZLED),
        "right": plgpu.SMEM((tiles.stages, *right), DTYPE, transforms=SWIZZLED),
        "pieces": plgpu.RefUnion(
            plgpu.SMEM(
                (COMPUTE_WARPGROUPS, buffers, ring.STORE_TILE, ring.STORE_TILE),
                stored,
                transforms=_of_rows(stored),
            ),
            plgpu.SMEM(
                (COMPUTE_WARPGROUPS, buffers, ring.STORE_TILE, BLOCK),
                DTYPE,
                transforms=_of_rows(DTYPE),
            ),
        ),
        "loaded": plgpu.Barrier(num_arrivals=loads, num_barriers=tiles.stages),
        "released": plgpu.Barrier(num_arrivals=COMPUTE_WARPGROUPS, num_barriers=tiles.stages),
    }


def _of_rows(dtype: Any) -> Any:
    """Returns the layout of a piece whose rows may be stored one by one: no tile of it has more than one row."""
    return plgpu.TilingTransform((1, 128 // jnp.dtype(dtype).itemsize)), plgpu.SwizzleTransform(128)  # type: ignore[abstract]


def load_steps(tiles: Tiles, scratch: dict[str, Any], steps: Any, done: Any, load: Any) -> Any:
    """Loads the steps of a tile as `ring.load_steps` does, and gives `load` the number of the stage's slot, too."""

    def step(k: Any, count: Any) -> Any:
        slot = lax.rem(count, jnp.int32(tiles.stages))

        @pl.when(count >= tiles.stages)
        def _() -> None:
            plgpu.barrier_wait(scratch["released"].at[slot])

        load(k, scratch["left"].at[slot], scratch["right"].at[slot], scratch["loaded"].at[slot], slot)
        return count + 1

    return lax.fori_loop(0, steps, step, done)


def ring_store(pieces: Any, scratch: dict[str, Any], wg: Any) -> None:
    """Stores pieces as `ring.store` does, but in two dtypes, and through as many buffers as there are: a copy reads its
    buffer for a microsecond, in which the next pieces are written to the other ones."""
    wide, narrow = scratch["pieces"]
    buffers = wide.shape[1]
    for number, (value, copy) in enumerate(pieces):
        buffer = (narrow if value.dtype == DTYPE else wide).at[wg, number % buffers]
        plgpu.wait_smem_to_gmem(buffers - 1 if number else 0, wait_read_only=True)
        buffer[...] = value
        plgpu.commit_smem()
        copy(buffer)
        plgpu.commit_smem_to_gmem_group()
