"""FFI calls: attributes out of the static description, and the call itself."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xen_moe_jax import _active, _mesh, _nodes
from xen_moe_jax._config import KernelConfig
from xen_moe_jax._quantize import Wire
from xen_moe_jax._spec import Spec
from xen_moe_jax.backends.cuda import devices, module
from xen_moe_jax.backends.cuda import schedule as schedules

MAX_TIMEOUT_NS = 2**62


def attributes(
    spec: Spec,
    hidden: int,
    dtype: Any,
    schedule: schedules.Schedule,
    config: KernelConfig,
    *,
    wire: Wire | None = None,
    scaled: bool = False,
    weighted: bool = False,
    known_positions: bool = False,
    flight: bool = False,
    masked: bool = False,
) -> dict[str, int]:
    """Integer attributes, as ffi/operation.cc decodes them."""
    check_limits(spec)
    check_nodes(spec, config)
    names = module.compiled()
    return {
        "ranks": spec.num_ranks,
        "num_tokens": spec.num_tokens,
        "top_k": spec.top_k,
        "num_experts": spec.num_experts,
        "hidden": hidden,
        "capacity": spec.capacity,
        "alignment": spec.alignment,
        "layout": names.layouts.index(spec.layout),
        "ranks_per_node": _nodes.ranks_per_node(spec, config),
        "dtype": names.dtypes.index(jnp.dtype(dtype).name),
        "wire": names.wires.index(wire.dtype if wire else ""),
        "ue8m0": int(wire is not None and wire.scale_format == "ue8m0"),
        "scaled": int(scaled),
        "weighted": int(weighted),
        "known_positions": int(known_positions),
        "flight": int(flight),
        "masked": int(masked),
        "blocks": schedule.blocks,
        "push_blocks": schedule.push_blocks,
        "layout_blocks": schedule.layout_blocks,
        "parts": schedule.parts,
        "segment_tokens": schedule.segment_tokens,
        "solo_layout": int(schedule.solo_layout),
        "low_latency": int(schedule.low_latency),
        "bulk": int(schedule.bulk),
        "chunk_tokens": schedules.chunk_tokens(spec, config, low_latency=schedule.low_latency),
        "timeout_ns": timeout_ns(config),
        "channel": config.channel,
    }


def active_operand(active: Any) -> jax.Array:
    """The operand `active` as the kernels take it: bool `[R]`, `[0]` for every rank."""
    return active if _active.given(active) else jnp.zeros((0,), jnp.bool_)


def timeout_ns(config: KernelConfig) -> int:
    return max(1, round(min(config.timeout_s * 1e9, MAX_TIMEOUT_NS))) if config.timeout_s else 0


def check_limits(spec: Spec) -> None:
    most = module.compiled()
    for name, value, limit in (
        ("ranks", spec.num_ranks, most.max_ranks),
        ("top_k", spec.top_k, most.max_top_k),
        ("num_experts", spec.num_experts, most.max_experts),
    ):
        if value > limit:
            raise ValueError(
                f"the CUDA backend takes at most {limit} {name}, not {value}: use KernelConfig(backend='reference')"
            )


def check_nodes(spec: Spec, config: KernelConfig) -> None:
    """Raises ValueError for meshes and configs that the kernels between nodes do not support."""
    if not _nodes.several(spec.num_ranks, config):
        return
    nodes, most = spec.num_ranks // _nodes.ranks_per_node(spec, config), module.compiled().max_nodes
    if nodes > most:
        raise ValueError(
            f"KernelConfig.ranks_per_node={config.ranks_per_node} on an axis of {spec.num_ranks} ranks makes {nodes} "
            f"nodes: the CUDA backend takes at most {most}: put more ranks on a node or fewer on the axis, or use "
            "KernelConfig(backend='reference')"
        )


def apart(*arrays: jax.Array) -> list[jax.Array]:
    """Returns the same arrays behind a barrier. Without it XLA may fuse a call with a slice that is its operand, or
    with an update by its result, and such a fusion loses which operands and results of the call share a buffer."""
    return list(lax.optimization_barrier(arrays))


def ffi_call(
    target: str,
    operands: tuple,
    results: list[jax.ShapeDtypeStruct],
    keys: np.ndarray,
    attrs: dict[str, int],
    *,
    between_nodes: bool = True,
    **kw: Any,
):
    """Makes one FFI call; for an asynchronous operation the start, which XLA may not remove. Returns a list of
    results. `between_nodes`: as in `processes.check_neighbours`."""
    per_node = attrs["ranks_per_node"] if attrs.get("chunk_tokens") else keys.shape[1]
    devices.prepare(keys, per_node, between_nodes)
    if attrs.get("flight"):
        target, kw = f"{target}_start", {**kw, "has_side_effect": True}
    function = jax.ffi.ffi_call(target, results, **kw)
    numbers = {name: np.int64(value) for name, value in {**attrs, "site": _mesh.lowering_site()}.items()}
    aliased = "input_output_aliases" in kw
    made = function(*(apart(*operands) if aliased else operands), devices=keys.reshape(-1), **numbers)
    return apart(*made) if aliased else list(made)
