// The part of NCCL's C interface that symmetric memory needs, found in a library that is opened at run time. It is
// declared here and not included, so that a build needs nothing of NCCL and this module is tied to no version of its
// headers. NCCL keeps these signatures within major version 2, and its structures only grow at the end.
#pragma once

#include <climits>
#include <cstddef>
#include <cstdint>
#include <string>

namespace xen_moe {

constexpr int kNcclUniqueIdBytes = 128;
struct NcclUniqueId {
  char bytes[kNcclUniqueIdBytes];
};
struct NcclComm;    // ncclComm_t points to one
struct NcclWindow;  // ncclWindow_t

// Two values of ncclResult_t; all others are failures.
constexpr int kNcclSuccess = 0, kNcclInProgress = 7;
// Loads and stores between the ranks that share NVLink (NCCL_WIN_COLL_SYMMETRIC).
constexpr int kNcclWindowSymmetric = 1;

constexpr int kNcclUnset = INT_MIN;
// ncclConfig_t as of 2.31. NCCL uses its default for every field that is kNcclUnset.
struct NcclConfig {
  size_t size = sizeof(NcclConfig);
  unsigned magic = 0xcafebeef;
  unsigned version = 23100;
  int blocking = 0;  // NCCL's calls return at once; this library waits for them, with a limit
  int cluster_size = kNcclUnset, min_blocks = kNcclUnset, max_blocks = kNcclUnset;
  const char* net_name = nullptr;
  int split_share = kNcclUnset, traffic_class = kNcclUnset;
  const char* comm_name = nullptr;
  int others[14] = {kNcclUnset, kNcclUnset, kNcclUnset, kNcclUnset, kNcclUnset, kNcclUnset, kNcclUnset,
                    kNcclUnset, kNcclUnset, kNcclUnset, kNcclUnset, kNcclUnset, kNcclUnset, kNcclUnset};
  int nvls_mode = INT_MAX;  // no multicast over NVLink
};
static_assert(offsetof(NcclConfig, blocking) == 16 && offsetof(NcclConfig, net_name) == 32 &&
                  offsetof(NcclConfig, comm_name) == 48 && offsetof(NcclConfig, nvls_mode) == 112 &&
                  sizeof(NcclConfig) == 120,
              "ncclConfig_t has another layout");

struct NcclApi {
  int (*GetVersion)(int* version);
  int (*GetUniqueId)(NcclUniqueId* id);
  int (*CommInitRankConfig)(NcclComm** comm, int ranks, NcclUniqueId id, int rank, NcclConfig* config);
  int (*CommGetAsyncError)(NcclComm* comm, int* state);
  int (*CommAbort)(NcclComm* comm);
  int (*MemAlloc)(void** memory, size_t bytes);
  int (*MemFree)(void* memory);
  int (*CommWindowRegister)(NcclComm* comm, void* memory, size_t bytes, NcclWindow** window, int flags);
  int (*CommWindowDeregister)(NcclComm* comm, NcclWindow* window);
  int (*GetPeerDevicePointer)(NcclWindow* window, size_t offset, int rank, void** pointer);
  // These two write as many bytes as the headers say with which `requirements` and `properties` were made.
  int (*DevCommCreate)(NcclComm* comm, const void* requirements, void* device_comm);
  int (*CommQueryProperties)(NcclComm* comm, void* properties);
  const char* (*GetErrorString)(int result);
  const char* (*GetLastError)(NcclComm* comm);

  // Throws MemoryError when the file is no library, or lacks one of these functions. The library stays open.
  static NcclApi Open(const std::string& path);
};

}  // namespace xen_moe
