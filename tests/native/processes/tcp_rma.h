// A network for NCCL on hosts that have none, as bad as one may be: tcp_rma.cc carries the puts of NCCL's device
// interface over TCP between the processes of a host. Test code.
//
// Events that the contract of a put does not promise do not happen. XEN_MOE_RMA, a list such as
// "seed=3,reorder=1,duplicate=1,delay_us=200,bytes_per_s=1e9", asks for:
//   reorder      payloads in any order and in pieces; a signal never before what it speaks for: its own put, or with a
//                strong one all earlier puts of its context to that rank
//   duplicate    some pieces arrive twice, before their put is reported as complete
//   delay_us     of each put, at random up to this
//   bytes_per_s  out of each process; 0: no limit
//   broken       rules that are not kept, to see that tests find it: 1 strong signals are weak, 4 a signal goes before
//                its own put
// The source of a put is read when its bytes go out and not before. A peer whose connection has ended is a node that
// does not answer: puts to it never complete, and that is no error.
#pragma once

#include <cstdint>

struct RmaTraffic {
  uint64_t bytes, puts, signals;
};

extern "C" {
// Bytes that have left `rank` of this process for `target`: payload, once, however often it arrives.
__attribute__((visibility("default"))) void xen_moe_rma_traffic(int rank, int target, RmaTraffic* out);
// From now on nothing leaves `rank` of this process, nothing reaches it, and nothing that it puts completes.
__attribute__((visibility("default"))) void xen_moe_rma_kill(int rank);
}
