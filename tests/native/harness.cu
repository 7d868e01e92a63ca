// Runs the kernels with several ranks in one process, without JAX: right calls and failures.
//   harness --ranks R --gpus N --scenario NAME|all --calls N --seed S --patience F --json FILE
// One line per scenario. Exit status 0: all passed; 1: some failed; 3: one did not end (the watchdog ended the
// process).
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>
#include <thread>

#include "tests/native/scenarios.h"
#include "tests/native/world.h"

namespace {

std::string json;  // entries so far
std::mutex mutex;

void WriteJson(const char* path, const native::Options& o) {
  if (!path) return;
  std::FILE* file = std::fopen(path, "w");
  if (!file) return;
  std::fprintf(file, "{\"ranks\": %d, \"gpus\": %d, \"calls\": %lld, \"seed\": %u, \"scenarios\": [%s]}\n", o.ranks,
               o.gpus, static_cast<long long>(o.calls), o.seed, json.c_str());
  std::fclose(file);
}
void Report(const char* name, const char* verdict, double seconds, std::string text) {
  for (char& c : text) c = c == '"' || c == '\\' || c == '\n' ? ' ' : c;
  std::printf("%-12s %-6s %7.2f s  %s\n", name, verdict, seconds, text.c_str());
  std::fflush(stdout);
  char entry[1024];
  std::snprintf(entry, sizeof(entry), "%s{\"name\": \"%s\", \"verdict\": \"%s\", \"seconds\": %.3f, \"text\": \"%s\"}",
                json.empty() ? "" : ", ", name, verdict, seconds, text.c_str());
  json += entry;
}

int Fail(const char* what) {
  std::fprintf(stderr, "harness: %s\n", what);
  return 2;
}

}  // namespace

int main(int argc, char** argv) {
  // Streams of ranks that share a GPU must not wait for each other in one hardware queue; kernels are loaded before any
  // of them spins.
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
  setenv("CUDA_MODULE_LOADING", "EAGER", 1);
  native::Options options;
  std::string wanted = "all";
  const char* path = nullptr;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string name = argv[i];
    const char* value = argv[i + 1];
    if (name == "--ranks") {
      options.ranks = std::atoi(value);
    } else if (name == "--gpus") {
      options.gpus = std::atoi(value);
    } else if (name == "--scenario") {
      wanted = value;
    } else if (name == "--calls") {
      options.calls = std::atoll(value);
    } else if (name == "--seed") {
      options.seed = static_cast<uint32_t>(std::atoll(value));
    } else if (name == "--patience") {
      options.patience = std::atof(value);
    } else if (name == "--json") {
      path = value;
    } else {
      return Fail(("unknown option " + name).c_str());
    }
  }
  if (argc % 2 == 0)
    return Fail(
        "options come as pairs: --ranks R --gpus N --scenario NAME --calls N --seed S --patience F --json FILE");
  int gpus = 0;
  if (cudaGetDeviceCount(&gpus) != cudaSuccess || gpus == 0) return Fail("no GPU");
  if (options.gpus < 1 || options.gpus > gpus)
    return Fail(("--gpus: this machine has " + std::to_string(gpus)).c_str());
  if (options.ranks < 2 || options.ranks > xen_moe::kMaxRanks) return Fail("--ranks: 2 to 256");

  bool passed = true, found = false;
  for (const native::Scenario& scenario : native::Scenarios()) {
    if (wanted != "all" && wanted != scenario.name) continue;
    found = true;
    const bool of_many = scenario.run == native::Wide || scenario.run == native::Rings;
    if (options.ranks > xen_moe::kSmallGroup && !of_many) {
      if (wanted != "all") return Fail("more than 16 ranks: --scenario wide or rings");
      continue;
    }
    if (options.ranks <= xen_moe::kSmallGroup && scenario.run == native::Rings) {
      if (wanted != "all") return Fail("--scenario rings: more than 16 ranks");
      continue;
    }
    const auto start = std::chrono::steady_clock::now();
    auto seconds = [&] { return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(); };
    std::atomic<bool> done{false};
    const double limit = (scenario.limit_s + 60e-6 * static_cast<double>(options.calls)) * options.patience;
    std::thread watchdog([&] {
      while (!done && seconds() < limit) std::this_thread::sleep_for(std::chrono::milliseconds(50));
      if (done) return;
      std::lock_guard<std::mutex> lock(mutex);
      Report(scenario.name, "HUNG", seconds(), "did not end; the process ends here");
      WriteJson(path, options);
      std::_Exit(3);
    });
    std::string text;
    bool good = true;
    try {
      text = scenario.run(options);
    } catch (const std::exception& e) {
      good = false;
      text = e.what();
    }
    done = true;
    watchdog.join();
    std::lock_guard<std::mutex> lock(mutex);
    Report(scenario.name, good ? "passed" : "FAILED", seconds(), text);
    WriteJson(path, options);
    passed &= good;
    if (cudaGetLastError() != cudaSuccess || cudaDeviceSynchronize() != cudaSuccess) {
      std::printf("the CUDA context is lost; the scenarios after %s did not run\n", scenario.name);
      return 1;
    }
  }
  if (!found) return Fail(("unknown scenario " + wanted).c_str());
  return passed ? 0 : 1;
}
