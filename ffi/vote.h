// The message of a process in an agreement (ffi/agreement.h) about a change of symmetric memory.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cuda_kernels/core/workspace.h"

namespace xen_moe {

struct Vote {
  std::string error;              // why this process cannot go on; empty: it can
  Needs needs;                    // bytes that this process asks for
  bool undivided = false;         // nothing can have run in its newest generation
  bool has_room = false;          // its ring of memory tables takes another generation
  uint32_t epoch = 0;             // the number of its latest operation
  std::vector<uint64_t> retired;  // tickets of the generations that it no longer uses

  bool ok() const { return error.empty(); }
  std::string Encode() const;
  // Text that Encode did not make decodes to an error: nothing, which a process that has died has sent, or the vote of
  // another version of this library.
  static Vote Decode(const std::string& text);
};

}  // namespace xen_moe
