// Combine of f16 rows: its own translation unit, so that the three compile side by side.
#include "combine.cuh"

namespace xen_moe {

int LaunchCombineF16(const CombineParams& p, cudaStream_t stream) { return LaunchCombineOf<__half>(p, stream); }
int PreloadCombineF16() { return PreloadCombineOf<__half>(); }

}  // namespace xen_moe
