"""`load_hugging_face`: one MoE layer of a checkpoint as a `MoEConfig` and weights on a mesh."""

from __future__ import annotations

import pathlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from xen_moe_jax.flax._config import MoEConfig
from xen_moe_jax.flax._parameters import ROUTER_BIAS, Parameter, parameter_table
from xen_moe_jax.flax._placement import current_mesh
from xen_moe_jax.flax.hugging_face.checkpoint import Checkpoint
from xen_moe_jax.flax.hugging_face.families import FAMILIES, Reader


class LoadedLayer(NamedTuple):
    """A layer out of a checkpoint: `nnx.MoE.from_weights(*loaded)`, `linen.variables_of(loaded.weights)`.

    Attributes:
      config: config of the layer.
      weights: by the names of the parameters (docs/user/flax.md), the router bias included.
    """

    config: MoEConfig
    weights: dict[str, jax.Array]


def load_hugging_face(
    folder: str | pathlib.Path, layer: int, *, mesh: Mesh | None = None, dtype: Any = jnp.bfloat16, **changes: Any
) -> LoadedLayer:
    """Reads one MoE layer of a checkpoint: Mixtral, Qwen3-MoE, OLMoE, DeepSeek-V3 and V3.2, Kimi K2, GLM-4.5, dots1,
    MiniMax-M2, gpt-oss, or a family of `xen_moe_jax.flax.hugging_face.register_family`.

    Every device reads its own part of the files. Weights in fp8 blocks (DeepSeek-V3) and in MXFP4 (gpt-oss) are
    dequantized.

    Args:
      folder: with `config.json` and `*.safetensors`.
      layer: number of the decoder layer.
      mesh: where the weights go, by the layer's shardings; None takes `jax.set_mesh`'s, else one device.
      dtype: dtype of the expert weights; the router's stay float32.
      changes: fields of `MoEConfig` to set: `axis_name`, `layout`, `capacity_factor`, `tensor_axis`, ...

    Raises:
      FileNotFoundError, KeyError: the folder or a tensor is missing.
      ValueError: an unknown model type, a layer without experts, a tensor of another shape than the config says, or a
        file that is broken.
      TypeError: an argument of another type.
    """
    if isinstance(layer, bool) or not isinstance(layer, int | np.integer):
        raise TypeError(f"layer={layer!r}: must be an int, the number of the decoder layer")
    if mesh is not None and not isinstance(mesh, Mesh):
        raise TypeError(f"mesh={mesh!r}: must be a jax.sharding.Mesh or None")
    with Checkpoint(folder) as checkpoint:
        kind = checkpoint.config.get("model_type")
        if kind not in FAMILIES:
            raise ValueError(
                f"config.json has model_type={kind!r}: must be one of {tuple(FAMILIES)}; for another one, "
                "xen_moe_jax.flax.hugging_face.register_family says how to read it"
            )
        family = FAMILIES[kind]
        count = checkpoint.config.get("num_hidden_layers", layer + 1)
        if not 0 <= layer < count or not family.is_moe(checkpoint.config, layer):
            raise ValueError(f"layer={layer}: the checkpoint has {count} layers, and this is not one with experts")
        try:
            fields = family.fields(checkpoint.config)
        except KeyError as error:
            file = checkpoint.folder / "config.json"
            raise ValueError(
                f"{file}: has no {error}, which {kind} configs have, as published and as written by transformers 5. "
                f"It has {sorted(checkpoint.config)}; add the field, or read this form with register_family"
            ) from error
        config = MoEConfig(**(fields | {"param_dtype": dtype} | changes))
        if mesh is None:
            mesh = jax.sharding.get_mesh()
            mesh = None if mesh.empty else mesh
        on_mesh = current_mesh(config, mesh)
        table = parameter_table(config, on_mesh)
        weights = {}
        for name, reader in family.readers(checkpoint, checkpoint.prefix(layer)):
            if name == ROUTER_BIAS:
                p = Parameter((config.num_experts,), jnp.float32, jax.nn.initializers.zeros, (None,), ("expert",))
            else:
                p = table[name]
            spec = PartitionSpec(*p.sharding)
            weights[name] = _placed(name, reader, p.shape, jnp.dtype(p.dtype), mesh, spec)
        if missing := set(table) - set(weights):
            raise ValueError(f"changes={changes}: a {kind} checkpoint has no weights for {sorted(missing)}")
        return LoadedLayer(config, weights)


def _placed(
    name: str, reader: Reader, shape: tuple[int, ...], dtype: Any, mesh: Mesh | None, spec: PartitionSpec
) -> jax.Array:
    def part(index: tuple[slice, ...] | None) -> np.ndarray:
        index = index or (slice(None),) * len(shape)
        wanted = tuple(len(range(*s.indices(n))) for s, n in zip(index, shape, strict=True))
        read = np.asarray(reader(index)).astype(dtype)
        if read.shape != wanted:
            raise ValueError(f"{name}: the checkpoint's part is {read.shape} and config.json says {wanted}")
        return read

    if mesh is None:
        return jnp.asarray(part(None))
    return jax.make_array_from_callback(shape, NamedSharding(mesh, spec), part)
