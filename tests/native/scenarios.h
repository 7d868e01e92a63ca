// Scenarios of a group, one function each. A scenario throws its error; else it returns a line about its findings.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace native {

struct Options {
  int ranks = 4, gpus = 1;
  int64_t calls = 20000;
  uint32_t seed = 1;
  double patience = 1;  // time-outs and limits are so much longer: for a slow machine
};

struct Scenario {
  const char* name;
  std::string (*run)(const Options&);
  double limit_s;  // for the watchdog, with 20,000 calls
};

const std::vector<Scenario>& Scenarios();

// Blocks that count all slots: alone.cu.
std::string Alone(const Options& options);
std::string Numbers(const Options& options);
// What launches return: alone.cu.
std::string Errors(const Options& options);
// Combines by home and moved weights: balance.cu.
std::string Balance(const Options& options);
// Inactive ranks: members.cu.
std::string Members(const Options& options);
std::string Leaver(const Options& options);
std::string Unmet(const Options& options);
// Groups of more ranks than a word has bits for, with few and small operations: wide.cu.
std::string Wide(const Options& options);
// And with many tokens for their rings: rings.cu.
std::string Rings(const Options& options);

}  // namespace native
