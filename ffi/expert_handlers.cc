// The handler of grouped matmuls with quantized weights: it checks buffers and launches the kernel.
#include <algorithm>
#include <string>

#include "cuda_kernels/core/cuda_error.h"
#include "cuda_kernels/experts/quantized_rows.h"
#include "ffi/handlers.h"
#include "ffi/operation.h"

namespace xen_moe {
namespace {

ffi::Error Wrong(const std::string& what, int64_t number, const std::string& allowed) {
  return ffi::Error::InvalidArgument("xen_moe_jax: quantized rows: " + what + " is " + std::to_string(number) +
                                     ": must be " + allowed);
}

// Returns false where no format of weights has values of this dtype.
bool FormatOf(ffi::DataType values, WeightFormat* format) {
  switch (values) {
    case ffi::F8E4M3FN:
      *format = WeightFormat::kE4m3;
      return true;
    case ffi::F8E5M2:
      *format = WeightFormat::kE5m2;
      return true;
    case ffi::S8:
      *format = WeightFormat::kInt8;
      return true;
    case ffi::U8:
      *format = WeightFormat::kMxfp4;
      return true;
    default:
      return false;
  }
}

// Fills in the format and the sizes of `p` from the rows and the first values of a call. Returns success, or an error
// that names the size that the kernel does not take.
ffi::Error Decode(const ffi::AnyBuffer& rows, const ffi::AnyBuffer& values, int64_t block_rows, int64_t block_columns,
                  QuantizedRowsParams* p) {
  if (rows.dimensions().size() != 2) return Wrong("the rank of rows", rows.dimensions().size(), "2");
  if (values.dimensions().size() != 3) return Wrong("the rank of values", values.dimensions().size(), "3");
  if (!FormatOf(values.element_type(), &p->format)) {
    return Wrong("the dtype of values", static_cast<int64_t>(values.element_type()), "fp8, int8 or uint8");
  }
  const int64_t capacity = rows.dimensions()[0], depth = rows.dimensions()[1];
  const int64_t groups = values.dimensions()[0], columns = values.dimensions()[2];
  const bool fp4 = p->format == WeightFormat::kMxfp4;
  if (groups > kMaxWeightGroups) return Wrong("the number of groups", groups, "512 or less");
  if (depth % (fp4 ? 32 : 8)) return Wrong("the contracted dimension", depth, fp4 ? "a multiple of 32" : "one of 8");
  if (columns % 16) return Wrong("the number of columns", columns, "a multiple of 16");
  if (block_columns < 1) return Wrong("the width of a block", block_columns, "positive");
  if (block_rows < 1 || (fp4 ? block_rows != 32 || block_columns != 1 : block_rows % 64 && block_rows < depth)) {
    return Wrong("the height of a block", block_rows, fp4 ? "32" : "a multiple of 64, or the contracted dimension");
  }
  p->capacity = static_cast<int>(capacity), p->depth = static_cast<int>(depth);
  p->groups = static_cast<int>(groups), p->columns = static_cast<int>(columns);
  p->block_rows = static_cast<int>(std::min(block_rows, depth));
  p->block_columns = static_cast<int>(std::min(block_columns, columns));
  p->scale_rows = static_cast<int>((depth + block_rows - 1) / block_rows);
  p->scale_columns = static_cast<int>((columns + block_columns - 1) / block_columns);
  return ffi::Error::Success();
}

// rows bf16 [C, A], group_sizes int32 [L], then values and scales of each matrix -> bf16 [C, B] for each matrix.
ffi::Error QuantizedRows(cudaStream_t stream, int64_t block_rows, int64_t block_columns, int64_t claimed,
                         ffi::RemainingArgs args, ffi::RemainingRets results) {
  const size_t matrices = results.size();
  if (matrices < 1 || matrices > kMaxWeightMatrices || args.size() != 2 + 2 * matrices) {
    return Wrong("the number of operands", args.size(), "2 and 2 for each of one or two results");
  }
  const ffi::AnyBuffer rows = *args.get<ffi::AnyBuffer>(0), sizes = *args.get<ffi::AnyBuffer>(1);
  const ffi::AnyBuffer first = *args.get<ffi::AnyBuffer>(2);
  QuantizedRowsParams p{};
  if (ffi::Error error = Decode(rows, first, block_rows, block_columns, &p); !error.success()) return error;
  p.claimed = claimed != 0;
  const bool fp4 = p.format == WeightFormat::kMxfp4;
  std::vector<Expected> expected = {{"rows", rows, ffi::BF16, {p.capacity, p.depth}},
                                    {"group_sizes", sizes, ffi::S32, {p.groups}}};
  p.rows = rows.untyped_data();
  p.group_sizes = static_cast<const int*>(sizes.untyped_data());
  p.num_matrices = static_cast<int>(matrices);
  for (size_t i = 0; i < matrices; ++i) {
    const ffi::AnyBuffer values = *args.get<ffi::AnyBuffer>(2 + 2 * i), scales = *args.get<ffi::AnyBuffer>(3 + 2 * i);
    const ffi::Result<ffi::AnyBuffer> out = *results.get<ffi::AnyBuffer>(i);
    expected.push_back({"values", values, first.element_type(), {p.groups, fp4 ? p.depth / 2 : p.depth, p.columns}});
    expected.push_back({"scales", scales, fp4 ? ffi::U8 : ffi::F32, {p.groups, p.scale_rows, p.scale_columns}});
    expected.push_back({"product", *out, ffi::BF16, {p.capacity, p.columns}});
    p.matrices[i] = {static_cast<const uint8_t*>(values.untyped_data()), scales.untyped_data(), out->untyped_data()};
  }
  for (const Expected& e : expected) {
    if (ffi::Error error = CheckBuffer(e.name, e.given, e.dims, e.dtype, e.shape); !error.success()) return error;
  }
  if (const cudaError_t e = Taken(static_cast<cudaError_t>(LaunchQuantizedRows(p, stream)))) {
    return ffi::Error::Internal(std::string("xen_moe_jax: quantized rows: ") + cudaGetErrorString(e));
  }
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(kQuantizedRows, QuantizedRows,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Attr<int64_t>("block_rows")
                                  .Attr<int64_t>("block_columns")
                                  .Attr<int64_t>("claimed")
                                  .RemainingArgs()
                                  .RemainingRets(),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace xen_moe
