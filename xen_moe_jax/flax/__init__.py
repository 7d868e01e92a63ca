"""Flax layers: `xen_moe_jax.flax.nnx.MoE` and `xen_moe_jax.flax.linen.MoE`, one `MoEConfig` for both.

Flax is an optional dependency (`pip install "xen-moe-jax[flax]"`); each front end is imported when it is first named.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from xen_moe_jax.flax._balance import MoEMetrics, updated_bias
from xen_moe_jax.flax._config import MoEConfig
from xen_moe_jax.flax.hugging_face import LoadedLayer, load_hugging_face

if TYPE_CHECKING:
    from xen_moe_jax.flax import linen, nnx

__all__ = ["LoadedLayer", "MoEConfig", "MoEMetrics", "linen", "load_hugging_face", "nnx", "updated_bias"]


def __getattr__(name: str) -> Any:
    if name == "MoE":  # an AttributeError would become an ImportError without this text
        raise ImportError(
            "xen_moe_jax.flax has two layers of this name: from xen_moe_jax.flax.nnx import MoE, or from "
            "xen_moe_jax.flax.linen import MoE",
            name=__name__,
        )
    if name in ("grouped_matmul", "hopper"):  # they stood here before
        return importlib.import_module(f"xen_moe_jax.experts.{name}")
    if name not in ("linen", "nnx"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")
