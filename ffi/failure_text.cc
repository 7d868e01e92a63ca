#include "ffi/failure_text.h"

#include <cstdio>

namespace xen_moe {
namespace {

template <int N>
const char* Word(const char* const (&words)[N], uint32_t i) {
  return i < N ? words[i] : "?";
}

const char* const kOperations[] = {"dispatch", "redispatch", "combine", "all_to_all"};
const char* const kDtypes[] = {"bfloat16", "float16", "float32", "float8_e4m3fn", "int8", "float8_e5m2"};
const char* const kWires[] = {"", "float8_e4m3fn", "int8", "mxfp4"};  // by WireType
constexpr uint32_t kMxfp4 = 3;
const char* const kLayouts[] = {"grouped", "ranked", "padded"};
// By Step: the work that the root had not done when another rank gave up on it.
const char* const kOwed[] = {"did not start it",
                             "did not send its routing",
                             "did not send its rows",
                             "did not take the rows sent to it",
                             "did not finish its own share",
                             "did not end the operation before it"};

std::string Seconds(uint64_t ns) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.1f s", static_cast<double>(ns) * 1e-9);
  return text;
}

std::string Number(uint64_t n) { return std::to_string(n); }

}  // namespace

std::string OperationText(const Descriptor& d) {
  if (d.ranks == 0) return "no operation yet";
  if (static_cast<Operation>(d.operation) == Operation::kExchange) {
    const ExchangeShapes& e = d.exchange;
    const uint64_t unit_bytes = static_cast<uint64_t>(e.unit_bytes_high) << 32 | e.unit_bytes_low;
    const char* const name = d.flags & kDescribedMove     ? "move_weights"
                             : d.flags & kDescribedRagged ? "ragged_all_to_all"
                             : d.flags & kDescribedGather ? "all_gather"
                                                          : "all_to_all";
    return std::string(name) + " of " + Number(e.operand_units) + " rows of " + Number(unit_bytes) + " bytes into " +
           Number(e.output_units) + " over " + Number(d.ranks) + " ranks";
  }
  const RoutedShapes& r = d.routed;
  std::string text = std::string(Word(kOperations, d.operation)) + " of " + Word(kDtypes, d.dtype) + "[" +
                     Number(r.tokens) + ", " + Number(r.hidden) + "], top-" + Number(r.top_k) + " of " +
                     Number(r.experts) + " experts over " + Number(d.ranks) + " ranks, layout " +
                     Word(kLayouts, d.layout) + ", capacity " + Number(r.capacity);
  if (r.alignment > 1) text += ", alignment " + Number(r.alignment);
  // MXFP4 has no other scales than powers of two, and its name says so.
  const bool ue8m0 = d.flags & kDescribedUe8m0 && d.wire != kMxfp4;
  if (d.wire != 0) text += std::string(", wire ") + Word(kWires, d.wire) + (ue8m0 ? ":ue8m0" : "");
  if (d.flags & kDescribedScaled) text += ", scaled";
  if (d.flags & kDescribedWeighted) text += ", weighted";
  if (d.flags & kDescribedByHome) text += ", added by home";
  std::string out;
  if (d.ranks > kSmallGroup && d.flags >> kDescribedInactiveShift) out = ", without some ranks";
  for (uint32_t rank = 0; rank < d.ranks && d.ranks <= kSmallGroup; ++rank) {
    if (d.flags >> kDescribedInactiveShift >> rank & 1) out += (out.empty() ? ", without ranks " : ", ") + Number(rank);
  }
  return text + out;
}

std::string FailureText(const ErrorRecord& record, int channel, Scope scope, bool masked,
                        const std::function<std::string(int)>& where) {
  const Failure f = UnpackFailure(record.failure);
  const std::string root = "rank " + std::to_string(f.rank) + " (" + where(f.rank) + ")";
  const std::string other = "rank " + std::to_string(f.other);
  const std::string what = std::string(Word(kOperations, static_cast<uint32_t>(f.operation))) + " number " +
                           std::to_string(f.epoch) + " on channel " + std::to_string(channel);
  const std::string shapes = OperationText(record.of_other);
  const bool elastic = scope == Scope::kElastic;
  const std::string again = elastic                ? ", then call group.recover(step) to go on"
                            : scope == Scope::kJob ? ", then call xen_moe_jax.cuda.reset() in every process to go on"
                                                   : ", then call xen_moe_jax.cuda.reset() to go on";
  const std::string poisoned = " Every result of this group is NaN from that operation on";
  std::string text = "xen_moe_jax: ";
  switch (f.cause) {
    case Cause::kTimeout:
      text += what + " failed: " + root + " " + Word(kOwed, static_cast<uint32_t>(f.step)) + ", and " + other +
              " gave up after " + Seconds(record.waited_ns) + " (KernelConfig.timeout_s). It was " + shapes +
              "; the latest of rank " + std::to_string(f.rank) + " is " + OperationText(record.of_rank) + "." +
              poisoned + ". Find out what that rank did instead of this operation" + again;
      break;
    case Cause::kMismatch:
      text += what + " failed: the ranks run different operations under this number. " + root + " runs " +
              OperationText(record.of_rank) + "; " + other + " runs " + shapes + "." +
              (OperationText(record.of_rank) == shapes && record.of_rank.site != record.of_other.site
                   ? " These are two calls of the same shapes, at different places of a program or of two programs."
                   : "") +
              poisoned +
              ". Every rank must run the same operations in the same order, with the same `active`; operations that "
              "may run at the same time need a KernelConfig.channel each. Correct the program" +
              again;
      break;
    case Cause::kDead:
      text += "the process of " + root + " has ended, and with it the group on channel " + std::to_string(channel) +
              "." + poisoned +
              (elastic  ? ". Call group.recover(step)"
               : masked ? ". Call xen_moe_jax.cuda.reset() in every process that is left and go on with active="
                          "xen_moe_jax.cuda.alive(mesh, axis_name), or start the job again from its last checkpoint"
                        : ". Start the job again from its last checkpoint");
      break;
    case Cause::kMemory:
      text += what + " failed: " + root +
              " has released its symmetric memory (xm.Buffer.close) or has too little of it for " + shapes + "." +
              poisoned + ". Open the xm.Buffer again, or with a larger size_bytes" + again;
      break;
    case Cause::kIndex:
      text += what + " failed: the handle or the sizes given to " + root +
              " are impossible (counts below zero, or rows outside the arrays): " + shapes + "." + poisoned +
              ". Pass the handle as dispatch returned it, offsets and sizes inside the operands" + again;
      break;
    case Cause::kConcurrent:
      text += what + " failed: on " + root + " another operation held the channel for " + Seconds(record.waited_ns) +
              " (KernelConfig.timeout_s). It was " + shapes + "." + poisoned +
              ". Give operations that may run at the same time a KernelConfig.channel each" + again;
      break;
    case Cause::kReset:
      if (elastic) return text + "the other members have given up this step." + poisoned + ". Call group.recover(step)";
      text += "the group on channel " + std::to_string(channel) + " was stopped by xen_moe_jax.cuda.reset(), which " +
              "did not end." + poisoned + ". Wait until no program runs" + again;
      break;
    default:
      text += what + " failed for a reason that this version does not know" + again;
  }
  return text;
}

}  // namespace xen_moe
