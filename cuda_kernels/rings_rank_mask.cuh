// wide_rank_mask.cuh for kernels whose rows go through rings (rounds.cuh): the first include of a translation unit that
// has them.
#pragma once

#define XEN_MOE_RINGS
#include "wide_rank_mask.cuh"
