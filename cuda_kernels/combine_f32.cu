// Combine of f32 rows: its own translation unit, so that the three compile side by side.
#include "combine.cuh"

namespace xen_moe {

int LaunchCombineF32(const CombineParams& p, cudaStream_t stream) { return LaunchCombineOf<float>(p, stream); }
int PreloadCombineF32() { return PreloadCombineOf<float>(); }

}  // namespace xen_moe
