"""Expert parallelism for JAX: MoE dispatch and combine on CPU, TPU and CUDA, with one meaning."""

import importlib
import typing

from xen_moe_jax import balance, cuda, routing
from xen_moe_jax._api import combine, dispatch, get_dispatch_layout, redispatch
from xen_moe_jax._collectives import all_gather, all_to_all, ragged_all_to_all
from xen_moe_jax._config import KernelConfig
from xen_moe_jax._float8_weight import Float8Weight
from xen_moe_jax._gather_matmul import all_gather_matmul
from xen_moe_jax._overlap import combine_done, combine_start, dispatch_done, dispatch_start, overlap
from xen_moe_jax._perf_model import Links, Prediction, perf_model
from xen_moe_jax._quantize import Wire, dequantize, quantize
from xen_moe_jax._quantized_weight import QuantizedWeight
from xen_moe_jax._replicated import combine_replicated, dispatch_replicated
from xen_moe_jax._types import BlockScaled, DispatchLayout, Flight, Handle, MoEMLPInfo, ReplicatedHandle, Routed
from xen_moe_jax.backends import register_ahead as _register_ahead
from xen_moe_jax.backends.base import BackendUnavailable
from xen_moe_jax.buffer import Buffer, buffer_size_hint
from xen_moe_jax.failure import OperationFailed, check

if typing.TYPE_CHECKING:
    from xen_moe_jax._moe_mlp import moe_mlp
    from xen_moe_jax.experts.quantized_once import quantize_weights

__version__ = "0.1.0"

__all__ = [
    "BackendUnavailable",
    "BlockScaled",
    "Buffer",
    "DispatchLayout",
    "Flight",
    "Float8Weight",
    "Handle",
    "KernelConfig",
    "Links",
    "MoEMLPInfo",
    "OperationFailed",
    "Prediction",
    "QuantizedWeight",
    "ReplicatedHandle",
    "Routed",
    "Wire",
    "all_gather",
    "all_gather_matmul",
    "all_to_all",
    "balance",
    "buffer_size_hint",
    "check",
    "combine",
    "combine_done",
    "combine_replicated",
    "combine_start",
    "cuda",
    "dequantize",
    "dispatch",
    "dispatch_done",
    "dispatch_replicated",
    "dispatch_start",
    "get_dispatch_layout",
    "moe_mlp",
    "overlap",
    "perf_model",
    "quantize",
    "quantize_weights",
    "ragged_all_to_all",
    "redispatch",
    "routing",
]

_LATER = ("autotune", "elastic", "flax", "transfer")  # large, or in need of flax


def __getattr__(name: str) -> typing.Any:
    if name in _LATER:
        return importlib.import_module(f"{__name__}.{name}")
    if name == "moe_mlp":  # its kernels for Hopper GPUs take as long to import as everything else
        return importlib.import_module(f"{__name__}._moe_mlp").moe_mlp
    if name == "quantize_weights":
        return importlib.import_module(f"{__name__}.experts.quantized_once").quantize_weights
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_register_ahead()
