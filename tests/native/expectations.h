// Parts of the scenarios: problems for all ranks, and checks of the results.
#pragma once

#include <chrono>
#include <cstdarg>
#include <cstdio>
#include <set>
#include <stdexcept>
#include <thread>

#include "tests/native/scenarios.h"
#include "tests/native/world.h"

namespace native {

using namespace xen_moe;

inline std::string Text(const char* format, ...) {
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof(text), format, arguments);
  va_end(arguments);
  return text;
}
inline void Expect(bool holds, const std::string& what) {
  if (!holds) throw std::runtime_error(what);
}
inline double Now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

inline Needs Largest(const std::vector<std::vector<Prepared*>>& pool) {
  Needs most;
  for (const auto& ranks : pool) {
    const Needs& n = ranks[0]->needs();
    most.flag_bytes = std::max(most.flag_bytes, n.flag_bytes);
    most.data_bytes = std::max(most.data_bytes, n.data_bytes);
    most.scratch_bytes = std::max(most.scratch_bytes, n.scratch_bytes);
  }
  return most;
}

// The timeout of operations that a rank stays away from. It must be longer than what lies between the first and the
// last of the other ranks to begin: on the emulator they are threads that share a few cores, each as many as its blocks
// have.
inline double LateSeconds(const Options& o) { return 0.5 * std::max(1.0, o.ranks / 18.0); }

// At most this many blocks per rank, so that all ranks of a GPU are resident together.
inline int MostBlocks(const Options& o) { return std::max(1, 48 / ((o.ranks + o.gpus - 1) / o.gpus)); }

inline std::vector<std::vector<Prepared*>> Pool(World& world, const Options& o, int count, double timeout_s) {
  std::mt19937 rng(o.seed);
  std::vector<std::vector<Prepared*>> pool;
  for (int i = 0; i < count; ++i) {
    Problem p = RandomProblem(rng, world.ranks(), std::min(16, MostBlocks(o)));
    if (i < 12) {  // every operation in every layout at least once
      p.operation = static_cast<Operation>(i % 4);
      if (p.operation != Operation::kExchange) {
        do {
          p = RandomProblem(rng, world.ranks(), std::min(16, MostBlocks(o)));
        } while (p.operation != static_cast<Operation>(i % 4) || p.layout != static_cast<Layout>(i / 4));
      } else {
        do {
          p = RandomProblem(rng, world.ranks(), std::min(16, MostBlocks(o)));
        } while (p.operation != Operation::kExchange || p.ragged != (i / 4 % 2 == 0));
      }
    }
    pool.push_back(world.AddAll(p, timeout_s * o.patience));
  }
  return pool;
}

inline std::string Name(const Problem& p) {
  static const char* const operations[] = {"dispatch", "redispatch", "combine", "exchange"};
  return Text(
      "%s layout %d element %d T %d K %d E %d H %d C %d align %d blocks %d push %d slices %d parts %d solo %d low %d "
      "bulk %d home %d "
      "lanes %d ragged %d gather %d round %d wire %d ue8m0 %d seed %u",
      operations[static_cast<int>(p.operation)], static_cast<int>(p.layout), static_cast<int>(p.element), p.tokens,
      p.top_k, p.experts, p.hidden, p.capacity, p.alignment, p.blocks, p.push_blocks, p.slices, p.parts, p.solo,
      p.low_latency, p.bulk, p.by_home, p.lanes, p.ragged, p.gather, p.round, static_cast<int>(p.wire), p.ue8m0,
      p.seed);
}

inline std::string FailureText(uint64_t word) {
  const Failure f = UnpackFailure(word);
  return Text("cause %d operation %d step %d rank %d other %d epoch %u", static_cast<int>(f.cause),
              static_cast<int>(f.operation), static_cast<int>(f.step), f.rank, f.other, f.epoch);
}
inline void ExpectNoFailure(World& world) {
  for (int r = 0; r < world.ranks(); ++r) {
    const uint64_t failure = world.FailureOf(r);
    if (failure != 0) Expect(false, Text("rank %d failed: ", r) + FailureText(failure) + world.Picture());
  }
}
// All ranks that ran anything hold the same failure.
inline Failure ExpectFailure(const World& world, Cause cause) {
  uint64_t word = 0;
  for (int r = 0; r < world.ranks(); ++r) {
    const uint64_t seen = world.FailureOf(r);
    Expect(seen != 0, Text("rank %d does not know of the failure", r));
    Expect(word == 0 || seen == word,
           "ranks name different failures: " + FailureText(word) + " and " + FailureText(seen));
    word = seen;
  }
  Expect(UnpackFailure(word).cause == cause, "another cause: " + FailureText(word));
  return UnpackFailure(word);
}
inline void ExpectRight(World& world, const std::string& what) {
  const uint64_t wrong = world.Wrong();
  Expect(wrong == 0, Text("%llu wrong vectors: ", static_cast<unsigned long long>(wrong)) + what);
  world.ClearWrong();
}
inline void ExpectSuccess(World& world, const std::string& what) {
  ExpectNoFailure(world);
  ExpectRight(world, what);
}

// The ranks that `rank` waits for, as it shows them.
inline uint64_t Shown(const RankState& rank) {
  uint64_t word = 0;
  NATIVE_CHECK(cudaSetDevice(rank.device));
  NATIVE_CHECK(cudaMemcpyAsync(&word, &rank.mailbox->progress, sizeof(word), cudaMemcpyDeviceToHost, rank.side));
  NATIVE_CHECK(cudaStreamSynchronize(rank.side));
  return word;
}

// While rank `absent` stays away from an operation that gives up after `timeout_s`, and when all others have long
// begun: a rank that shows that it waits for `absent` in `step` shows nothing else. How often that was seen. Not for
// many ranks on one GPU, where a copy could have to wait behind the operation of another rank.
inline int ExpectToShow(World& world, int absent, Step step, double timeout_s, const std::string& what) {
  const double from = Now();
  std::this_thread::sleep_for(std::chrono::duration<double>(0.7 * timeout_s));
  std::vector<int> samples(world.ranks());
  std::vector<std::set<uint64_t>> others(world.ranks());  // a word that was shown earlier stands; a wait shows new ones
  for (int r = 0; Now() - from < 0.95 * timeout_s; r = (r + 1) % world.ranks()) {
    const uint64_t word = r == absent ? 0 : Shown(world.states[r]);
    if (!ProgressWaits(word)) continue;
    if (ProgressRank(word) == absent && ProgressStep(word) == step) {
      ++samples[r];
    } else {
      others[r].insert(word);
    }
  }
  int all = 0;
  for (int r = 0; r < world.ranks(); ++r) {
    all += samples[r];
    if (samples[r] == 0 || others[r].size() < 3) continue;
    const uint64_t word = *others[r].begin();
    Expect(false, Text("rank %d shows that it waits for %d in step %d, not for %d in step %d: ", r, ProgressRank(word),
                       static_cast<int>(ProgressStep(word)), absent, static_cast<int>(step)) +
                      what);
  }
  Expect(all > 0, Text("no rank shows that it waits for %d in step %d: ", absent, static_cast<int>(step)) + what);
  return all;
}

// `calls` operations out of the pool on every rank, with random pauses; never far ahead of the GPU, so that one rank's
// full queue cannot hold up another's launch.
// Ranks of the bit mask `absent` call nothing.
inline void RunRandom(World& world, const std::vector<std::vector<Prepared*>>& pool, const Options& o, int64_t calls,
                      bool pauses, uint32_t absent = 0) {
  world.Each([&](int rank) {
    if (rank < 32 && absent >> rank & 1) return;
    std::mt19937 same(o.seed + 7), own(o.seed * 31 + rank);
    const cudaStream_t stream = world.states[rank].stream[0];
    for (int64_t i = 0; i < calls; ++i) {
      if (pauses && own() % 256 == 0) Sleep(stream, 1 + own() % 300);
      pool[same() % pool.size()][rank]->LaunchAndVerify(stream);
      if (i % 64 == 63) NATIVE_CHECK(cudaStreamSynchronize(stream));
    }
    NATIVE_CHECK(cudaStreamSynchronize(stream));
  });
}

}  // namespace native
