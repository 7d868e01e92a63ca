// Finds the causes that make a copy to a GPU wait while a kernel runs there that only ends after a copy. One GPU.
//   copies [MOST_SECONDS]
// Copies by another process, by size; then by a thread of the same process, while another thread calls the driver.
// Figures: `git show faf28f2:benchmarks/results/h200x2_nccl_nodes.json`. copier.h has the consequences.
#include <cuda_runtime.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <stdexcept>
#include <thread>
#include <vector>

#include "tests/native/processes/copier.h"

namespace {

using rma::Channel;
using rma::Check;

double Now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

__global__ void Spin(const volatile uint64_t* flag, uint64_t limit_ns) {
  uint64_t start, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
  do {
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  } while (*flag == 0 && now - start < limit_ns);
}

constexpr size_t kBytes = 64 << 20, kAt = 1 << 20;  // of the memory; where the copies go, the flag being at its start

char* Shareable() {
  const rma::Driver& d = *rma::Driver::Get();
  const rma::AllocationProperties properties{1, rma::kFileDescriptor, {1, 0}, nullptr, {}};
  const rma::Access access = rma::ReadWrite(0);
  rma::Address at = 0;
  rma::Handle handle = 0;
  Check(d.MemAddressReserve(&at, kBytes, 0, 0, 0), "reserve");
  Check(d.MemCreate(&handle, kBytes, &properties, 0), "create");
  Check(d.MemMap(at, kBytes, 0, handle, 0), "map");
  Check(d.MemSetAccess(at, kBytes, &access, 1), "access");
  return reinterpret_cast<char*>(at);
}

double Median(std::vector<double> seconds) {
  std::sort(seconds.begin(), seconds.end());
  return seconds[seconds.size() / 2];
}

void ByAnotherProcess(char* memory, cudaStream_t stream, uint64_t limit_ns, int blocks) {
  const auto copier = rma::Copier::Get();
  const uint64_t there = copier->Map(memory, kBytes);
  Channel* const channel = copier->Open();
  Check(cudaMemset(memory, 0, 8), "cudaMemset");
  Check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  Spin<<<blocks, 256, 0, stream>>>(reinterpret_cast<uint64_t*>(memory), limit_ns);
  usleep(100000);
  for (const auto& [name, what] : {std::pair("write", Channel::kWrite), std::pair("read", Channel::kRead)}) {
    for (const size_t bytes : {8, 512, 4096, 16384, 32768, 65536, 262144}) {
      std::vector<double> took;
      for (int i = 0; i < 20; ++i) {
        const double start = Now();
        copier->Run(channel, what, there, kAt, bytes);
        took.push_back(Now() - start);
      }
      std::printf("another process, %4d blocks spin: %-5s %6zu bytes %9.1f us\n", blocks, name, bytes,
                  1e6 * Median(took));
    }
  }
  copier->Run(channel, Channel::kAdd, there, 0, 8, 1);
  Check(cudaStreamSynchronize(stream), "the kernel");
  copier->Unmap(there);
}

void ByAnotherThread(const char* name, char* memory, cudaStream_t stream, uint64_t limit_ns, bool graph,
                     const std::function<void()>& meanwhile) {
  uint64_t* const flag = reinterpret_cast<uint64_t*>(memory);
  cudaGraph_t captured;
  cudaGraphExec_t exec;
  Check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
  Spin<<<132, 256, 0, stream>>>(flag, limit_ns);
  Check(cudaStreamEndCapture(stream, &captured), "capture");
  Check(cudaGraphInstantiate(&exec, captured, 0), "cudaGraphInstantiate");
  cudaStream_t copies;
  uint64_t* host;
  Check(cudaStreamCreateWithFlags(&copies, cudaStreamNonBlocking), "cudaStreamCreate");
  Check(cudaMallocHost(&host, 8192), "cudaMallocHost");
  host[0] = 1;
  Check(cudaMemset(memory, 0, 8), "cudaMemset");
  Check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  double took = 0;
  std::thread copying([&] {
    usleep(100000);
    const double start = Now();
    Check(cudaMemcpyAsync(memory + kAt, host, 4096, cudaMemcpyHostToDevice, copies), "cudaMemcpyAsync");
    took = Now() - start;
    Check(cudaMemcpyAsync(flag, host, 8, cudaMemcpyHostToDevice, copies), "cudaMemcpyAsync");
    Check(cudaStreamSynchronize(copies), "the copies");
  });
  if (graph) Check(cudaGraphLaunch(exec, stream), "cudaGraphLaunch");
  if (!graph) Spin<<<132, 256, 0, stream>>>(flag, limit_ns);
  usleep(50000);
  meanwhile();
  copying.join();
  Check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  std::printf("another thread, %-40s: the call took %.6f s\n", name, took);
}

}  // namespace

int main(int argc, char** argv) {
  const uint64_t limit_ns = static_cast<uint64_t>(1e9 * (argc > 1 ? std::atof(argv[1]) : 1.5));
  try {
    Check(cudaSetDevice(0), "cudaSetDevice");
    Check(cudaFree(nullptr), "cudaFree");
    cudaStream_t stream;
    Check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
    char* const memory = Shareable();
    for (int blocks : {1, 1056}) ByAnotherProcess(memory, stream, limit_ns, blocks);
    void* victim;
    Check(cudaMalloc(&victim, 4 << 20), "cudaMalloc");
    ByAnotherThread("a plain launch", memory, stream, limit_ns, false, [] {});
    ByAnotherThread("a CUDA graph", memory, stream, limit_ns, true, [] {});
    ByAnotherThread("a CUDA graph, and a third in cudaFree", memory, stream, limit_ns, true, [&] { cudaFree(victim); });
  } catch (const std::exception& e) {
    std::printf("%s\n", e.what());
    return 1;
  }
  return 0;
}
