// The FFI handlers, which ffi/module.cc gives to Python to register.
#pragma once

#include "xla/ffi/api/ffi.h"

namespace xen_moe {

XLA_FFI_DECLARE_HANDLER_SYMBOL(kDispatchInstantiate);
XLA_FFI_DECLARE_HANDLER_SYMBOL(kCombineInstantiate);
XLA_FFI_DECLARE_HANDLER_SYMBOL(kDispatch);
XLA_FFI_DECLARE_HANDLER_SYMBOL(kRedispatch);
XLA_FFI_DECLARE_HANDLER_SYMBOL(kCombine);
XLA_FFI_DECLARE_HANDLER_SYMBOL(kHomeCombineInstantiate);
XLA_FFI_DECLARE_HANDLER_SYMBOL(kHomeCombine);
XLA_FFI_DECLARE_HANDLER_SYMBOL(kDispatchStart);
XLA_FFI_DECLARE_HANDLER_SYMBOL(kCombineStart);
XLA_FFI_DECLARE_HANDLER_SYMBOL(kDone);
XLA_FFI_DECLARE_HANDLER_SYMBOL(kExchangeInstantiate);
XLA_FFI_DECLARE_HANDLER_SYMBOL(kExchange);
XLA_FFI_DECLARE_HANDLER_SYMBOL(kMoveInstantiate);
XLA_FFI_DECLARE_HANDLER_SYMBOL(kMove);
XLA_FFI_DECLARE_HANDLER_SYMBOL(kMoveStart);
XLA_FFI_DECLARE_HANDLER_SYMBOL(kQuantizedRows);
XLA_FFI_DECLARE_HANDLER_SYMBOL(kGatherMatmulInstantiate);
XLA_FFI_DECLARE_HANDLER_SYMBOL(kGatherMatmul);

}  // namespace xen_moe
