// Combine of bf16 rows: its own translation unit, so that the three compile side by side.
#include "combine.cuh"

namespace xen_moe {

int LaunchCombineBf16(const CombineParams& p, cudaStream_t stream) { return LaunchCombineOf<__nv_bfloat16>(p, stream); }
int PreloadCombineBf16() { return PreloadCombineOf<__nv_bfloat16>(); }

}  // namespace xen_moe
