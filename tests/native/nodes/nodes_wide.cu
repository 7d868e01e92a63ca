// nodes.cu with the kernels for more than kNarrowRanks ranks.
#include "cuda_kernels/wide_rank_mask.cuh"

// Behind it:
#include "tests/native/nodes/nodes.cu"
