// The low-latency kernels for groups of more than kNarrowRanks ranks (rank_mask.cuh).
#include "wide_rank_mask.cuh"

// Behind it:
#include "low_latency_combine.cu"
#include "low_latency_dispatch.cu"
