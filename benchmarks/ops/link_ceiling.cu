// Measures how fast rows can leave a GPU over NVLink: the bound for dispatch and combine.
//
// Every GPU reads each of its token rows once and stores it once to every distinct GPU that holds one of the token's
// random experts, its own excepted: the bytes of a deduplicated dispatch with none of its bookkeeping (no layout, no
// flags, no placing). 16-byte loads and stores. A large batch has one warp per row; a small one has a warp per piece of
// a row, spread over all SMs, so that the floor is that of the link and not of the SMs that happen to hold the rows.
// All GPUs push at the same time; times are of the slowest GPU. Every received row is checked against the row that was
// sent.
//
//   nvcc -O3 -std=c++17 -arch=native link_ceiling.cu -o link_ceiling && ./link_ceiling out.json

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <vector>

#include "native_benchmark.cuh"

constexpr int kMaxGpus = 16;
constexpr int kExperts = 256;
constexpr int kTopK = 8;
constexpr int kThreads = 512;
constexpr int kUnroll = 7;  // 16-byte loads in flight per thread

struct Destinations {
  char* base[kMaxGpus];
};

// first[t]..first[t+1]: destinations of token t; gpu and slot: where its row goes.
__global__ void Push(const char* rows, int row_bytes, const int* first, const int* gpu, const int* slot, int tokens,
                     int pieces, Destinations to) {
  int warps = gridDim.x * (blockDim.x / 32), lane = threadIdx.x % 32, words = row_bytes / 16;
  int piece_words = (words + pieces - 1) / pieces;
  for (int item = blockIdx.x + threadIdx.x / 32 * gridDim.x; item < tokens * pieces; item += warps) {
    int t = item / pieces, begin = item % pieces * piece_words, end = min(words, begin + piece_words);
    const int4* row = reinterpret_cast<const int4*>(rows + static_cast<size_t>(t) * row_bytes);
    for (int start = begin; start < end; start += 32 * kUnroll) {
      int4 part[kUnroll];
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        int word = start + i * 32 + lane;
        if (word < end) part[i] = __ldcs(row + word);
      }
      for (int j = first[t]; j < first[t + 1]; ++j) {
        int4* out = reinterpret_cast<int4*>(to.base[gpu[j]] + static_cast<size_t>(slot[j]) * row_bytes);
#pragma unroll
        for (int i = 0; i < kUnroll; ++i) {
          int word = start + i * 32 + lane;
          if (word < end) out[word] = part[i];
        }
      }
    }
  }
}

__host__ __device__ uint32_t Content(uint32_t source, uint32_t token, uint32_t word) {
  uint32_t x = source * 0x9E3779B9u + token * 0x85EBCA6Bu + word * 0xC2B2AE35u;
  x ^= x >> 15;
  return x * 0x2C1B3C6Du;
}

__global__ void Fill(uint32_t* rows, uint32_t source, int tokens, int words) {
  for (size_t i = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x; i < static_cast<size_t>(tokens) * words;
       i += static_cast<size_t>(gridDim.x) * blockDim.x)
    rows[i] = Content(source, i / words, i % words);
}

// origin[slot]: source * tokens + token, or -1 where nothing is expected.
__global__ void Verify(const uint32_t* rows, const int* origin, int slots, int tokens, int words, unsigned* wrong) {
  for (size_t i = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x; i < static_cast<size_t>(slots) * words;
       i += static_cast<size_t>(gridDim.x) * blockDim.x) {
    int from = origin[i / words];
    if (from >= 0 && rows[i] != Content(from / tokens, from % tokens, i % words)) atomicAdd(wrong, 1u);
  }
}

template <typename T>
T* Upload(const std::vector<T>& values) {
  T* device;
  CHECK(cudaMalloc(&device, std::max<size_t>(values.size(), 1) * sizeof(T)));
  CHECK(cudaMemcpy(device, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
  return device;
}

struct Gpu {
  char *rows, *received;
  int *first, *gpu, *slot, *origin;
  int sent = 0;
  cudaStream_t stream;
  cudaEvent_t start, stop;
};

struct Routing {
  std::vector<int> first{0}, gpu, slot;
};

std::vector<Gpu> SetUp(int gpus, int tokens, int row_bytes, Destinations* to) {
  std::vector<Gpu> all(gpus);
  std::vector<Routing> routing(gpus);
  std::vector<std::vector<int>> origin(gpus, std::vector<int>(static_cast<size_t>(gpus) * tokens, -1));
  std::mt19937 random(1);
  std::vector<int> experts(kExperts);
  for (int source = 0; source < gpus; ++source) {
    std::vector<int> used(gpus, 0);
    for (int t = 0; t < tokens; ++t) {
      std::iota(experts.begin(), experts.end(), 0);
      std::vector<bool> hit(gpus, false);
      for (int k = 0; k < kTopK; ++k) {
        std::swap(experts[k], experts[k + random() % (kExperts - k)]);
        hit[static_cast<int64_t>(experts[k]) * gpus / kExperts] = true;
      }
      for (int step = 1; step < gpus; ++step) {  // own rank last, so rotated: no two sources start at one destination
        int destination = (source + step) % gpus;
        if (!hit[destination]) continue;
        int slot = source * tokens + used[destination]++;
        routing[source].gpu.push_back(destination);
        routing[source].slot.push_back(slot);
        origin[destination][slot] = source * tokens + t;
      }
      routing[source].first.push_back(static_cast<int>(routing[source].gpu.size()));
    }
  }
  for (int g = 0; g < gpus; ++g) {
    CHECK(cudaSetDevice(g));
    Gpu& self = all[g];
    self.sent = static_cast<int>(routing[g].gpu.size());
    CHECK(cudaMalloc(&self.rows, static_cast<size_t>(tokens) * row_bytes));
    CHECK(cudaMalloc(&self.received, static_cast<size_t>(gpus) * tokens * row_bytes));
    CHECK(cudaMemset(self.received, 0xFF, static_cast<size_t>(gpus) * tokens * row_bytes));
    Fill<<<256, 256>>>(reinterpret_cast<uint32_t*>(self.rows), g, tokens, row_bytes / 4);
    CHECK(cudaGetLastError());
    self.first = Upload(routing[g].first);
    self.gpu = Upload(routing[g].gpu);
    self.slot = Upload(routing[g].slot);
    self.origin = Upload(origin[g]);
    CHECK(cudaStreamCreateWithFlags(&self.stream, cudaStreamNonBlocking));
    CHECK(cudaEventCreate(&self.start));
    CHECK(cudaEventCreate(&self.stop));
    to->base[g] = self.received;
    CHECK(cudaDeviceSynchronize());
  }
  return all;
}

// Microseconds of one push on the slowest GPU, median over repeats.
double Measure(std::vector<Gpu>& all, int tokens, int row_bytes, int sms, const Destinations& to) {
  int calls = tokens >= 1024 ? 20 : 200;
  int pieces = tokens >= 1024 ? 1 : std::min(16, std::max(1, sms * (kThreads / 32) / tokens));
  std::vector<double> times;
  for (int repeat = 0; repeat < 9; ++repeat) {
    for (size_t g = 0; g < all.size(); ++g) {
      CHECK(cudaSetDevice(static_cast<int>(g)));
      CHECK(cudaDeviceSynchronize());
    }
    for (size_t g = 0; g < all.size(); ++g) {
      CHECK(cudaSetDevice(static_cast<int>(g)));
      Gpu& self = all[g];
      CHECK(cudaEventRecord(self.start, self.stream));
      for (int i = 0; i < calls; ++i)
        Push<<<sms, kThreads, 0, self.stream>>>(self.rows, row_bytes, self.first, self.gpu, self.slot, tokens, pieces,
                                                to);
      CHECK(cudaGetLastError());
      CHECK(cudaEventRecord(self.stop, self.stream));
    }
    float slowest = 0;
    for (size_t g = 0; g < all.size(); ++g) {
      CHECK(cudaSetDevice(static_cast<int>(g)));
      CHECK(cudaStreamSynchronize(all[g].stream));
      float milliseconds;
      CHECK(cudaEventElapsedTime(&milliseconds, all[g].start, all[g].stop));
      slowest = std::max(slowest, milliseconds);
    }
    if (repeat > 0) times.push_back(slowest * 1e3 / calls);  // the first warms up
  }
  std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
  return times[times.size() / 2];
}

unsigned WrongWords(std::vector<Gpu>& all, int tokens, int row_bytes) {
  unsigned total = 0;
  for (size_t g = 0; g < all.size(); ++g) {
    CHECK(cudaSetDevice(static_cast<int>(g)));
    unsigned* wrong = Upload(std::vector<unsigned>{0});
    int slots = static_cast<int>(all.size()) * tokens;
    Verify<<<256, 256>>>(reinterpret_cast<uint32_t*>(all[g].received), all[g].origin, slots, tokens, row_bytes / 4,
                         wrong);
    unsigned host;
    CHECK(cudaMemcpy(&host, wrong, sizeof host, cudaMemcpyDeviceToHost));
    CHECK(cudaFree(wrong));
    total += host;
  }
  return total;
}

void TearDown(std::vector<Gpu>& all) {
  for (size_t g = 0; g < all.size(); ++g) {
    CHECK(cudaSetDevice(static_cast<int>(g)));
    for (void* memory :
         {static_cast<void*>(all[g].rows), static_cast<void*>(all[g].received), static_cast<void*>(all[g].first),
          static_cast<void*>(all[g].gpu), static_cast<void*>(all[g].slot), static_cast<void*>(all[g].origin)})
      CHECK(cudaFree(memory));
    CHECK(cudaStreamDestroy(all[g].stream));
    CHECK(cudaEventDestroy(all[g].start));
    CHECK(cudaEventDestroy(all[g].stop));
  }
}

int main(int argc, char** argv) {
  if (argc < 2) {
    fprintf(stderr, "usage: %s OUT.json [NUM_GPUS]\n", argv[0]);
    return 2;
  }
  int gpus;
  CHECK(cudaGetDeviceCount(&gpus));
  if (argc > 2) gpus = std::min(gpus, atoi(argv[2]));
  gpus = std::min(gpus, kMaxGpus);
  for (int i = 0; i < gpus; ++i) {
    CHECK(cudaSetDevice(i));
    ReachPeers(i, gpus);
  }
  cudaDeviceProp properties;
  CHECK(cudaGetDeviceProperties(&properties, 0));
  FILE* out = fopen(argv[1], "w");
  if (!out) {
    perror(argv[1]);
    return 1;
  }
  fprintf(out, "{\n \"device\": \"%s\",\n \"gpus\": %d,\n \"experts\": %d,\n \"top_k\": %d,\n \"entries\": [",
          properties.name, gpus, kExperts, kTopK);
  // Row bytes: float8 with scales, then bfloat16, of hidden sizes 7168, 4096 and 2048.
  const int row_sizes[] = {7168 + 4 * 56, 14336, 4096 + 4 * 32, 8192, 2048 + 4 * 16, 4096};
  bool comma = false;
  unsigned wrong = 0;
  for (int row_bytes : row_sizes)
    for (int tokens : {4096, 128, 32, 1}) {
      if (tokens < 4096 && row_bytes != row_sizes[0] && row_bytes != row_sizes[1]) continue;
      Destinations to;
      std::vector<Gpu> all = SetUp(gpus, tokens, row_bytes, &to);
      int most = 0;
      for (const Gpu& gpu : all) most = std::max(most, gpu.sent);
      for (int sms : {8, 16, 32, 64, 132}) {
        double us = Measure(all, tokens, row_bytes, sms, to);
        double bytes = static_cast<double>(most) * row_bytes;
        fprintf(
            out,
            "%s\n  {\"row_bytes\": %d, \"tokens\": %d, \"sms\": %d, \"us\": %.3f, \"bytes\": %.0f, \"gb_per_s\": %.2f}",
            comma ? "," : "", row_bytes, tokens, sms, us, bytes, bytes / us / 1e3);
        comma = true;
        printf("row %5d B  tokens %4d  sms %3d: %8.2f us  %6.1f GB/s\n", row_bytes, tokens, sms, us, bytes / us / 1e3);
      }
      wrong += WrongWords(all, tokens, row_bytes);
      TearDown(all);
    }
  fprintf(out, "\n ],\n \"wrong_words\": %u\n}\n", wrong);
  fclose(out);
  printf("%d x %s, %u wrong words\n", gpus, properties.name, wrong);
  return wrong != 0;
}
