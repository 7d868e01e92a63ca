// wide_combine.cu for rows that go through rings (rounds.cuh).
#include "rings_rank_mask.cuh"

// Behind it:
#include "wide_combine.cu"
