// Memory that the numbering of received rows needs (layout.cuh). Plain data: the host plans with it too.
#pragma once

#include "cuda_kernels/core/params.h"

namespace xen_moe {

constexpr int kLayoutSharedBytes = 40 * 1024;  // dynamic: counters while counting, starts afterwards

struct LayoutScratch {
  int* number;  // [R, T, slots]: a row's number in its segment and expert; -1: no row here
  int* prefix;  // [columns, segments]
  int* totals;  // [columns]
  int columns;  // L, or 1 in the ranked layout
  int segments_per_source;
  int segments;
};

XEN_MOE_ANYWHERE inline LayoutScratch MakeScratch(char* base, const Routing& r, const Schedule& s) {
  LayoutScratch out;
  out.columns = r.layout == Layout::kRanked ? 1 : r.local_experts;
  out.segments_per_source = (r.tokens + s.segment_tokens - 1) / s.segment_tokens;
  out.segments = r.ranks * out.segments_per_source;
  out.number = reinterpret_cast<int*>(base);
  out.prefix = out.number + static_cast<int64_t>(r.ranks) * r.tokens * r.slots;
  out.totals = out.prefix + static_cast<int64_t>(out.columns) * out.segments;
  return out;
}

}  // namespace xen_moe
