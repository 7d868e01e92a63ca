// CUDA C++ as the kernels use it, for the emulator: README.md. A kernel that uses any other part does not compile.
#pragma once

#include <cmath>
#include <cstring>
#include <functional>
#include <tuple>
#include <type_traits>
#include <utility>

#include "cuda_runtime_api.h"

#define __device__
#define __global__
#define __host__
#define __forceinline__ inline
#define __noinline__
#define __shared__ static thread_local
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) alignas(n)
#define __restrict__ __restrict

extern thread_local uint3 threadIdx, blockIdx;
extern thread_local dim3 gridDim, blockDim;

namespace emulator {

// The thread lets others run: it polls memory, or waits at a barrier.
void Poll();
void Pause(uint64_t ns);
// Now and then the thread lets others run, so that orders differ from run to run.
void Shake();
uint64_t NowNs();
void* DynamicShared();
char* SharedWindow();
// All `threads` threads that name the barrier `id`; 0: all threads of the block that have not ended.
void Barrier(int id, int threads);
int Count(int predicate);
int Vote(int predicate, bool all);
// Gives `value` to the lanes of `mask`, and returns the values of all lanes: [32].
const uint64_t* Exchange(unsigned mask, uint64_t value);
cudaError_t Launch(dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream, const void* kernel,
                   std::function<void()> body);
// A call of the kernel, with the arguments as they are now: the kernel runs later, when the caller may have gone on.
template <class... P, class... A>
std::function<void()> Bound(void (*kernel)(P...), A&&... a) {
  return [kernel, values = std::tuple<P...>(std::forward<A>(a)...)] { std::apply(kernel, values); };
}

void CopyLater(void* to, const void* from, size_t bytes, size_t zeros);
void CommitCopies();
void AwaitCopies(int groups_left);

// Inline PTX, translated by translate.py.
template <class T>
T* Shared(uint32_t address) {
  return reinterpret_cast<T*>(SharedWindow() + static_cast<int32_t>(address));
}
template <class T, class Address>
T* At(Address address) {
  if constexpr (std::is_pointer_v<Address>) {
    return reinterpret_cast<T*>(const_cast<void*>(static_cast<const void*>(address)));
  } else if constexpr (sizeof(Address) == 4) {
    return Shared<T>(address);
  } else {
    return reinterpret_cast<T*>(address);
  }
}
template <class T>
T Load(const T* p, int order) {
  Poll();
  return order == __ATOMIC_ACQUIRE ? __atomic_load_n(p, __ATOMIC_ACQUIRE) : __atomic_load_n(p, __ATOMIC_RELAXED);
}
template <class T, class V>
void Store(T* p, V value, int order) {
  Shake();
  T bits = 0;
  static_assert(sizeof(V) == sizeof(T), "the operand has another size than the instruction");
  std::memcpy(&bits, &value, sizeof(T));
  if (order == __ATOMIC_RELEASE) {
    __atomic_store_n(p, bits, __ATOMIC_RELEASE);
  } else {
    __atomic_store_n(p, bits, __ATOMIC_RELAXED);
  }
}
template <class V, class T>
void Set(V& to, T bits) {
  static_assert(sizeof(V) == sizeof(T), "the operand has another size than the instruction");
  std::memcpy(&to, &bits, sizeof(T));
}
template <class T>
T CompareAndSwap(T* p, T expected, T value) {
  Poll();
  __atomic_compare_exchange_n(p, &expected, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
  return expected;
}
void SyncWarp(unsigned mask);
// 16 of the 128 bytes of a line, which eight lanes store and load as a whole (cuda_kernels/low_latency/ll128.cuh).
uint4 LoadLinePart(const uint4* p);
void StoreLinePart(uint4* p, uint4 part);
inline uint4 LoadVector(const uint4* p) {
  Poll();
  uint64_t halves[2];
  for (int i = 0; i < 2; ++i) halves[i] = __atomic_load_n(reinterpret_cast<const uint64_t*>(p) + i, __ATOMIC_ACQUIRE);
  uint4 v;
  std::memcpy(&v, halves, sizeof(v));
  return v;
}
inline void Fence() {
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
  Shake();
}

template <class T>
uint64_t ToBits(T value) {
  static_assert(sizeof(T) <= 8, "lanes exchange 8 bytes at most");
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  return bits;
}
template <class T>
T FromBits(uint64_t bits) {
  T value;
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}
inline int Lane() { return static_cast<int>(threadIdx.x & 31); }

}  // namespace emulator

enum cudaLaunchAttributeID { cudaLaunchAttributeProgrammaticStreamSerialization = 6 };
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    int programmaticStreamSerializationAllowed;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};
template <class... P>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(P...), const P&... p) {
  return emulator::Launch(config->gridDim, config->blockDim, config->dynamicSmemBytes, config->stream,
                          emulator::Key(kernel), emulator::Bound(kernel, p...));
}

template <class A, class B>
constexpr std::common_type_t<A, B> min(A a, B b) {
  using C = std::common_type_t<A, B>;
  return static_cast<C>(b) < static_cast<C>(a) ? static_cast<C>(b) : static_cast<C>(a);
}
template <class A, class B>
constexpr std::common_type_t<A, B> max(A a, B b) {
  using C = std::common_type_t<A, B>;
  return static_cast<C>(a) < static_cast<C>(b) ? static_cast<C>(b) : static_cast<C>(a);
}

inline void __syncthreads() { emulator::Barrier(0, 0); }
inline int __syncthreads_count(int predicate) { return emulator::Count(predicate); }
inline int __syncthreads_or(int predicate) { return emulator::Vote(predicate, false); }
inline int __syncthreads_and(int predicate) { return emulator::Vote(predicate, true); }
inline void __syncwarp(unsigned mask = 0xFFFFFFFFu) { emulator::SyncWarp(mask); }
template <class T>
T __shfl_sync(unsigned mask, T value, int lane, int width = 32) {
  const uint64_t* all = emulator::Exchange(mask, emulator::ToBits(value));
  return emulator::FromBits<T>(all[(emulator::Lane() & ~(width - 1)) | (lane & (width - 1))]);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  const uint64_t* all = emulator::Exchange(mask, emulator::ToBits(value));
  const int lane = emulator::Lane(), from = lane - static_cast<int>(delta);
  return from < (lane & ~(width - 1)) ? value : emulator::FromBits<T>(all[from]);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  const uint64_t* all = emulator::Exchange(mask, emulator::ToBits(value));
  const int lane = emulator::Lane(), from = lane + static_cast<int>(delta);
  return from > (lane | (width - 1)) ? value : emulator::FromBits<T>(all[from]);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32) {
  const uint64_t* all = emulator::Exchange(mask, emulator::ToBits(value));
  const int lane = emulator::Lane(), from = lane ^ bits;
  return (from & ~(width - 1)) > (lane & ~(width - 1)) ? value : emulator::FromBits<T>(all[from & 31]);
}
inline unsigned __ballot_sync(unsigned mask, int predicate) {
  const uint64_t* all = emulator::Exchange(mask, predicate != 0);
  unsigned out = 0;
  for (int i = 0; i < 32; ++i) out |= (mask >> i & 1 && all[i]) ? 1u << i : 0;
  return out;
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) == mask; }
template <class T>
unsigned __match_any_sync(unsigned mask, T value) {
  const uint64_t bits = emulator::ToBits(value);
  const uint64_t* all = emulator::Exchange(mask, bits);
  unsigned out = 0;
  for (int i = 0; i < 32; ++i) out |= (mask >> i & 1 && all[i] == bits) ? 1u << i : 0;
  return out;
}
namespace emulator {
template <class T, class F>
T Reduce(unsigned mask, T value, F f) {
  const uint64_t* all = Exchange(mask, ToBits(value));
  for (int i = 0; i < 32; ++i) {
    if ((mask >> i & 1) && i != Lane()) value = f(value, FromBits<T>(all[i]));
  }
  return value;
}
}  // namespace emulator
template <class T>
T __reduce_or_sync(unsigned mask, T value) {
  return emulator::Reduce(mask, value, [](T a, T b) { return a | b; });
}
template <class T>
T __reduce_and_sync(unsigned mask, T value) {
  return emulator::Reduce(mask, value, [](T a, T b) { return a & b; });
}
template <class T>
T __reduce_add_sync(unsigned mask, T value) {
  return emulator::Reduce(mask, value, [](T a, T b) { return static_cast<T>(a + b); });
}
template <class T>
T __reduce_max_sync(unsigned mask, T value) {
  return emulator::Reduce(mask, value, [](T a, T b) { return a < b ? b : a; });
}
template <class T>
T __reduce_min_sync(unsigned mask, T value) {
  return emulator::Reduce(mask, value, [](T a, T b) { return b < a ? b : a; });
}

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __ffs(unsigned x) { return __builtin_ffs(static_cast<int>(x)); }
inline int __ffsll(unsigned long long x) { return __builtin_ffsll(static_cast<long long>(x)); }
inline int __clz(unsigned x) { return x ? __builtin_clz(x) : 32; }
inline unsigned __vmaxu2(unsigned a, unsigned b) {
  return max(a & 0xFFFF0000u, b & 0xFFFF0000u) | max(a & 0xFFFFu, b & 0xFFFFu);
}
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>(static_cast<uint64_t>(a) * b >> 32); }
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const uint64_t both = static_cast<uint64_t>(y) << 32 | x;
  unsigned out = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned nibble = selector >> (4 * i) & 0xF, byte = both >> (8 * (nibble & 7)) & 0xFF;
    out |= (nibble & 8 ? (byte & 0x80 ? 0xFFu : 0u) : byte) << (8 * i);
  }
  return out;
}

inline void __threadfence() { emulator::Fence(); }
inline void __threadfence_system() { emulator::Fence(); }
inline void __threadfence_block() { emulator::Fence(); }
inline void __nanosleep(unsigned ns) { emulator::Pause(ns); }
inline size_t __cvta_generic_to_shared(const void* p) {
  return static_cast<uint32_t>(static_cast<const char*>(p) - emulator::SharedWindow());
}
template <class T>
T __ldg(const T* p) {
  return *p;
}
template <class T>
T __ldcs(const T* p) {
  return *p;
}
template <class T>
T __ldcg(const T* p) {
  return *p;
}
template <class T>
void __stcs(T* p, T value) {
  *p = value;
}
template <class T>
void __stcg(T* p, T value) {
  *p = value;
}
template <class T>
T atomicAdd(T* p, std::common_type_t<T> v) {
  emulator::Poll();
  return __atomic_fetch_add(p, v, __ATOMIC_SEQ_CST);
}
template <class T>
T atomicSub(T* p, std::common_type_t<T> v) {
  emulator::Poll();
  return __atomic_fetch_sub(p, v, __ATOMIC_SEQ_CST);
}
template <class T>
T atomicOr(T* p, std::common_type_t<T> v) {
  emulator::Poll();
  return __atomic_fetch_or(p, v, __ATOMIC_SEQ_CST);
}
template <class T>
T atomicAnd(T* p, std::common_type_t<T> v) {
  emulator::Poll();
  return __atomic_fetch_and(p, v, __ATOMIC_SEQ_CST);
}
template <class T>
T atomicExch(T* p, std::common_type_t<T> v) {
  emulator::Poll();
  return __atomic_exchange_n(p, v, __ATOMIC_SEQ_CST);
}
template <class T>
T atomicCAS(T* p, std::common_type_t<T> expected, std::common_type_t<T> v) {
  return emulator::CompareAndSwap(p, expected, v);
}
template <class T>
T atomicMax(T* p, std::common_type_t<T> v) {
  for (T seen = __atomic_load_n(p, __ATOMIC_SEQ_CST);;) {
    const T old = emulator::CompareAndSwap(p, seen, seen < v ? v : seen);
    if (old == seen) return old;
    seen = old;
  }
}
template <class T>
T atomicMin(T* p, std::common_type_t<T> v) {
  for (T seen = __atomic_load_n(p, __ATOMIC_SEQ_CST);;) {
    const T old = emulator::CompareAndSwap(p, seen, v < seen ? v : seen);
    if (old == seen) return old;
    seen = old;
  }
}

inline float __uint_as_float(unsigned bits) { return emulator::FromBits<float>(bits); }
inline unsigned __float_as_uint(float value) { return static_cast<unsigned>(emulator::ToBits(value)); }
inline float __int_as_float(int bits) { return emulator::FromBits<float>(static_cast<unsigned>(bits)); }
inline int __float_as_int(float value) { return static_cast<int>(emulator::ToBits(value)); }
// Rounded apart: the build has -ffp-contract=off.
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fmaf(a, b, c); }
inline int __float2int_rn(float value) { return static_cast<int>(std::nearbyintf(value)); }
using std::fmaxf;
using std::fminf;
