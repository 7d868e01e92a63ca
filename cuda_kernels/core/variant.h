// The variant of the kernels that a translation unit belongs to. The build chooses it (cuda_kernels/variants.txt):
//
//   XEN_MOE_MAX_RANKS   16 (the default) or 256: the most ranks of a group
//   XEN_MOE_RINGS        defined: staged rows lie in rings (rounds.cuh). With 256 ranks alone
//
// Each variant has a namespace of its own in xen_moe: ranks16, ranks256 or ranks256_ring.
#pragma once

#include "cuda_kernels/core/workspace.h"

#ifndef XEN_MOE_MAX_RANKS
#define XEN_MOE_MAX_RANKS 16
#endif

#if XEN_MOE_MAX_RANKS == 16 && !defined(XEN_MOE_RINGS)
#define XEN_MOE_VARIANT ranks16
#elif XEN_MOE_MAX_RANKS == 256 && !defined(XEN_MOE_RINGS)
#define XEN_MOE_VARIANT ranks256
#elif XEN_MOE_MAX_RANKS == 256
#define XEN_MOE_VARIANT ranks256_ring
#else
#error "XEN_MOE_MAX_RANKS is 16 or 256, and 256 with XEN_MOE_RINGS"
#endif

namespace xen_moe::XEN_MOE_VARIANT {

constexpr int kRanks = XEN_MOE_MAX_RANKS;            // the most ranks that these kernels take
constexpr bool kLargeGroups = kRanks > kSmallGroup;  // a set of ranks is several words
#ifdef XEN_MOE_RINGS
constexpr bool kRings = true;
#else
constexpr bool kRings = false;
#endif

static_assert(kRanks == kSmallGroup || kRanks == kMaxRanks, "workspace.h and variant.h agree");

}  // namespace xen_moe::XEN_MOE_VARIANT
