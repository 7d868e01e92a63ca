// Dispatch of float rows that travel as fp8 or int8 and arrive in their own dtype.
#include "quantized_launch.cuh"

namespace xen_moe {

int LaunchQuantizedDispatch(const DispatchParams& p, cudaStream_t stream) {
  return p.wire == WireType::kFp8 ? LaunchWire<WireType::kFp8>(p, stream) : LaunchWire<WireType::kInt8>(p, stream);
}

int PreloadQuantizedDispatch() {
  if (int e = PreloadWire<WireType::kFp8>()) return e;
  return PreloadWire<WireType::kInt8>();
}

}  // namespace xen_moe
