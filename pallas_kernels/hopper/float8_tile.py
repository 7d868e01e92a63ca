"""Quantizes a tile of 128 x 128 in shared memory, by rows or by columns, in PTX.

A thread quantizes one column: it finds the column's largest number without another thread, and the 128 bytes that it
makes lie side by side in the transposed tile. Eight threads quantize a row, each 16 of its columns. Mosaic's layouts
would reduce a column over all warps through shared memory, which takes longer than reading the matrix.

A tile of 16-bit numbers lies in two halves of 64 columns, in each of which a row has 128 bytes. A row of a tile in fp8
has 128 bytes, too. Rows are swizzled by 128 bytes, as TMA and wgmma have them: piece `q` of the 16-byte pieces of row
`r` lies where piece `q ^ (r % 8)` of the row would lie without the swizzle.
"""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

BLOCK = 128
"""Rows and columns of a tile, and threads of a warpgroup."""
HALF = 64
"""Columns of 16-bit numbers in a row of 128 bytes of shared memory."""
HALF_BYTES, ROW_BYTES = BLOCK * HALF * 2, BLOCK
DTYPE = jnp.float8_e4m3fn
FIRST_BARRIER = 8
"""The named barriers of a thread block from this number on are free for `meet`. Mosaic uses number 0 and a number for
each warpgroup, from 1 on."""
WIDE: Any = (plgpu.TilingTransform((1, HALF)), plgpu.SwizzleTransform(128))  # type: ignore[abstract]
NARROW: Any = (plgpu.TilingTransform((1, BLOCK)), plgpu.SwizzleTransform(128))  # type: ignore[abstract]
"""WIDE and NARROW have tiles of one row, so that copies may begin at any row."""
GIVEN = {"bfloat16": "bf16", "float16": "f16"}  # dtypes of a `wide` tile, and their names in PTX


def wide(dtype: Any, *count: int) -> Any:
    """Returns the type of shared memory for a tile of 16-bit numbers, `[2, 128, 64]` of `dtype`, or for an array of
    such tiles."""
    return plgpu.SMEM((*count, BLOCK // HALF, BLOCK, HALF), dtype, transforms=WIDE)


def narrow(*count: int) -> Any:
    """Returns the type of shared memory for a tile in fp8 (e4m3), `[128, 128]`, or for an array of such tiles."""
    return plgpu.SMEM((*count, BLOCK, BLOCK), DTYPE, transforms=NARROW)


def load(source: Any, row: Any, column: Any, tile: Any, barrier: Any) -> None:
    """Begins to copy a tile of `source [C, A]`, 16-bit numbers, from `row` and `column` on, to the `wide` `tile`.

    `barrier` gets an arrival for each of the two halves. Elements outside of `source` are zeros.
    """
    for half in range(BLOCK // HALF):
        at = (pl.ds(row, BLOCK), pl.ds(column + half * HALF, HALF))
        plgpu.copy_gmem_to_smem(source.at[at], tile.at[half], barrier)


def quantize_rows(tile: Any, values: Any, scales: Any, apart: int = 1) -> None:
    """Quantizes the rows of a `wide` tile: writes codes to the `narrow` tile `values`, and a float32 scale for each of
    the 128 rows to the GPU's memory, from the beginning of `scales` on and `apart` numbers from one to the next. The
    threads pass no barrier."""
    _inline(functools.partial(_rows, apart=apart), tile, values, scales)


def store_rows(tile: Any, values: Any, scales: Any, stride: int, count: Any) -> None:
    """Does as `quantize_rows`, but `values [128, 128]` is in the GPU's memory, where a row begins `stride` bytes after
    the row in front of it. The codes of the first `count` rows, an int32, are written, and the scales of all rows."""
    kind = GIVEN[jnp.dtype(tile.dtype).name]
    kinds = (plgpu.RefType(WIDE), plgpu.RefType(), plgpu.RefType(), plgpu.Layout.WG_SPLAT(()))

    @plgpu.inline_mgpu(arg_types=kinds)
    def run(context: Any, tile: Any, values: Any, scales: Any, count: Any) -> None:
        _emit(_rows(kind, stride), shared=(tile,), memory=(scales, values), numbers=(count,))

    run(tile, values, scales, count)


def meet(number: int, *, wait: bool) -> None:
    """Arrives at barrier `number`, 0 or 1, of this warpgroup's pair, and with `wait` waits for the other warpgroup of
    the pair. Warpgroups `2 n` and `2 n + 1` of a thread block are a pair."""
    pair = ["mov.u32 at, %tid.x;", f"shr.u32 at, at, {BLOCK.bit_length()};"]
    pair += [f"mad.lo.u32 at, at, 2, {FIRST_BARRIER + number};"]
    lines = [*pair, f"bar.{'sync' if wait else 'arrive'} at, {2 * BLOCK};"]

    @plgpu.inline_mgpu()
    def run(context: Any) -> None:
        _emit(lines, shared=())

    run()


def quantize_columns(tile: Any, turned: Any, scales: Any, *, over: bool = False) -> None:
    """Quantizes the columns of a `wide` tile: writes the codes of column `n` to row `n` of the `narrow` tile `turned`,
    and float32 scales to `scales [128]` in the GPU's memory.

    With `over`, `turned` may lie in the place of the tile: the warpgroup's threads then pass a barrier between the last
    read and the first write. Without it they pass no barrier.
    """
    _inline(functools.partial(_columns, over=over), tile, turned, scales)


def clear(tile: Any, factors: Any, size: Any, first: Any) -> None:
    """Sets the rows of a tile from row `size` on to zero. The threads pass no barrier.

    Without `factors` the tile is a `wide` one. With float32 `factors` in shared memory it is a `narrow` one, and the
    factor of each of these rows, `factors[first + row]`, becomes zero as well: it may be NaN.
    """
    if factors is None:
        plgpu.inline_mgpu(arg_types=(plgpu.RefType(WIDE), plgpu.Layout.WG_SPLAT(())))(_clear)(tile, size)
    else:
        kinds = (plgpu.RefType(NARROW), plgpu.RefType(), *(plgpu.Layout.WG_SPLAT(()),) * 2)
        plgpu.inline_mgpu(arg_types=kinds)(_clear_quantized)(tile, factors, size, first)


def quantize_columns_again(tile: Any, factors: Any, first: Any, turned: Any, scales: Any) -> None:
    """Does as `quantize_columns` with the columns of a `narrow` tile whose row `n` is multiplied by
    `factors[first + n]`, float32 in shared memory."""
    kinds = (plgpu.RefType(NARROW), plgpu.RefType(), plgpu.Layout.WG_SPLAT(()), plgpu.RefType(NARROW), plgpu.RefType())
    plgpu.inline_mgpu(arg_types=kinds)(_columns_again)(tile, factors, first, turned, scales)


def _inline(body: Any, tile: Any, out: Any, scales: Any) -> None:
    kind = GIVEN[jnp.dtype(tile.dtype).name]
    kinds = plgpu.RefType(WIDE), plgpu.RefType(NARROW), plgpu.RefType()

    @plgpu.inline_mgpu(arg_types=kinds)
    def run(context: Any, tile: Any, out: Any, scales: Any) -> None:
        _emit(body(kind), shared=(tile, out), memory=(scales,))

    run(tile, out, scales)


def _clear(context: Any, tile: Any, size: Any) -> None:
    _emit(_zeros(BLOCK // HALF), shared=(tile,), numbers=(size,))


def _clear_quantized(context: Any, tile: Any, factors: Any, size: Any, first: Any) -> None:
    lines = ["add.u32 at, tid, $3;", "mad.lo.u32 at, at, 4, $1;", "@past st.shared.b32 [at], 0;"]
    _emit(_zeros(1, size="$2") + lines, shared=(tile, factors), numbers=(size, first))


def _columns_again(context: Any, tile: Any, factors: Any, first: Any, turned: Any, scales: Any) -> None:
    _emit(_quantized_columns(), shared=(tile, factors, turned), memory=(scales,), numbers=(first,))


def _emit(lines: list[str], *, shared: Any, memory: Any = (), numbers: Any = ()) -> None:
    """Emits the PTX of `lines` for all threads of a warpgroup.

    Its operands `$0`, `$1`, ... are the addresses of `shared`, then those of `memory` (the GPU's), then the int32
    `numbers`. Of the registers that it declares, `tid` is the thread's number in its warpgroup; `at` and the predicate
    `past` are free for use.
    """
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import llvm

    i32, i64 = (ir.IntegerType.get_signless(bits) for bits in (32, 64))
    operands = [llvm.ptrtoint(i32, utils.memref_ptr(ref)) for ref in shared]
    operands += [llvm.ptrtoint(i64, utils.memref_ptr(ref)) for ref in memory]
    operands += [number.registers.item() for number in numbers]
    kinds = "r" * len(shared) + "l" * len(memory) + "r" * len(numbers)
    begin = [".reg .b32 tid, at;", ".reg .pred past;", "mov.u32 tid, %tid.x;", f"and.b32 tid, tid, {BLOCK - 1};"]
    text = "{ " + " ".join(begin + lines) + " }"
    constraints = ",".join([*kinds, "~{memory}"])
    llvm.inline_asm(ir.Type.parse("!llvm.void"), operands, text, constraints, asm_dialect=0, has_side_effects=True)


def _zeros(halves: int, size: str = "$1") -> list[str]:
    """PTX of `clear`: a thread sets the row of its number to zero if that number is `size` or more."""
    lines = [".reg .b32 zero;", "mov.b32 zero, 0;", f"setp.ge.s32 past, tid, {size};"]
    lines += [f"mad.lo.u32 at, tid, {ROW_BYTES}, $0;"]
    for place in range(0, ROW_BYTES, 16):
        for half in range(halves):
            lines += [f"@past st.shared.v4.b32 [at+{half * HALF_BYTES + place}], {{zero,zero,zero,zero}};"]
    return lines


SCALE = [
    # a comparison with NaN is false, so that `finite` is false for NaN too; `div.rn` rounds correctly
    "setp.lt.f32 finite, amax, 0f7F800000;",
    "max.f32 amax, amax, 0f0F800000;",  # 2 ** -96
    "div.rn.f32 scale, amax, 0f43E00000;",  # 448
    "div.rn.f32 inverse, 0f43E00000, amax;",
    "selp.f32 scale, scale, 0f7FC00000, finite;",
]
"""PTX that computes from `amax`, the largest magnitude of a block, whether the block is `finite`, its `scale` (NaN if
it is not), and its `inverse`, by the rule of `xen_moe_jax._quantize`."""
SCALE_REGISTERS = ".reg .f32 amax, scale, inverse; .reg .pred finite;"


def _magnitudes(registers: list[str], total: str) -> list[str]:
    """PTX that raises each half of `total` to the largest magnitude in that half of `registers`, which have two 16-bit
    numbers each. Magnitudes are compared as integers: the bits of a NaN are the largest."""
    lines = []
    for register in registers:
        lines += [f"and.b32 {register}, {register}, 0x7FFF7FFF;", f"max.u16x2 {total}, {total}, {register};"]
    return lines


def _largest(pair: str, kind: str) -> list[str]:
    """PTX that sets `amax` to the larger of the two 16-bit numbers of the register `pair`, as float32."""
    lines = [f"prmt.b32 at, {pair}, 0, 0x1032;", f"max.u16x2 {pair}, {pair}, at;"]
    if kind == "bf16":
        return [*lines, f"shl.b32 at, {pair}, 16;", "mov.b32 amax, at;"]
    return [*lines, "{ .reg .b16 l, h;", f"mov.b32 {{l, h}}, {pair};", "cvt.f32.f16 amax, l; }"]


def _rows(kind: str, stride: int | None = None, apart: int = 1) -> list[str]:
    """PTX of `quantize_rows`, and with `stride` of `store_rows`: in pass `p` a thread has 16 columns of row
    `p * 16 + tid / 8`, eight in each half. Its eight passes are read twice: for the rows' largest magnitudes, and for
    their codes."""
    passes, scales = range(BLOCK // 16), "$2" if stride is None else "$1"
    names = [f"m{p}" for p in passes] + [f"x{n}" for n in range(8)] + [f"o{n}" for n in range(4)]
    lines = [f".reg .b32 {','.join(names)}, c, row, low, from, to, other, lane;", SCALE_REGISTERS]
    lines += [".reg .f32 of, f0, f1; .reg .b16 h<8>; .reg .pred mine;"]
    lines += ["and.b32 c, tid, 7;", "shr.u32 row, tid, 3;", "and.b32 low, row, 7;", "xor.b32 at, c, low;"]
    lines += ["shl.b32 at, at, 4;", f"mad.lo.u32 from, row, {ROW_BYTES}, at;", "add.u32 from, from, $0;"]

    def read(p: int) -> list[str]:
        place = p * 16 * ROW_BYTES
        return [
            f"ld.shared.v4.b32 {{x0,x1,x2,x3}}, [from+{place}];",
            f"ld.shared.v4.b32 {{x4,x5,x6,x7}}, [from+{place + HALF_BYTES}];",
        ]

    for p in passes:
        lines += [f"mov.b32 m{p}, 0;", *read(p), *_magnitudes([f"x{n}" for n in range(8)], f"m{p}")]
    for other in (1, 2, 4):
        for p in passes:
            lines += [f"shfl.sync.bfly.b32 at, m{p}, {other}, 0x1f, 0xffffffff;", f"max.u16x2 m{p}, m{p}, at;"]
    for p in passes[1:]:  # of its eight rows a thread computes the scale of one, and gets the others by shuffles
        lines += [f"setp.eq.u32 mine, c, {p};", f"selp.b32 m0, m{p}, m0, mine;"]
    lines += [*_largest("m0", kind), *SCALE, "selp.f32 inverse, inverse, 0f00000000, finite;"]
    lines += ["{ .reg .b64 place;", "mad.lo.u32 at, c, 16, row;", f"mad.wide.u32 place, at, {4 * apart}, {scales};"]
    lines += ["st.global.f32 [place], scale; }"]
    if stride is not None:
        lines += [".reg .b64 there;", "shl.b32 other, c, 3;"]
    else:
        lines += _places_of_rows()
    lines += ["and.b32 lane, tid, 24;"]
    for p in passes:
        lines += [f"add.u32 at, lane, {p};", "{ .reg .b32 bits;", "mov.b32 bits, inverse;"]
        lines += ["shfl.sync.idx.b32 bits, bits, at, 0x1f, 0xffffffff;", "mov.b32 of, bits; }"]
        lines += ["setp.neu.f32 finite, of, 0f00000000;", *read(p)]
        for n in range(8):
            lines += [*_unpacked(f"x{n}", kind), "mul.f32 f0, f0, of;", "mul.f32 f1, f1, of;"]
            lines += [f"cvt.rn.satfinite.e4m3x2.f32 h{n}, f1, f0;"]
        for n in range(4):
            lines += [f"mov.b32 o{n}, {{h{2 * n}, h{2 * n + 1}}};", f"selp.b32 o{n}, o{n}, 0, finite;"]
        if stride is None:
            place = p * 16 * ROW_BYTES
            lines += [f"st.shared.v2.b32 [to+{place}], {{o0,o1}};", f"st.shared.v2.b32 [other+{place}], {{o2,o3}};"]
        else:
            lines += [f"add.u32 at, row, {p * 16};", "setp.lt.s32 mine, at, $3;"]
            lines += [f"mad.lo.u32 to, at, {stride}, other;", "mad.wide.u32 there, to, 1, $2;"]
            lines += ["@mine st.global.v2.b32 [there], {o0,o1};", "@mine st.global.v2.b32 [there+64], {o2,o3};"]
    return lines


def _places_of_rows() -> list[str]:
    """PTX that sets `to` and `other` to the addresses of a thread's first codes in both halves of the tile at `$1`."""
    lines = ["shr.u32 to, c, 1;", "xor.b32 to, to, low;", "shl.b32 to, to, 4;", "and.b32 at, c, 1;"]
    lines += ["mad.lo.u32 to, at, 8, to;", f"mad.lo.u32 to, row, {ROW_BYTES}, to;", "add.u32 to, to, $1;"]
    return [*lines, "xor.b32 other, to, 64;"]


def _unpacked(register: str, kind: str) -> list[str]:
    """PTX that sets `f0` and `f1` to the two 16-bit numbers of a register, as float32."""
    if kind == "bf16":
        lines = [f"shl.b32 at, {register}, 16;", "mov.b32 f0, at;", f"and.b32 at, {register}, 0xFFFF0000;"]
        return [*lines, "mov.b32 f1, at;"]
    return ["{ .reg .b16 l, h;", f"mov.b32 {{l, h}}, {register};", "cvt.f32.f16 f0, l;", "cvt.f32.f16 f1, h; }"]


def _columns(kind: str, over: bool = False) -> list[str]:
    """PTX of `quantize_columns`: a thread has the column of its number, and reads it twice, 16 rows at a step."""
    lines = [
        f".reg .b32 a<8>, x<8>, m<4>, o<{BLOCK // 4}>, q, to;",
        SCALE_REGISTERS,
        ".reg .b16 g<16>, h<8>; .reg .f32 f0, f1;",
    ]
    lines += ["and.b32 q, tid, 63;", "and.b32 at, q, 7;", "shl.b32 at, at, 1;", "shr.u32 q, q, 3;"]
    lines += ["{ .reg .b32 half;", "shr.u32 half, tid, 6;", f"mad.lo.u32 at, half, {HALF_BYTES}, at; }}"]
    lines += _addresses()

    def read(rows: range) -> list[str]:
        return [f"ld.shared.b16 g{n}, [a{row % 8}+{row // 8 * 8 * ROW_BYTES}];" for n, row in enumerate(rows)]

    steps = [range(row, row + 16) for row in range(0, BLOCK, 16)]
    lines += [f"mov.b32 m{n}, 0;" for n in range(4)]
    for rows in steps:
        lines += read(rows)
        lines += [f"mov.b32 x{n}, {{g{2 * n}, g{2 * n + 1}}};" for n in range(8)]
        for n in range(8):
            lines += _magnitudes([f"x{n}"], f"m{n % 4}")
    lines += ["max.u16x2 m0, m0, m1;", "max.u16x2 m2, m2, m3;", "max.u16x2 m0, m0, m2;"]
    lines += [*_largest("m0", kind), *SCALE, *_scale_of_column("$2")]
    for step, rows in enumerate(steps):
        lines += read(rows)
        for n in range(8):
            lines += [f"mov.b32 x{n}, {{g{2 * n}, g{2 * n + 1}}};", *_unpacked(f"x{n}", kind)]
            lines += [f"mul.f32 f{i}, f{i}, inverse;" for i in range(2)]
            lines += [f"cvt.rn.satfinite.e4m3x2.f32 h{n}, f1, f0;"]
        lines += _packed(step) + ([] if over else _store_column(step, "$1"))
    if over:
        lines += ["mov.u32 at, %tid.x;", f"shr.u32 at, at, {BLOCK.bit_length() - 1};", "add.u32 at, at, 1;"]
        lines += [f"bar.sync at, {BLOCK};"]  # the warpgroup's barrier in Mosaic: all threads have read the tile
        for step in range(len(steps)):
            lines += _store_column(step, "$1")
    return lines


def _addresses() -> list[str]:
    """PTX that sets `a0` to `a7` to the addresses of the thread's column in rows 0 to 7, from the number `q` of the
    column's 16-byte piece and the column's bytes `at` within the piece. The swizzle repeats every eight rows."""
    lines = ["add.u32 at, at, $0;"]
    for row in range(8):
        lines += [f"xor.b32 a{row}, q, {row};", f"mad.lo.u32 a{row}, a{row}, 16, at;"]
        lines += [f"add.u32 a{row}, a{row}, {row * ROW_BYTES};"]
    return lines


def _scale_of_column(scales: str) -> list[str]:
    """PTX that stores `scale` of the thread's column to the GPU's memory at `scales`."""
    return ["{ .reg .b64 place;", f"mad.wide.u32 place, tid, 4, {scales};", "st.global.f32 [place], scale; }"]


def _packed(step: int) -> list[str]:
    """PTX that packs the 16 codes of `h0` to `h7` into the four registers of `step`, or zeros if the column is not
    `finite`."""
    lines = []
    for n in range(4):
        out = f"o{4 * step + n}"
        lines += [f"mov.b32 {out}, {{h{2 * n}, h{2 * n + 1}}};", f"selp.b32 {out}, {out}, 0, finite;"]
    return lines


def _store_column(step: int, turned: str) -> list[str]:
    """PTX that stores the 16 codes of `step` as the piece of this number of the row `tid` of the tile at `turned`."""
    lines = ["and.b32 to, tid, 7;", f"xor.b32 to, to, {step};", "shl.b32 to, to, 4;"]
    lines += [f"mad.lo.u32 to, tid, {ROW_BYTES}, to;", f"add.u32 to, to, {turned};"]
    return [*lines, f"st.shared.v4.b32 [to], {{{','.join(f'o{4 * step + n}' for n in range(4))}}};"]


def _quantized_columns() -> list[str]:
    """PTX of `quantize_columns_again`: a thread has the column of its number, and keeps all of it in registers."""
    lines = [
        f".reg .b32 a<8>, b<2>, o<{BLOCK // 4}>, q, to;",
        SCALE_REGISTERS,
        f".reg .f32 v<{BLOCK}>, f0, f1; .reg .b16 h<8>;",
    ]
    lines += ["shr.u32 q, tid, 4;", "and.b32 at, tid, 15;", *_addresses()]
    lines += ["mad.lo.u32 to, $4, 4, $1;", "mov.f32 amax, 0f00000000;"]
    for row in range(0, BLOCK, 2):
        for n in range(2):
            lines += [f"ld.shared.u8 b{n}, [a{(row + n) % 8}+{(row + n) // 8 * 8 * ROW_BYTES}];"]
            lines += [f"ld.shared.f32 f{n}, [to+{(row + n) * 4}];"]
        lines += ["{ .reg .b16 pair, unused, l, h;", "prmt.b32 b0, b0, b1, 0x0040;", "mov.b32 {pair, unused}, b0;"]
        lines += ["cvt.rn.f16x2.e4m3x2 b0, pair;", "mov.b32 {l, h}, b0;"]
        lines += [f"cvt.f32.f16 v{row}, l;", f"cvt.f32.f16 v{row + 1}, h; }}"]
        for n in range(2):
            lines += [f"mul.f32 v{row + n}, v{row + n}, f{n};", f"abs.f32 f{n}, v{row + n};"]
            lines += [f"max.NaN.f32 amax, amax, f{n};"]
    lines += [*SCALE, *_scale_of_column("$3")]
    for step in range(BLOCK // 16):
        for n in range(8):
            low, high = (f"v{step * 16 + 2 * n + i}" for i in range(2))
            lines += [f"mul.f32 f0, {low}, inverse;", f"mul.f32 f1, {high}, inverse;"]
            lines += [f"cvt.rn.satfinite.e4m3x2.f32 h{n}, f1, f0;"]
        lines += _packed(step) + _store_column(step, "$2")
    return lines
