// peer_low_latency.cu for groups of more than kNarrowRanks ranks (rank_mask.cuh).
#include "wide_rank_mask.cuh"

// Behind it:
#include "peer_low_latency.cu"
