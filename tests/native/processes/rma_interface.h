// The interface of NCCL (2.32 and later) for a plugin of remote memory access: a table under the name
// `ncclRmaPlugin_v14` in a library that NCCL_RMA_PLUGIN names. Declared here and not included, because NCCL's package
// has no headers for plugins.
#pragma once

#include <cstddef>
#include <cstdint>

namespace rma {

// ncclResult_t
constexpr int kSuccess = 0, kCudaError = 1, kSystemError = 2, kInternalError = 3, kInvalidArgument = 4,
              kInvalidUsage = 5;
// Kinds of memory, and a mask of them.
constexpr int kHostMemory = 1, kDeviceMemory = 2;
// Device puts go through a queue to a thread of NCCL, which calls the plugin.
constexpr int kProxied = 2;
// Effects of a signal.
constexpr uint32_t kIncrement = 1;
constexpr int kHandleBytes = 128;
constexpr int kLogWarning = 2, kLogInfo = 3;

using Log = void (*)(int level, unsigned long subsystems, const char* file, int line, const char* format, ...);

struct Properties {
  char* name;
  char* pci_path;
  uint64_t guid;
  int memory_kinds, global_registration, force_flush;
  int megabits_per_s, port;
  float latency;
  int most_communicators, most_receives;
  int device_type, device_version;
  struct {
    int count, devices[8];
  } merged;
  size_t most_bytes, most_collective_bytes;
  int most_merged_requests;
  int16_t rail, plane;
};
static_assert(offsetof(Properties, merged) == 64 && offsetof(Properties, most_bytes) == 104 &&
                  sizeof(Properties) == 128,
              "ncclNetProperties_v12_t has another layout");

struct ContextConfig {
  int contexts, traffic_class, rank_stride;
};

// "Memory" is the result of `register_memory`: all ranks register in the same order, so own memory stands for the
// peer's.
struct Plugin {
  const char* name;
  int (*init)(void** state, uint64_t communicator, Log log);
  int (*count_devices)(int* count);
  int (*properties)(int device, Properties* out);
  int (*listen)(void* state, int device, void* handle, void** listener);
  int (*connect)(void* state, void* handles[], int ranks, int rank, void* listener, void** group);
  int (*create_context)(void* group, ContextConfig* config, void** context);
  int (*register_memory)(void* group, void* base, size_t bytes, int kind, uint64_t flags, void** memory);
  int (*register_dma_buf)(void* group, void* base, size_t bytes, int kind, uint64_t offset, int fd, uint64_t flags,
                          void** memory);
  int (*unregister_memory)(void* group, void* memory);
  int (*destroy_context)(void* context);
  int (*close_group)(void* group);
  int (*close_listener)(void* listener);
  int (*put)(void* context, int number, uint64_t from, void* source, size_t bytes, uint64_t to, void* target,
             uint32_t rank, void** request);
  int (*put_signal)(void* context, int number, uint64_t from, void* source, size_t bytes, uint64_t to, void* target,
                    uint32_t rank, uint64_t signal_at, void* signals, uint64_t value, uint32_t operation, bool strong,
                    void** request);
  int (*get)(void* context, int number, uint64_t from, void* source, size_t bytes, uint64_t to, void* target,
             uint32_t rank, void** request);
  int (*flush)(void* context, int number, void* memory, uint32_t rank, void** request);
  int (*test)(void* group, void* request, int* done);
  int (*progress)(void* context);
  int (*last_error)(void* context, bool* failed);
  int (*finalize)(void* state);
};

}  // namespace rma

extern "C" __attribute__((visibility("default"))) rma::Plugin ncclRmaPlugin_v14;
