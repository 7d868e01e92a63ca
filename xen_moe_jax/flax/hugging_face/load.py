"""`load_hugging_face`: one MoE layer of a checkpoint as a `MoEConfig` and weights on a mesh."""

from __future__ import annotations

import math
import os
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from xen_moe_jax._numbers import as_int
from xen_moe_jax._quantized_weight import MXFP4_BLOCK, QuantizedWeight
from xen_moe_jax.flax._config import MoEConfig
from xen_moe_jax.flax._parameters import ROUTER_BIAS, Parameter, parameter_table, weight_specs
from xen_moe_jax.flax._placement import current_mesh
from xen_moe_jax.flax.hugging_face.checkpoint import Checkpoint
from xen_moe_jax.flax.hugging_face.families import FAMILIES
from xen_moe_jax.flax.hugging_face.quantized import FP4, Shipped
from xen_moe_jax.flax.hugging_face.readers import Reader


class LoadedLayer(NamedTuple):
    """A layer out of a checkpoint: `nnx.MoE.from_weights(*loaded)`, `linen.variables_of(loaded.weights)`.

    Attributes:
      config: config of the layer.
      weights: by the names of the parameters (docs/user/flax.md), the router bias included.
    """

    config: MoEConfig
    weights: dict[str, jax.Array | QuantizedWeight]


def load_hugging_face(
    folder: str | pathlib.Path,
    layer: int,
    *,
    mesh: Mesh | None = None,
    dtype: Any = jnp.bfloat16,
    keep_quantised: bool = False,
    **changes: Any,
) -> LoadedLayer:
    """Reads one MoE layer of a checkpoint of `xen_moe_jax.flax.hugging_face.FAMILIES`: Mixtral, Qwen, OLMoE, DeepSeek,
    Kimi K2, GLM-4.5, dots1, MiniMax-M2, Llama 4, Phi-3.5-MoE, Granite, ERNIE 4.5, gpt-oss, or of `register_family`.

    Every device reads its own part of the files. Weights in fp8 or int8 with scales of blocks (DeepSeek-V3) or of
    channels, and in MXFP4 (gpt-oss), are dequantized, or kept as they are.

    Args:
      folder: with `config.json` and `*.safetensors`.
      layer: number of the decoder layer.
      mesh: where the weights go, by the layer's shardings; None takes `jax.set_mesh`'s, else one device.
      dtype: dtype of the expert weights; the router's stay float32.
      keep_quantised: keeps weights of experts that are quantized so, as `xm.QuantizedWeight`: a half of the memory of
        bfloat16, or a quarter. They have no gradient.
      changes: fields of `MoEConfig` to set: `axis_name`, `layout`, `capacity_factor`, `tensor_axis`, ...

    Raises:
      FileNotFoundError, KeyError: the folder or a tensor is missing.
      ValueError: an unknown model type, a layer without experts, a field of the config that the layer does not follow,
        a tensor of another shape than the config says, a tensor of the layer that no parameter is read from, weights
        that are quantized in another way, a mesh that cuts kept blocks of MXFP4, or a file that is broken.
      TypeError: an argument of another type.
    """
    if not isinstance(folder, str | os.PathLike):
        raise TypeError(f"folder={folder!r}: must be a str or a pathlib.Path, the folder of a checkpoint")
    if isinstance(layer, bool) or not isinstance(layer, int | np.integer):
        raise TypeError(f"layer={layer!r}: must be an int, the number of the decoder layer")
    if not isinstance(keep_quantised, bool):
        raise TypeError(f"keep_quantised={keep_quantised!r}: must be True or False")
    if mesh is not None and not isinstance(mesh, Mesh):
        raise TypeError(f"mesh={mesh!r}: must be a jax.sharding.Mesh or None")
    with Checkpoint(folder) as checkpoint:
        kind = checkpoint.config.get("model_type")
        if not isinstance(kind, str) or kind not in FAMILIES:
            raise ValueError(
                f"config.json has model_type={kind!r}: must be one of {tuple(FAMILIES)}; for another one, "
                "xen_moe_jax.flax.hugging_face.register_family says how to read it"
            )
        family = FAMILIES[kind]
        count = checkpoint.config.get("num_hidden_layers", layer + 1)
        if as_int(count) is None:
            raise ValueError(f"config.json has num_hidden_layers={count!r}: must be an int")
        if not 0 <= layer < count or not _by_config(checkpoint, family.is_moe, layer):
            raise ValueError(f"layer={layer}: the checkpoint has {count} layers, and this is not one with experts")
        fields = _by_config(checkpoint, family.fields)
        config = MoEConfig(**(fields | {"param_dtype": dtype} | changes))
        if mesh is None:
            mesh = jax.sharding.get_mesh()
            mesh = None if mesh.empty else mesh
        on_mesh = current_mesh(config, mesh)
        table = parameter_table(config, on_mesh)
        if config.balancing == fields.get("balancing") == "bias":
            zeros = jax.nn.initializers.zeros
            table[ROUTER_BIAS] = Parameter((config.num_experts,), jnp.float32, zeros, (None,), ("expert",))
        prefix = checkpoint.prefix(layer)
        weights = {}
        for name, reader in family.readers(checkpoint, prefix):
            if name not in table:
                raise ValueError(f"changes={changes}: a {kind} checkpoint has {name}, and this layer would not have it")
            keep = keep_quantised and table[name].dims[-1] in ("hidden", "intermediate")  # the router is widened
            weights[name] = _placed(name, reader, table[name], mesh, keep)
        if missing := set(table) - set(weights):
            raise ValueError(f"changes={changes}: a {kind} checkpoint has no weights for {sorted(missing)}")
        if extra := [n for n in checkpoint.unread(prefix) if not n.endswith(family.unused)]:
            raise ValueError(
                f"{checkpoint.folder}: layer {layer} has tensors that no parameter of a {kind} layer is read from: "
                f"{extra[:8]}. What the layer computes without them may be wrong; if not, name them in "
                f"register_family({kind!r}, dataclasses.replace(FAMILIES[{kind!r}], unused=(...)))"
            )
        return LoadedLayer(config, weights)


def _by_config(checkpoint: Checkpoint, function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function of a family; a field that it misses, or cannot take, is the file's fault."""
    kind = checkpoint.config["model_type"]
    try:
        return function(checkpoint.config, *arguments)
    except KeyError as error:
        raise ValueError(
            f"{checkpoint.folder / 'config.json'}: has no {error}, which {kind} configs have, as published and as "
            f"written by transformers 5. It has {sorted(checkpoint.config)}; add the field, or read this form with "
            "register_family"
        ) from error
    except (AttributeError, IndexError, TypeError) as error:
        raise ValueError(
            f"{checkpoint.folder / 'config.json'}: a field is of another type or length than {kind} configs have "
            f"({error}); mend it, or read this form with register_family"
        ) from error


def _placed(name: str, reader: Reader, p: Parameter, mesh: Mesh | None, keep: bool) -> jax.Array | QuantizedWeight:
    def read(index: tuple[slice, ...] | None) -> np.ndarray | Shipped:
        index = index or (slice(None),) * len(p.shape)
        wanted = tuple(len(range(*s.indices(n))) for s, n in zip(index, p.shape, strict=True))
        found = reader(index)
        if not isinstance(found, Shipped):
            found = np.asarray(found)
            if not jnp.issubdtype(found.dtype, jnp.floating) or jnp.finfo(found.dtype).bits < 16:
                raise ValueError(
                    f"{name}: the checkpoint keeps it in {found.dtype}, quantized in a way that is not known here (fp8 "
                    "and int8 with weight_scale_inv or weight_scale, and MXFP4 are); load a checkpoint in bfloat16"
                )
        if found.shape != wanted:
            raise ValueError(f"{name}: the checkpoint's part is {found.shape} and config.json says {wanted}")
        if not isinstance(found, Shipped):
            return found.astype(p.dtype)
        return found if keep else found.widened().astype(p.dtype)

    if mesh is None:
        found = read(None)
        return jax.tree.map(jnp.asarray, found.as_weight() if isinstance(found, Shipped) else found)
    for axis, (dim, size) in enumerate(zip(p.dims, p.shape, strict=True)):
        # A device that reads its part alone would not notice that a tensor is larger than the config says.
        if dim is None:
            continue
        begin = size - 1 if dim == "expert" else 0  # not all experts: each may be a tensor of its own
        strip = tuple(slice(begin, None) if other == axis else slice(0, 1) for other in range(len(p.shape)))
        there = begin + reader(strip).shape[axis]
        if there != size:
            raise ValueError(f"{name}: the checkpoint's part is {there} long and config.json says {size}")
    sharding = NamedSharding(mesh, PartitionSpec(*p.sharding))
    return _on_devices(read, p, sharding, name)


def _on_devices(
    read: Callable[[tuple[slice, ...] | None], np.ndarray | Shipped], p: Parameter, sharding: NamedSharding, name: str
) -> jax.Array | QuantizedWeight:
    """Gives each device its part; devices that hold the same part share one reading of it."""
    indices = sharding.addressable_devices_indices_map(p.shape)
    parts: dict[str, Any] = {}
    for index in indices.values():
        if str(index) not in parts:
            found = read(index)
            parts[str(index)] = _packed(name, found, p, sharding) if isinstance(found, Shipped) else found
    placed = [jax.device_put(parts[str(index)], device) for device, index in indices.items()]

    def joined(shape: tuple[int, ...], spec: PartitionSpec, arrays: list[jax.Array]) -> jax.Array:
        return jax.make_array_from_single_device_arrays(shape, NamedSharding(sharding.mesh, spec), arrays)

    weight = placed[0]
    if not isinstance(weight, QuantizedWeight):
        return joined(p.shape, sharding.spec, placed)
    of_values, of_scales = weight.part_shapes(p.shape)
    whole = (jax.ShapeDtypeStruct(of_values, weight.dtype), jax.ShapeDtypeStruct(of_scales, weight.scales.dtype))
    specs = weight_specs(QuantizedWeight(*whole, weight.block), sharding.spec)
    values = joined(of_values, specs.values, [part.values for part in placed])
    return QuantizedWeight(values, joined(of_scales, specs.scales, [part.scales for part in placed]), weight.block)


def _packed(name: str, found: Shipped, p: Parameter, sharding: NamedSharding) -> QuantizedWeight:
    """Returns a device's part with the blocks that all devices' parts can have."""
    of_device = sharding.shard_shape(p.shape)
    block = tuple(
        size if part == whole else math.gcd(size, part)
        for size, part, whole in zip(found.block, of_device[-2:], p.shape[-2:], strict=True)
    )
    found = found.with_block((block[0], block[1]))
    if found.values.dtype == FP4 and block[0] != MXFP4_BLOCK:
        raise ValueError(
            f"keep_quantised=True: {name} is in MXFP4, blocks of {MXFP4_BLOCK} along a dimension of {p.shape[-2]} that "
            f"{p.sharding[-2]!r} divides into parts of {of_device[-2]}: make the parts multiples of {MXFP4_BLOCK}, or "
            "load without keep_quantised"
        )
    return found.as_weight()
