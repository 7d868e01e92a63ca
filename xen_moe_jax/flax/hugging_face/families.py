"""Each family's names and shapes: how its `config.json` becomes a `MoEConfig`, and where a parameter's parts are.

torch keeps matrices as `[out, in]`; this library multiplies by `[in, out]`. A reader is given the part wanted, in the
layer's own shape, and reads that part of the file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from xen_moe_jax.flax.hugging_face import quantized
from xen_moe_jax.flax.hugging_face.checkpoint import Checkpoint, Index

Reader = Callable[[Index], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Family:
    """The description of one model type: its config and the places of its parameters.

    Attributes:
      is_moe: `(config.json, layer) -> bool`: True where the layer has experts.
      fields: `config.json` to arguments of `MoEConfig`.
      readers: `(checkpoint, prefix of the layer)` to a reader of each parameter.
    """

    is_moe: Callable[[dict[str, Any], int], bool]
    fields: Callable[[dict[str, Any]], dict[str, Any]]
    readers: Callable[[Checkpoint, str], Iterator[tuple[str, Reader]]]


def transposed(checkpoint: Checkpoint, name: str) -> Reader:
    """Reads `[out, in]` as `[in, out]`, from any stored dtype."""

    def read(index: Index) -> np.ndarray:
        rows, columns = index
        return matrix(checkpoint, name, (columns, rows)).T

    return read


def matrix(checkpoint: Checkpoint, name: str, index: Index) -> np.ndarray:
    """Reads a part of a matrix in its stored dtype; fp8 with a `_scale_inv` beside it is returned in float32."""
    scale = f"{name}_scale_inv"
    if scale not in checkpoint:
        return checkpoint.read(name, index)
    block = tuple(checkpoint.config.get("quantization_config", {}).get("weight_block_size", (128, 128)))
    return quantized.by_blocks(checkpoint.read(name), checkpoint.read(scale), block)[index]


def vector(checkpoint: Checkpoint, name: str) -> Reader:
    return lambda index: checkpoint.read(name, index)


def matrices(checkpoint: Checkpoint, template: str, num_experts: int) -> Reader:
    """One `[out, in]` matrix an expert, read as `[E, in, out]`."""

    def read(index: Index) -> np.ndarray:
        which, rows, columns = index
        numbers = range(*which.indices(num_experts))
        return np.stack([matrix(checkpoint, template.format(e), (columns, rows)).T for e in numbers])

    return read


def _silu(config: dict[str, Any]) -> None:
    name = config.get("hidden_act", "silu")
    if name != "silu":
        raise ValueError(f"config.json has hidden_act={name!r}: only 'silu' is known for {config['model_type']}")


# -- Mixtral -----------------------------------------------------------------------------------------------------------


def _mixtral_fields(config: dict[str, Any]) -> dict[str, Any]:
    _silu(config)
    return {
        "hidden_size": config["hidden_size"],
        "intermediate_size": config["intermediate_size"],
        "num_experts": config["num_local_experts"],
        "top_k": config["num_experts_per_tok"],
        "balancing": "none",
    }


def _mixtral_readers(checkpoint: Checkpoint, prefix: str) -> Iterator[tuple[str, Reader]]:
    moe = f"{prefix}.block_sparse_moe"
    yield "router", transposed(checkpoint, f"{moe}.gate.weight")
    for name, theirs in (("gate", "w1"), ("up", "w3"), ("down", "w2")):
        template = f"{moe}.experts.{{}}.{theirs}.weight"
        yield name, matrices(checkpoint, template, checkpoint.config["num_local_experts"])


# -- Qwen3-MoE ---------------------------------------------------------------------------------------------------------


def _qwen3_is_moe(config: dict[str, Any], layer: int) -> bool:
    dense = layer in config.get("mlp_only_layers", ())
    return not dense and (layer + 1) % config.get("decoder_sparse_step", 1) == 0


def _qwen3_num_experts(config: dict[str, Any]) -> int:
    """Returns the number of experts: "num_experts" as published, "num_local_experts" as transformers 5 writes it."""
    return config["num_experts" if "num_experts" in config else "num_local_experts"]


def _qwen3_fields(config: dict[str, Any]) -> dict[str, Any]:
    _silu(config)
    return {
        "hidden_size": config["hidden_size"],
        "intermediate_size": config["moe_intermediate_size"],
        "num_experts": _qwen3_num_experts(config),
        "top_k": config["num_experts_per_tok"],
        "normalize_weights": bool(config.get("norm_topk_prob", False)),
        "balancing": "none",
    }


def _mlp_readers(checkpoint: Checkpoint, prefix: str, num_experts: int) -> Iterator[tuple[str, Reader]]:
    yield "router", transposed(checkpoint, f"{prefix}.mlp.gate.weight")
    for name in ("gate", "up", "down"):
        yield name, matrices(checkpoint, f"{prefix}.mlp.experts.{{}}.{name}_proj.weight", num_experts)


def _qwen3_readers(checkpoint: Checkpoint, prefix: str) -> Iterator[tuple[str, Reader]]:
    yield from _mlp_readers(checkpoint, prefix, _qwen3_num_experts(checkpoint.config))


# -- OLMoE -------------------------------------------------------------------------------------------------------------


def _olmoe_fields(config: dict[str, Any]) -> dict[str, Any]:
    return _qwen3_fields(config | {"moe_intermediate_size": config["intermediate_size"]})


# -- DeepSeek-V3 -------------------------------------------------------------------------------------------------------


def _deepseek_is_moe(config: dict[str, Any], layer: int) -> bool:
    if "mlp_layer_types" in config:  # DeepSeek-V3.2 as transformers 5 writes it
        return config["mlp_layer_types"][layer] == "sparse"
    return layer >= config.get("first_k_dense_replace", 0) and layer % config.get("moe_layer_freq", 1) == 0


def _deepseek_fields(config: dict[str, Any]) -> dict[str, Any]:
    _silu(config)
    for name, known in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        if config.get(name, known) != known:
            raise ValueError(f"config.json has {name}={config[name]!r}: only {known!r} is known, DeepSeek-V3's")
    return {
        "hidden_size": config["hidden_size"],
        "intermediate_size": config["moe_intermediate_size"],
        "num_experts": config["n_routed_experts"],
        "top_k": config["num_experts_per_tok"],
        "score": "sigmoid",
        "balancing": "bias",
        "num_groups": config["n_group"],
        "topk_groups": config["topk_group"],
        "weight_scale": float(config["routed_scaling_factor"]),
        "normalize_weights": bool(config.get("norm_topk_prob", True)),
        "num_shared_experts": config.get("n_shared_experts") or 0,
    }


def _deepseek_readers(checkpoint: Checkpoint, prefix: str) -> Iterator[tuple[str, Reader]]:
    yield from _mlp_readers(checkpoint, prefix, checkpoint.config["n_routed_experts"])
    yield "router_bias", vector(checkpoint, f"{prefix}.mlp.gate.e_score_correction_bias")
    if checkpoint.config.get("n_shared_experts"):
        for name in ("gate", "up", "down"):
            yield f"shared_{name}", transposed(checkpoint, f"{prefix}.mlp.shared_experts.{name}_proj.weight")


# -- MiniMax-M2 --------------------------------------------------------------------------------------------------------


def _minimax_m2_fields(config: dict[str, Any]) -> dict[str, Any]:
    if config.get("scoring_func", "sigmoid") != "sigmoid":
        raise ValueError(f"config.json has scoring_func={config['scoring_func']!r}: only 'sigmoid' is MiniMax-M2's")
    return _mixtral_fields(config) | {"score": "sigmoid", "balancing": "bias"}


def _minimax_m2_readers(checkpoint: Checkpoint, prefix: str) -> Iterator[tuple[str, Reader]]:
    yield from _mixtral_readers(checkpoint, prefix)
    yield "router_bias", vector(checkpoint, f"{prefix}.block_sparse_moe.e_score_correction_bias")


# -- gpt-oss -----------------------------------------------------------------------------------------------------------


def _gpt_oss_fields(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "hidden_size": config["hidden_size"],
        "intermediate_size": config["intermediate_size"],
        "num_experts": config["num_local_experts"],
        "top_k": config["num_experts_per_tok"],
        "activation": "clipped_swiglu",
        "activation_limit": float(config.get("swiglu_limit", 7.0)),
        "activation_alpha": 1.702,
        "expert_bias": True,
        "logits_bias": True,
        "balancing": "none",
    }


def _gpt_oss_readers(checkpoint: Checkpoint, prefix: str) -> Iterator[tuple[str, Reader]]:
    """All experts in one tensor, `[E, in, out]` already; gate and up take turns in its last dimension."""
    router, experts = f"{prefix}.mlp.router", f"{prefix}.mlp.experts"
    yield "router", transposed(checkpoint, f"{router}.weight")
    yield "logits_bias", vector(checkpoint, f"{router}.bias")
    for offset, name in enumerate(("gate", "up")):
        yield name, _every_other(checkpoint, f"{experts}.gate_up_proj", offset)
        yield f"{name}_bias", _every_other(checkpoint, f"{experts}.gate_up_proj_bias", offset)
    yield "down", lambda index: _stacked(checkpoint, f"{experts}.down_proj", index)
    yield "down_bias", vector(checkpoint, f"{experts}.down_proj_bias")


def _every_other(checkpoint: Checkpoint, name: str, offset: int) -> Reader:
    def read(index: Index) -> np.ndarray:
        *before, last = index
        begin, end, _ = last.indices(1 << 62)
        both = slice(2 * begin, None if last.stop is None else 2 * end)
        return _stacked(checkpoint, name, (*before, both))[..., offset::2]

    return read


def _stacked(checkpoint: Checkpoint, name: str, index: Index) -> np.ndarray:
    """Reads a part of `[E, in, out]`, or of MXFP4 weights stored as `[E, out, in]` in blocks of 32 along `in`."""
    if f"{name}_blocks" not in checkpoint:
        return checkpoint.read(name, index)
    which, rows, columns = index
    part = (which, columns)
    whole = quantized.mxfp4(checkpoint.read(f"{name}_blocks", part), checkpoint.read(f"{name}_scales", part))
    return whole[:, :, rows].swapaxes(1, 2)


def _always(config: dict[str, Any], layer: int) -> bool:
    return True


_DEEPSEEK = Family(_deepseek_is_moe, _deepseek_fields, _deepseek_readers)

FAMILIES = {
    "mixtral": Family(_always, _mixtral_fields, _mixtral_readers),
    "qwen3_moe": Family(_qwen3_is_moe, _qwen3_fields, _qwen3_readers),
    "olmoe": Family(_always, _olmoe_fields, _qwen3_readers),
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v32": _DEEPSEEK,
    "kimi_k2": _DEEPSEEK,
    "glm4_moe": _DEEPSEEK,
    "dots1": _DEEPSEEK,
    "minimax_m2": Family(_always, _minimax_m2_fields, _minimax_m2_readers),
    "gpt_oss": Family(_always, _gpt_oss_fields, _gpt_oss_readers),
}
"""By `model_type` of `config.json`, or of its `text_config`."""


def register_family(model_type: str, family: Family) -> None:
    """Lets `load_hugging_face` read checkpoints of another `model_type`, or read a known one in another way.

    Args:
      model_type: as in `config.json`, or in its `text_config`.
      family: for example `dataclasses.replace(FAMILIES["mixtral"], fields=...)` for a model that differs in its config
        alone; `matrices`, `transposed` and `vector` make readers.

    Raises TypeError for an argument of another type.
    """
    if not isinstance(model_type, str) or not model_type:
        raise TypeError(f"model_type={model_type!r}: must be the string in config.json")
    if not isinstance(family, Family):
        raise TypeError(f"family={family!r}: must be a xen_moe_jax.flax.hugging_face.Family")
    FAMILIES[model_type] = family
