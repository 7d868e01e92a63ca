#include "ffi/cublas.h"

#include <dlfcn.h>

#include <algorithm>
#include <map>
#include <mutex>

#include "cuda_kernels/core/cuda_error.h"
#include "ffi/devices.h"

namespace xen_moe {
namespace {

// As cublas_api.h declares them (cuBLAS 12 and 13).
constexpr int kNotTransposed = 0, kFloat16 = 2, kBfloat16 = 14, kComputeFloat32 = 68, kDefaultAlgorithm = -1;
struct Api {
  int (*create)(void** handle);
  int (*set_stream)(void* handle, cudaStream_t stream);
  int (*set_workspace)(void* handle, void* workspace, size_t bytes);
  int (*set_sm_count_target)(void* handle, int sms);
  int (*gemm)(void* handle, int trans_a, int trans_b, int64_t m, int64_t n, int64_t k, const void* alpha, const void* a,
              int a_type, int64_t lda, const void* b, int b_type, int64_t ldb, const void* beta, void* c, int c_type,
              int64_t ldc, int compute, int algorithm);
};

std::mutex mutex;
std::string library_path;
Api api{};
// The handle of a GPU serves one thread at a time, under its mutex: threads that compile programs use it beside threads
// that run other programs.
struct Handle {
  std::mutex mutex;
  void* blas = nullptr;
};
std::map<int, Handle> handles;  // by GPU
Handle& Of(int ordinal) {
  std::lock_guard<std::mutex> lock(mutex);
  return handles[ordinal];
}

// Sets `*f` to the function `name` of the library; returns false where it has none.
template <class F>
bool Find(void* library, const char* name, F* f) {
  *f = reinterpret_cast<F>(dlsym(library, name));
  return *f != nullptr;
}

void Check(int status, const char* what) {
  if (status != 0) Refuse(std::string(what) + " failed with status " + std::to_string(status));
}

// Fills `api`, once: from the library that this process has loaded already, otherwise from the one at `library_path`,
// otherwise from the one that the loader finds by name. Throws MemoryError.
void Open() {
  std::lock_guard<std::mutex> lock(mutex);
  if (api.gemm) return;
  const std::string name = "libcublas.so." + std::to_string(CUDART_VERSION / 1000);
  void* library = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
  if (!library && !library_path.empty()) library = dlopen(library_path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!library) library = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  Api found{};
  if (!library || !Find(library, "cublasCreate_v2", &found.create) ||
      !Find(library, "cublasSetStream_v2", &found.set_stream) ||
      !Find(library, "cublasSetWorkspace_v2", &found.set_workspace) ||
      !Find(library, "cublasSetSmCountTarget", &found.set_sm_count_target) ||
      !Find(library, "cublasGemmEx_64", &found.gemm)) {
    const char* const why = dlerror();
    Refuse(std::string("all_gather_matmul needs cuBLAS, which JAX's CUDA plugin brings along: ") +
           (why ? why : name.c_str()));
  }
  api = found;
}

}  // namespace

void SetCublas(std::string path) {
  std::lock_guard<std::mutex> lock(mutex);
  library_path = std::move(path);
}

void PrepareCublas(int ordinal, Matmul shape, std::initializer_list<int> sms, uint64_t workspace_bytes) {
  Open();
  const int before = CudaDevices().Select(ordinal);
  char* memory = nullptr;
  cudaStream_t stream = nullptr;
  std::string why;
  try {
    {
      Handle& handle = Of(ordinal);
      std::lock_guard<std::mutex> lock(handle.mutex);
      if (handle.blas == nullptr) Check(api.create(&handle.blas), "cublasCreate");
    }
    const int64_t most = std::max({shape.m * shape.k, shape.k * shape.n, shape.m * shape.n});
    const uint64_t operand_bytes = (static_cast<uint64_t>(most) * 2 + 255) / 256 * 256;
    if (Taken(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking)) != cudaSuccess) Refuse("no stream for cuBLAS");
    if (Taken(cudaMalloc(reinterpret_cast<void**>(&memory), operand_bytes + workspace_bytes)) != cudaSuccess) {
      Refuse("no memory to prepare a matmul: " + std::to_string(operand_bytes + workspace_bytes) + " bytes");
    }
    shape.rows = shape.weights = shape.out = memory;  // the values do not matter
    for (const int count : sms) QueueMatmul(ordinal, stream, shape, count, memory + operand_bytes, workspace_bytes);
    if (Taken(cudaStreamSynchronize(stream)) != cudaSuccess) Refuse("a first matmul of cuBLAS failed");
  } catch (const MemoryError& e) {
    why = e.message;
  }
  if (memory) Taken(cudaFree(memory));
  if (stream) Taken(cudaStreamDestroy(stream));
  CudaDevices().Select(before);
  if (!why.empty()) throw MemoryError{false, why};
}

void QueueMatmul(int ordinal, cudaStream_t stream, const Matmul& matmul, int sms, void* workspace,
                 uint64_t workspace_bytes) {
  Handle& of_gpu = Of(ordinal);
  std::lock_guard<std::mutex> lock(of_gpu.mutex);
  void* const handle = of_gpu.blas;
  const float one = 1.0f, zero = 0.0f;
  const int type = matmul.dtype == xla::ffi::DataType::BF16 ? kBfloat16 : kFloat16;
  Check(api.set_stream(handle, stream), "cublasSetStream");
  const auto given = reinterpret_cast<uintptr_t>(workspace);  // XLA aligns to 128 bytes, cuBLAS wants 256
  const uintptr_t aligned = (given + 255) / 256 * 256;
  Check(api.set_workspace(handle, reinterpret_cast<void*>(aligned), workspace_bytes - (aligned - given)),
        "cublasSetWorkspace");  // setting the stream resets it
  Check(api.set_sm_count_target(handle, sms), "cublasSetSmCountTarget");
  // cuBLAS counts by columns: the transposed result is the transposed weights times the transposed rows.
  Check(api.gemm(handle, kNotTransposed, kNotTransposed, matmul.n, matmul.m, matmul.k, &one, matmul.weights, type,
                 matmul.n, matmul.rows, type, matmul.k, &zero, matmul.out, type, matmul.n, kComputeFloat32,
                 kDefaultAlgorithm),
        "cublasGemmEx");
}

}  // namespace xen_moe
