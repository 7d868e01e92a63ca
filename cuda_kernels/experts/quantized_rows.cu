// Rows of groups times weights that are read in the format in which checkpoints ship them: fp8 or int8 with float
// scales of blocks, or MXFP4. For groups of few rows, for which reading the weights takes most of the time.
//
// What moves: weights and rows from global memory into a ring of stages in shared memory; weights from there into
// registers, where they become bf16; sums back to global memory. A tile is up to 64 rows of one group and 256 columns
// of its weight. Its product is computed transposed: the weights' columns are the 64 rows of a wgmma, whose
// operand comes from registers, and the rows of the group are its 8 to 64 columns, whose operand lies in shared memory.
//
// Who does it: one thread of the last warpgroup requests the loads (TMA). Every other warpgroup multiplies 64 columns
// of the tile. Blocks are persistent; block b has tiles b, b + gridDim.x and so on. An element is widened as
// `QuantizedWeight.widen` does it: float(value) * scale, rounded to bf16. Products are added up in ascending order, 16
// at a time, in float32.
//
// Fragments: a wgmma of bf16 takes from thread 4 c + t of a warp the elements (2 t, 2 t + 1, 2 t + 8, 2 t + 9) of rows
// c and c + 8. ldmatrix transposes units of two bytes, here two neighbouring columns of a weight. Therefore row c
// stands for column 2 c, and row c + 8 for column 2 c + 1. In MXFP4 a byte has two elements along the depth; among 16
// elements the even ones take the first eight places of the wgmma. The rows of the group come in that order.
//
// Who waits for whom: a stage's loads wait until all multiplying warps have released it (`released`); its use waits
// until its bytes have arrived (`loaded`). Memory order: TMA writes and wgmma reads by the async proxy; ldmatrix reads
// what the barrier has acquired. A warp releases a stage when its wgmma have read it.
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <algorithm>

#include "cuda_kernels/experts/quantized_rows.h"

namespace xen_moe {
namespace {

constexpr int kTileRows = 64;   // rows of a group that a tile has at most
constexpr int kWarpgroups = 4;  // that multiply, 64 columns each
constexpr int kColumns = 64 * kWarpgroups;
constexpr int kLoaders = 128;  // threads, of which one requests loads
constexpr int kThreads = 128 * kWarpgroups + kLoaders;
// Registers of a thread that loads and of one that multiplies. In sum they are the registers with which a block of this
// size is launched, 96 a thread.
constexpr int kLoadRegisters = 32, kMultiplyRegisters = 112;
constexpr int kFp4Block = 32;     // elements along the depth with one exponent
constexpr int kStageDepth = 128;  // elements of the contracted dimension
constexpr int kAtom = 128;        // bytes of a row of shared memory, whose 16-byte chunks are swizzled
constexpr int kRowWidths = 4;     // 8, 16, 32 or 64 rows are loaded

template <WeightFormat kOf>
struct Shape {
  static constexpr WeightFormat kFormat = kOf;
  static constexpr bool kFp4 = kFormat == WeightFormat::kMxfp4;
  static constexpr int kByteRows = kFp4 ? kStageDepth / 2 : kStageDepth;
  // A stage: rows in two atoms of 64 elements, weights in atoms of 128 columns, exponents.
  static constexpr int kRowBytes = 2 * kTileRows * kAtom;
  static constexpr int kWeightBytes = kByteRows * kColumns;
  static constexpr int kScaleBytes = kFp4 ? kStageDepth / kFp4Block * kColumns : 0;
  static constexpr int kStageBytes = (kRowBytes + kWeightBytes + kScaleBytes + 1023) / 1024 * 1024;
  static constexpr int kStages = 216 * 1024 / kStageBytes;
  static constexpr int kSharedBytes = kStages * kStageBytes + 1024;  // 1024: stages begin at multiples of 1024
};

// The operands as TMA reads them; past their ends it reads zeros.
struct Maps {
  CUtensorMap rows[kRowWidths];  // 64 elements of 8, 16, 32 or 64 rows
  CUtensorMap values[kMaxWeightMatrices], exponents[kMaxWeightMatrices];
};

struct Tile {
  int group, row, count, column, matrix;
};

// Shared addresses of the stages and of their barriers.
struct Ring {
  uint32_t stages, loaded, released;
};

// For each group, the number of tiles of rows, and of rows, of all groups up to and including it.
struct Groups {
  int tiles_up_to[kMaxWeightGroups], rows_up_to[kMaxWeightGroups];
};

// A place in the ring of stages, and the parity of the phase of its barriers.
struct Slot {
  int index = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void Next(int stages) {
    if (++index == stages) index = 0, phase ^= 1;
  }
};

#if defined(__CUDA_ARCH__) && defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define XEN_MOE_HOPPER 1
#endif

__device__ __forceinline__ uint32_t SharedAddress(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

#ifdef XEN_MOE_HOPPER
__device__ __forceinline__ void InitBarrier(uint64_t* barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(SharedAddress(barrier)), "r"(count) : "memory");
}
// `barrier`: its shared address.
__device__ __forceinline__ void Await(uint32_t barrier, uint32_t phase) {
  uint32_t done = 0;
  while (!done) {
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done)
                 : "r"(barrier), "r"(phase)
                 : "memory");
  }
}
__device__ __forceinline__ void Arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ uint32_t LoadShared16(uint32_t from) {
  uint16_t value;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(value) : "r"(from) : "memory");
  return value;
}
__device__ __forceinline__ void ExpectBytes(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void LoadBox(uint32_t to, const CUtensorMap* map, uint32_t barrier, int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
          to),
      "l"(map), "r"(barrier), "r"(x), "r"(y)
      : "memory");
}
__device__ __forceinline__ void LoadBox(uint32_t to, const CUtensorMap* map, uint32_t barrier, int x, int y, int z,
                                        uint64_t cached) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(to),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "l"(cached)
      : "memory");
}
// Loads units of eight rows of 16 bytes, transposed. `from`: the shared address of this lane's 16 bytes, of row `lane`
// of the first 32 rows.
template <int kUnits>
__device__ __forceinline__ void LoadTransposed(uint32_t (&to)[kUnits], uint32_t from) {
  if constexpr (kUnits == 1) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];" : "=r"(to[0]) : "r"(from) : "memory");
  } else if constexpr (kUnits == 2) {  // the rows of lanes 16 to 31 are not read
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(to[0]), "=r"(to[1])
                 : "r"(from)
                 : "memory");
  } else {
#pragma unroll
    for (int i = 0; i < kUnits; i += 4) {
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                   : "=r"(to[i]), "=r"(to[i + 1]), "=r"(to[i + 2]), "=r"(to[i + 3])
                   : "r"(from + 8 * i * kAtom)
                   : "memory");
    }
  }
}

// TakeRegisters raises the registers of every thread of a warpgroup to kCount, LeaveRegisters lowers them to kCount. In
// sum a block never has more than at its launch.
template <int kCount>
__device__ __forceinline__ void TakeRegisters() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
__device__ __forceinline__ void LeaveRegisters() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}

__device__ __forceinline__ void FenceMultiplication() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void CommitMultiplication() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void AwaitMultiplications() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// d [64, n] += a [64, 16] (registers) times b [16, n] (shared memory: a row of 128 bytes for each of the n columns).
__device__ __forceinline__ void Multiply(float (&d)[4], const uint32_t (&a)[4], uint64_t b) {
  asm volatile(
      "{ .reg .pred p; setp.eq.u32 p, 0, 0; wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, %8, p, 1, 1, 0; }"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
__device__ __forceinline__ void Multiply(float (&d)[8], const uint32_t (&a)[4], uint64_t b) {
  asm volatile(
      "{ .reg .pred p; setp.eq.u32 p, 0, 0; wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, %11}, %12, p, 1, 1, 0; }"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
__device__ __forceinline__ void Multiply(float (&d)[16], const uint32_t (&a)[4], uint64_t b) {
  asm volatile(
      "{ .reg .pred p; setp.eq.u32 p, 0, 0; wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
      "{%16, %17, %18, %19}, %20, p, 1, 1, 0; }"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
__device__ __forceinline__ void Multiply(float (&d)[32], const uint32_t (&a)[4], uint64_t b) {
  asm volatile(
      "{ .reg .pred p; setp.eq.u32 p, 0, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "{%32, %33, %34, %35}, %36, p, 1, 1, 0; }"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
        "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
        "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
// Keeps the compiler from reading the sums before the wait that precedes this call.
template <int kCount>
__device__ __forceinline__ void Settle(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// The wgmma descriptor of rows in shared memory: 128 bytes a row, swizzled, eight rows every 1024 bytes.
__device__ __forceinline__ uint64_t RowsDescriptor(uint32_t address) {
  return static_cast<uint64_t>((address & 0x3FFFF) >> 4) | uint64_t{1} << 16 | uint64_t{1024 >> 4} << 32 |
         uint64_t{1} << 62;
}

__device__ __forceinline__ uint32_t Pack(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}
__device__ __forceinline__ uint32_t Times(uint32_t a, uint32_t b) {
  const __nv_bfloat162 product =
      __hmul2_rn(reinterpret_cast<const __nv_bfloat162&>(a), reinterpret_cast<const __nv_bfloat162&>(b));
  return reinterpret_cast<const uint32_t&>(product);
}

// Widens a unit of ldmatrix: bytes (k, even column), (k, odd column), (k + 1, even), (k + 1, odd). `of_even`, `of_odd`:
// the scales of the two columns.
template <WeightFormat kFormat>
__device__ __forceinline__ void WidenUnit(uint32_t bytes, float of_even, float of_odd, uint32_t* even, uint32_t* odd) {
  float values[4];
  if constexpr (kFormat == WeightFormat::kInt8) {
    const uint32_t shifted = bytes ^ 0x80808080u;  // value + 128, put behind the exponent of 2^23
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      values[i] = __uint_as_float(__byte_perm(shifted, 0x4B000000u, 0x7440 + i)) - 8388736.0f;
    }
  } else {
    constexpr auto kKind = kFormat == WeightFormat::kE4m3 ? __NV_E4M3 : __NV_E5M2;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const __half2_raw raw = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(bytes >> 16 * i), kKind);
      const float2 pair = __half22float2(static_cast<__half2>(raw));
      values[2 * i] = pair.x, values[2 * i + 1] = pair.y;
    }
  }
  *even = Pack(__fmul_rn(values[0], of_even), __fmul_rn(values[2], of_even));
  *odd = Pack(__fmul_rn(values[1], of_odd), __fmul_rn(values[3], of_odd));
}

// The MXFP4 scales of 32 elements in each of two neighbouring columns. `two`: their exponents, a byte each.
struct Fp4Scales {
  uint32_t even, odd;  // in both halves the bf16 2^(exponent - 1), which is 2^126 times the scale

  // Of exponents up to 128.
  __device__ __forceinline__ explicit Fp4Scales(uint32_t two) : even(Twice(two & 0xFF)), odd(Twice(two >> 8)) {}
  // Of any exponents: those above 128 count as 128, and a second multiplication, by `Rest`, makes up for it.
  __device__ __forceinline__ static Fp4Scales Clamped(uint32_t two) {
    return Fp4Scales(min(two & 0xFF, 128u) | min(two >> 8, 128u) << 8);
  }
  __device__ __forceinline__ static uint32_t Twice(uint32_t exponent) { return exponent * 0x00800080u + 0x3F003F00u; }
  // Returns, in both halves, the bf16 factor of a second multiplication, which is needed for an exponent above 128; for
  // 255 the factor is NaN.
  __device__ __forceinline__ static uint32_t Rest(uint32_t exponent) {
    const uint32_t bits = exponent == 255 ? 0x7FC0u : exponent > 128 ? (exponent - 1) << 7 : 0x3F80u;
    return bits * 0x00010001u;
  }
};

// Widens a unit of ldmatrix, eight elements of 16 along the depth, to the four registers of a fragment. The code of an
// element, a sign, two bits of exponent and one of mantissa, becomes a bf16 of 2^-126 times its value.
__device__ __forceinline__ void WidenFp4(uint32_t bytes, const Fp4Scales& scales, uint32_t (&a)[4]) {
  // A multiplication copies the code of each half to bits 15 to 12, for the sign, and to bits 9 to 6, for the
  // magnitude. A code then takes three instructions, the multiplication and the two logical operations around it. With
  // shifts in place of the multiplication it would take four. Logical operations and shifts limit the kernel.
  constexpr uint32_t kBoth = 0x81C081C0u;
  const uint32_t codes[4] = {(bytes & 0x000F000Fu) * 0x1040u & kBoth, (bytes >> 8 & 0x000F000Fu) * 0x1040u & kBoth,
                             (bytes & 0x00F000F0u) * 0x104u & kBoth, (bytes >> 8 & 0x00F000F0u) * 0x104u & kBoth};
  // Register 0 has the even column's even elements, 2 its odd ones; 1 and 3 have the odd column's.
  a[0] = Times(codes[0], scales.even), a[2] = Times(codes[2], scales.even);
  a[1] = Times(codes[1], scales.odd), a[3] = Times(codes[3], scales.odd);
}
__device__ __forceinline__ void MultiplyByRest(uint32_t two, uint32_t (&a)[4]) {
  const uint32_t even = Fp4Scales::Rest(two & 0xFF), odd = Fp4Scales::Rest(two >> 8);
  a[0] = Times(a[0], even), a[2] = Times(a[2], even), a[1] = Times(a[1], odd), a[3] = Times(a[3], odd);
}

// Float scales of two neighbouring columns, read one block of the depth ahead of their use.
struct BlockScales {
  const float *even_at, *odd_at;
  int stride, rows_left;  // rows_left: further rows of scales below the next one
  int depth_left;         // of the current block
  float even, odd, next_even, next_odd;

  __device__ __forceinline__ BlockScales(const QuantizedRowsParams& p, const float* scales, int group, int column) {
    const int last = p.columns - 1;
    scales += static_cast<int64_t>(group) * p.scale_rows * p.scale_columns;
    even_at = scales + min(column, last) / p.block_columns, odd_at = scales + min(column + 1, last) / p.block_columns;
    stride = p.scale_columns, rows_left = p.format == WeightFormat::kMxfp4 ? 0 : p.scale_rows;  // not a float there
    depth_left = 0;
    Read();
  }
  __device__ __forceinline__ void Read() {
    if (rows_left > 0) {
      next_even = __ldg(even_at), next_odd = __ldg(odd_at);
      even_at += stride, odd_at += stride, --rows_left;
    }
  }
  // Makes the scales of the next `depth` elements the current ones. Called before those are widened.
  __device__ __forceinline__ void Advance(int depth, int block_rows) {
    if (depth_left <= 0) {
      even = next_even, odd = next_odd, depth_left = block_rows;
      Read();
    }
    depth_left -= depth;
  }
};

// Returns i where 8 << i rows (8, 16, 32 or 64) are loaded and multiplied for a tile of `count` rows.
__device__ __forceinline__ int RowWidth(int count) { return count <= 8 ? 0 : count <= 16 ? 1 : count <= 32 ? 2 : 3; }

// Brings row `row` of the scales of a tile's columns to the L2 cache, stages before `BlockScales` reads them.
__device__ __forceinline__ void PrefetchScales(const QuantizedRowsParams& p, const Tile& tile, int row) {
  const auto* scales = static_cast<const float*>(p.matrices[tile.matrix].scales) +
                       (static_cast<int64_t>(tile.group) * p.scale_rows + row) * p.scale_columns;
  for (int column = tile.column; column < min(tile.column + kColumns, p.columns); column += 32 * p.block_columns) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(scales + column / p.block_columns) : "memory");
  }
}

// Requests a tile's stages, one after the other.
template <class S>
__device__ __forceinline__ void Load(const QuantizedRowsParams& p, const Maps& maps, const Tile& tile, const Ring& ring,
                                     Slot& slot) {
  const int width = RowWidth(tile.count), row_bytes = (8 << width) * kAtom;
  uint64_t once;  // the cache policy of weights: the L2 cache drops them before rows and scales
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
  for (int depth = 0, scale_row = 0; depth < p.depth; depth += kStageDepth) {
    Await(ring.released + 8 * slot.index, slot.phase ^ 1);
    const uint32_t barrier = ring.loaded + 8 * slot.index, stage = ring.stages + slot.index * S::kStageBytes;
    ExpectBytes(barrier, 2 * row_bytes + S::kWeightBytes + S::kScaleBytes);
    const int byte_row = S::kFp4 ? depth / 2 : depth;
    const int end = S::kFp4 ? 0 : min(depth + kStageDepth, p.depth);  // rows of scales that begin in this stage
    for (; scale_row * p.block_rows < end; ++scale_row) PrefetchScales(p, tile, scale_row);
#pragma unroll
    for (int at = 0; at < kColumns; at += kAtom) {
      LoadBox(stage + S::kRowBytes + at * S::kByteRows, &maps.values[tile.matrix], barrier, tile.column + at, byte_row,
              tile.group, once);
    }
    if constexpr (S::kFp4) {
      LoadBox(stage + S::kRowBytes + S::kWeightBytes, &maps.exponents[tile.matrix], barrier, tile.column,
              depth / kFp4Block, tile.group, once);
    }
    LoadBox(stage, &maps.rows[width], barrier, depth, tile.row);
    LoadBox(stage + kTileRows * kAtom, &maps.rows[width], barrier, depth + 64, tile.row);
    slot.Next(S::kStages);
  }
}

// The weights of kSteps wgmma in their own format, in this thread's registers. Fetch loads those of a stage from wgmma
// number `first` on; Widen makes bf16 fragments `a` of them.
template <class S, int kSteps>
struct Fetched {
  static constexpr int kUnits = S::kFp4 ? kSteps : 2 * kSteps;  // of ldmatrix: eight rows of 16 bytes
  uint32_t bytes[kUnits];

  // `weights`: the shared address of this lane's first 16 bytes in the stage.
  __device__ __forceinline__ void Fetch(uint32_t weights, int first) {
    LoadTransposed(bytes, weights + first * (S::kFp4 ? 8 : 16) * kAtom);
  }
  // `two`: MXFP4's exponents of this thread's two columns; `large`: an exponent of this stage may be above 127.
  __device__ __forceinline__ void Widen(int first, BlockScales* scales, int block_rows, uint32_t two, bool large,
                                        uint32_t (&a)[kSteps][4]) const {
    if constexpr (S::kFp4) {
      static_assert(kSteps * 16 <= kFp4Block, "one exponent for the elements of a column");
      const Fp4Scales both(two);
#pragma unroll
      for (int i = 0; i < kSteps; ++i) WidenFp4(bytes[i], both, a[i]);
      if (large) {
        const Fp4Scales clamped = Fp4Scales::Clamped(two);
#pragma unroll
        for (int i = 0; i < kSteps; ++i) WidenFp4(bytes[i], clamped, a[i]), MultiplyByRest(two, a[i]);
      }
    } else {
      if (first * 16 % 64 == 0) scales->Advance(64, block_rows);
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        WidenUnit<S::kFormat>(bytes[2 * i], scales->even, scales->odd, &a[i][0], &a[i][1]);
        WidenUnit<S::kFormat>(bytes[2 * i + 1], scales->even, scales->odd, &a[i][2], &a[i][3]);
      }
    }
  }
};

// Multiplies a tile of up to kN rows and stores the product. The wgmma of a stage are issued in groups of kSteps. While
// those of one group run, the weights of the next group are widened into other registers, and the weights of the group
// after that come from shared memory.
template <class S, int kN>
__device__ __forceinline__ void MultiplyTile(const QuantizedRowsParams& p, const Tile& tile, const Ring& ring,
                                             Slot& slot) {
  constexpr int kSteps = 2, kGroups = kStageDepth / 16 / kSteps;  // kSteps: wgmma of a group; kGroups: of a stage
  static_assert(kGroups % 2 == 0, "the registers of a group are known at compile time");
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  const int columns_at = 16 * warp;             // 64 columns a warpgroup, 16 a warp
  const int own = columns_at + 2 * (lane / 4);  // the first of this thread's two columns
  // Of an atom, the 16-byte chunk of this warp's columns: chunks of a row are swizzled by its number.
  const uint32_t weights_at = S::kRowBytes + warp / 8 * kAtom * S::kByteRows + lane * kAtom + ((warp ^ lane) & 7) * 16;
  const uint32_t exponents_at = S::kRowBytes + S::kWeightBytes + own;
  const QuantizedMatrix& m = p.matrices[tile.matrix];
  float sums[kN / 2];
#pragma unroll
  for (int i = 0; i < kN / 2; ++i) sums[i] = 0.0f;
  BlockScales scales(p, static_cast<const float*>(m.scales), tile.group, tile.column + own);
  uint32_t before = 0;
  uint32_t a[2][kSteps][4];
  Fetched<S, kSteps> fetched[2];
  for (int depth = 0; depth < p.depth; depth += kStageDepth) {
    Await(ring.loaded + 8 * slot.index, slot.phase);
    const uint32_t stage = ring.stages + slot.index * S::kStageBytes;
    const uint64_t rows = RowsDescriptor(stage);
    fetched[0].Fetch(stage + weights_at, 0);
    uint32_t exponents[kGroups] = {}, all = 0;
    if constexpr (S::kFp4) {
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        exponents[group] = LoadShared16(stage + exponents_at + group * kSteps * 16 / kFp4Block * kColumns);
        all |= exponents[group];
      }
    }
    const bool large = S::kFp4 && __any_sync(~0u, all & 0x8080);
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      if (group + 1 < kGroups) fetched[(group + 1) & 1].Fetch(stage + weights_at, (group + 1) * kSteps);
      fetched[group & 1].Widen(group * kSteps, &scales, p.block_rows, exponents[group], large, a[group & 1]);
      FenceMultiplication();
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        const int step = group * kSteps + i;
        Multiply(sums, a[group & 1][i], rows + step / 4 * (kTileRows * kAtom >> 4) + step % 4 * 2);
      }
      CommitMultiplication();
      AwaitMultiplications<1>();  // those of the group before have read their registers, and their stage
      if (group == 0 && before != 0 && lane == 0) Arrive(before);
    }
    before = ring.released + 8 * slot.index;
    slot.Next(S::kStages);
  }
  AwaitMultiplications<0>();
  if (lane == 0) Arrive(before);
  Settle(sums);
  if (tile.column + own >= p.columns) return;
  auto* out = static_cast<__nv_bfloat16*>(m.out) + static_cast<int64_t>(tile.row) * p.columns + tile.column + own;
#pragma unroll
  for (int j = 0; j < kN / 8; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = 8 * j + 2 * (lane & 3) + i;
      if (row < tile.count) {
        *reinterpret_cast<uint32_t*>(out + static_cast<int64_t>(row) * p.columns) =
            Pack(sums[4 * j + i], sums[4 * j + 2 + i]);
      }
    }
  }
}

// One warp: fills `groups` from the sizes. Negative sizes count as 0, and rows past the capacity are left out.
__device__ void CountTiles(const QuantizedRowsParams& p, Groups* groups) {
  const int lane = threadIdx.x & 31;
  int sizes[kMaxWeightGroups / 32];  // all are loaded at once: one load takes as long as all
#pragma unroll
  for (int i = 0; i < kMaxWeightGroups / 32; ++i) {
    sizes[i] = 32 * i + lane < p.groups ? max(p.group_sizes[32 * i + lane], 0) : 0;
  }
  int tiles = 0, rows = 0;
#pragma unroll
  for (int i = 0; i < kMaxWeightGroups / 32; ++i) {
    if (32 * i >= p.groups) break;
    const int group = 32 * i + lane, size = sizes[i];
    int sum = size;
    for (int by = 1; by < 32; by *= 2) {
      const int other = __shfl_up_sync(~0u, sum, by);
      if (lane >= by) sum += other;
    }
    const int end = min(rows + sum, p.capacity), begin = min(rows + sum - size, p.capacity);
    int count = (end - begin + kTileRows - 1) / kTileRows;
    for (int by = 1; by < 32; by *= 2) {
      const int other = __shfl_up_sync(~0u, count, by);
      if (lane >= by) count += other;
    }
    if (group < p.groups) groups->tiles_up_to[group] = tiles + count, groups->rows_up_to[group] = end;
    tiles += __shfl_sync(~0u, count, 31);
    rows = min(rows + __shfl_sync(~0u, sum, 31), p.capacity);
  }
}

// Returns tile `number`: the columns change fastest, then the matrix, then the rows.
__device__ __forceinline__ Tile TileAt(const QuantizedRowsParams& p, const Groups& groups, int number, int width) {
  const int across = (p.columns + width - 1) / width;
  const int of_rows = number / (across * p.num_matrices), rest = number % (across * p.num_matrices);
  int low = 0, high = p.groups - 1;  // the first group with more tiles up to it than of_rows
  while (low < high) {
    const int middle = (low + high) / 2;
    if (groups.tiles_up_to[middle] > of_rows) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  const int before = low ? groups.tiles_up_to[low - 1] : 0, begin = low ? groups.rows_up_to[low - 1] : 0;
  const int row = begin + (of_rows - before) * kTileRows;
  return {low, row, min(kTileRows, groups.rows_up_to[low] - row), rest % across * width, rest / across};
}
#endif  // XEN_MOE_HOPPER

template <WeightFormat kFormat>
__global__ void __launch_bounds__(kThreads, 1)
    QuantizedRowsKernel(const __grid_constant__ QuantizedRowsParams p, const __grid_constant__ Maps maps) {
#ifdef XEN_MOE_HOPPER
  using S = Shape<kFormat>;
  extern __shared__ char dynamic[];
  __shared__ Groups groups;
  __shared__ uint64_t loaded[S::kStages], released[S::kStages];
  Ring ring{(SharedAddress(dynamic) + 1023) & ~1023u, SharedAddress(loaded), SharedAddress(released)};
  // Keeps the compiler from computing the addresses again in front of each use, from special registers.
  asm volatile("" : "+r"(ring.stages), "+r"(ring.loaded), "+r"(ring.released));
  if (threadIdx.x == 32) {
    for (int i = 0; i < S::kStages; ++i) InitBarrier(&loaded[i], 1), InitBarrier(&released[i], 4 * kWarpgroups);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  // Waits until the kernel before this one on its stream has ended, because LaunchFormat lets this one begin early.
  asm volatile("griddepcontrol.wait;" ::: "memory");
  if (threadIdx.x < 32) CountTiles(p, &groups);
  __syncthreads();
  const int across = (p.columns + kColumns - 1) / kColumns;
  const int tiles = groups.tiles_up_to[p.groups - 1] * across * p.num_matrices;
  Slot slot;
  if (threadIdx.x >= kThreads - kLoaders) {
    LeaveRegisters<kLoadRegisters>();
    if (threadIdx.x == kThreads - kLoaders) {
      for (int number = blockIdx.x; number < tiles; number += gridDim.x) {
        Load<S>(p, maps, TileAt(p, groups, number, kColumns), ring, slot);
      }
    }
  } else {
    TakeRegisters<kMultiplyRegisters>();
    for (int number = blockIdx.x; number < tiles; number += gridDim.x) {
      const Tile tile = TileAt(p, groups, number, kColumns);
      switch (RowWidth(tile.count)) {
        case 0:
          MultiplyTile<S, 8>(p, tile, ring, slot);
          break;
        case 1:
          MultiplyTile<S, 16>(p, tile, ring, slot);
          break;
        case 2:
          MultiplyTile<S, 32>(p, tile, ring, slot);
          break;
        default:
          MultiplyTile<S, 64>(p, tile, ring, slot);
      }
    }
  }
#else
  __trap();  // built for no sm_90a: an error, rather than outputs that are not written
#endif
}

using Encode = decltype(&cuTensorMapEncodeTiled);

// Returns null where the driver has no such function.
Encode EncodeFunction() {
  static const Encode function = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    const int e = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
    return e == cudaSuccess && result == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(found) : nullptr;
  }();
  return function;
}

// Describes `data [sizes]` of elements of `bytes` bytes, the innermost dimension first, and the box of one load.
template <int kRank>
bool Describe(CUtensorMap* map, const void* data, int bytes, const uint64_t (&sizes)[kRank],
              const uint32_t (&box)[kRank], bool swizzled) {
  uint64_t strides[kRank - 1];
  uint32_t ones[kRank];
  for (int i = 0; i < kRank; ++i) ones[i] = 1;
  for (int i = 0; i < kRank - 1; ++i) strides[i] = (i ? strides[i - 1] : bytes) * sizes[i];
  const auto type = bytes == 2 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_UINT8;
  const auto swizzle = swizzled ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE;
  return EncodeFunction()(map, type, kRank, const_cast<void*>(data), sizes, strides, box, ones,
                          CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                          CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// Describes all operands. Returns false if the driver refuses one.
template <class S>
bool DescribeAll(const QuantizedRowsParams& p, Maps* maps) {
  const uint64_t columns = p.columns, depth = p.depth, groups = p.groups, byte_rows = S::kFp4 ? depth / 2 : depth;
  for (int i = 0; i < kRowWidths; ++i) {
    const uint32_t box[] = {64, 8u << i};
    if (!Describe(&maps->rows[i], p.rows, 2, {depth, static_cast<uint64_t>(p.capacity)}, box, true)) return false;
  }
  for (int i = 0; i < p.num_matrices; ++i) {
    const QuantizedMatrix& m = p.matrices[i];
    const uint32_t box[] = {kAtom, S::kByteRows, 1}, of_exponents[] = {kColumns, kStageDepth / kFp4Block, 1};
    if (!Describe(&maps->values[i], m.values, 1, {columns, byte_rows, groups}, box, true)) return false;
    if (S::kFp4 &&
        !Describe(&maps->exponents[i], m.scales, 1, {columns, depth / kFp4Block, groups}, of_exponents, false)) {
      return false;
    }
  }
  return true;
}

// Loads the kernel of a format on the current device. Returns a cudaError_t.
template <WeightFormat kFormat>
int LoadFormat() {
  const auto kernel = QuantizedRowsKernel<kFormat>;
  cudaFuncAttributes attributes;
  if (int e = cudaFuncGetAttributes(&attributes, kernel)) return e;
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Shape<kFormat>::kSharedBytes);
}

// Returns a cudaError_t, and whether the current device is a Hopper GPU.
int FindHopper(int* device, bool* hopper) {
  int major = 0;
  if (int e = cudaGetDevice(device)) return e;
  if (int e = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, *device)) return e;
  *hopper = major == 9;
  return cudaSuccess;
}

// Launches a block for each multiprocessor, or for each tile if `p.claimed` or tiles are fewer. Returns a cudaError_t.
template <WeightFormat kFormat>
int LaunchFormat(const QuantizedRowsParams& p, int multiprocessors, cudaStream_t stream) {
  using S = Shape<kFormat>;
  const auto kernel = QuantizedRowsKernel<kFormat>;
  if (int e = LoadFormat<kFormat>()) return e;
  Maps maps{};
  if (!EncodeFunction()) return cudaErrorNotSupported;
  if (!DescribeAll<S>(p, &maps)) return cudaErrorInvalidValue;
  const int64_t across = (p.columns + kColumns - 1) / kColumns * p.num_matrices;
  const int64_t most = across * (std::min(p.groups, p.capacity) + p.capacity / kTileRows);
  cudaLaunchAttribute early{};  // core/launch.cuh says why every kernel may begin early that waits before it reads
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(p.claimed ? most : std::min<int64_t>(most, multiprocessors)));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = S::kSharedBytes, config.stream = stream, config.attrs = &early, config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, p, maps);
}

}  // namespace

int LaunchQuantizedRows(const QuantizedRowsParams& p, cudaStream_t stream) {
  int device = 0, multiprocessors = 0;
  bool hopper = false;
  if (int e = FindHopper(&device, &hopper)) return e;
  if (int e = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device)) return e;
  if (!hopper) return cudaErrorNoKernelImageForDevice;
  if (p.capacity == 0 || p.groups == 0) return cudaSuccess;
  switch (p.format) {
    case WeightFormat::kE4m3:
      return LaunchFormat<WeightFormat::kE4m3>(p, multiprocessors, stream);
    case WeightFormat::kE5m2:
      return LaunchFormat<WeightFormat::kE5m2>(p, multiprocessors, stream);
    case WeightFormat::kInt8:
      return LaunchFormat<WeightFormat::kInt8>(p, multiprocessors, stream);
    default:
      return LaunchFormat<WeightFormat::kMxfp4>(p, multiprocessors, stream);
  }
}

int PreloadQuantizedRows() {
  int device = 0;
  bool hopper = false;
  if (int e = FindHopper(&device, &hopper)) return e;
  if (!hopper) return cudaSuccess;
  if (int e = LoadFormat<WeightFormat::kE4m3>()) return e;
  if (int e = LoadFormat<WeightFormat::kE5m2>()) return e;
  if (int e = LoadFormat<WeightFormat::kInt8>()) return e;
  return LoadFormat<WeightFormat::kMxfp4>();
}

}  // namespace xen_moe
