// nccl_dispatch.cu for groups of more than kNarrowRanks ranks (rank_mask.cuh).
#include "wide_rank_mask.cuh"

// Behind it:
#include "nccl_dispatch.cu"
