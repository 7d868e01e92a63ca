"""The families of models: how a `config.json` becomes a `MoEConfig`, and the reader of each parameter.

A field of the config that the layer would not follow is refused, and so is a tensor of the layer that no reader reads
(`Checkpoint.unread`). Fields of training alone (jitter, auxiliary losses, token drops) are ignored.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from xen_moe_jax.flax.hugging_face.checkpoint import Checkpoint
from xen_moe_jax.flax.hugging_face.readers import Reader, every_other, fused, matrices, stacked, transposed, vector

Config = dict[str, Any]
Readers = Iterator[tuple[str, Reader]]


@dataclasses.dataclass(frozen=True)
class Family:
    """The description of one model type: its config and the places of its parameters.

    Attributes:
      is_moe: `(config.json, layer) -> bool`: True where the layer has experts.
      fields: `config.json` to arguments of `MoEConfig`.
      readers: `(checkpoint, prefix of the layer)` to a reader of each parameter.
      unused: ends of the names of tensors beside the parameters that the layer does without; any other tensor that no
        reader reads is an error.
    """

    is_moe: Callable[[Config, int], bool]
    fields: Callable[[Config], Config]
    readers: Callable[[Checkpoint, str], Readers]
    unused: tuple[str, ...] = ()


def _only(config: Config, **known: Any) -> None:
    """Raises ValueError for the first field that is there and has another value than the one known."""
    for name, value in known.items():
        given = config.get(name)
        if given is not None and given != value:
            raise ValueError(
                f"config.json has {name}={given!r}: only {value!r} is known for {config['model_type']}; "
                "register_family takes a description of your own"
            )


def _step(config: Config, name: str) -> int:
    """Returns the field, a distance between layers, or 1 without it."""
    step = config.get(name)
    step = 1 if step is None else step
    if isinstance(step, bool) or not isinstance(step, int) or step < 1:
        raise ValueError(f"config.json has {name}={step!r}: must be a positive int, the distance between layers")
    return step


def _always(config: Config, layer: int) -> bool:
    return True


# -- Mixtral -----------------------------------------------------------------------------------------------------------


def _mixtral_fields(config: Config) -> Config:
    _only(config, hidden_act="silu")
    return {
        "hidden_size": config["hidden_size"],
        "intermediate_size": config["intermediate_size"],
        "num_experts": config["num_local_experts"],
        "top_k": config["num_experts_per_tok"],
        "balancing": "none",
    }


def _mixtral_readers(checkpoint: Checkpoint, prefix: str) -> Readers:
    moe = f"{prefix}.block_sparse_moe"
    yield "router", transposed(checkpoint, f"{moe}.gate.weight")
    for name, theirs in (("gate", "w1"), ("up", "w3"), ("down", "w2")):
        template = f"{moe}.experts.{{}}.{theirs}.weight"
        yield name, matrices(checkpoint, template, checkpoint.config["num_local_experts"])


# -- Phi-3.5-MoE -------------------------------------------------------------------------------------------------------


def _phimoe_fields(config: Config) -> Config:
    _only(config, num_experts_per_tok=2)  # its router draws two, whatever the config says
    return _mixtral_fields(config) | {
        "score": "sparsemixer",
        "sparsemixer_eps": config["router_jitter_noise"],
        "normalize_weights": False,
    }


# -- MiniMax-M2 --------------------------------------------------------------------------------------------------------


def _minimax_m2_fields(config: Config) -> Config:
    _only(config, scoring_func="sigmoid", use_routing_bias=True, shared_intermediate_size=0)
    return _mixtral_fields(config) | {"score": "sigmoid", "balancing": "bias"}


def _minimax_m2_readers(checkpoint: Checkpoint, prefix: str) -> Readers:
    yield from _mixtral_readers(checkpoint, prefix)
    yield "router_bias", vector(checkpoint, f"{prefix}.block_sparse_moe.e_score_correction_bias")


# -- Granite -----------------------------------------------------------------------------------------------------------


def _granite_is_moe(config: Config, layer: int) -> bool:
    return config["num_local_experts"] > 0  # Granite 4.0 has dense models of the same type


def _granite_shared_fields(config: Config) -> Config:
    """Softmax over the chosen logits is softmax over all, normalized: Mixtral's. The shared expert stands beside it."""
    return _mixtral_fields(config) | {"shared_intermediate_size": config["shared_intermediate_size"] or None}


def _granite_readers(checkpoint: Checkpoint, prefix: str) -> Readers:
    moe = f"{prefix}.block_sparse_moe"
    yield "router", transposed(checkpoint, f"{moe}.router.layer.weight")
    yield from _granite_mlp(checkpoint, moe, "")


def _granite_shared_readers(checkpoint: Checkpoint, prefix: str) -> Readers:
    yield from _granite_readers(checkpoint, prefix)
    if checkpoint.config["shared_intermediate_size"]:
        yield from _granite_mlp(checkpoint, f"{prefix}.shared_mlp", "shared_")


def _granite_mlp(checkpoint: Checkpoint, place: str, start: str) -> Readers:
    for part, name in enumerate(("gate", "up")):
        tensor = f"{place}.input_linear.weight"
        yield f"{start}{name}", fused(checkpoint, tensor, out_first=True, part=part, parts=2)
    yield f"{start}down", fused(checkpoint, f"{place}.output_linear.weight", out_first=True)


# -- Qwen --------------------------------------------------------------------------------------------------------------


def _qwen_is_moe(config: Config, layer: int) -> bool:
    dense = layer in (config.get("mlp_only_layers") or ())
    return not dense and _num_experts(config) > 0 and (layer + 1) % _step(config, "decoder_sparse_step") == 0


def _num_experts(config: Config) -> int:
    """Returns the number of experts: "num_experts" as published, "num_local_experts" as transformers 5 writes it."""
    return config["num_experts" if "num_experts" in config else "num_local_experts"]


def _qwen3_fields(config: Config) -> Config:
    _only(config, hidden_act="silu")
    return {
        "hidden_size": config["hidden_size"],
        "intermediate_size": config["moe_intermediate_size"],
        "num_experts": _num_experts(config),
        "top_k": config["num_experts_per_tok"],
        "normalize_weights": bool(config.get("norm_topk_prob", False)),  # transformers' default
        "balancing": "none",
    }


def _qwen2_fields(config: Config) -> Config:
    """A shared expert behind a sigmoid gate."""
    wide = config["shared_expert_intermediate_size"]
    return _qwen3_fields(config) | {"shared_intermediate_size": wide, "shared_expert_gate": True}


def _qwen3_next_fields(config: Config) -> Config:
    return _qwen2_fields({"norm_topk_prob": True} | config)  # transformers' default


def _normalized(fields: Callable[[Config], Config]) -> Callable[[Config], Config]:
    """Arguments for models whose router divides by the sum even if the config does not say so."""

    def normalized(config: Config) -> Config:
        _only(config, norm_topk_prob=True)
        return fields(config) | {"normalize_weights": True}

    return normalized


def _mlp_readers(checkpoint: Checkpoint, prefix: str, num_experts: int, *, out_first: bool = True) -> Readers:
    """One matrix an expert, or one tensor for all experts: of `[E, out, in]` where `out_first`."""
    experts = f"{prefix}.mlp.experts"
    yield "router", transposed(checkpoint, f"{prefix}.mlp.gate.weight")
    if f"{experts}.gate_up_proj" in checkpoint:
        for part, name in enumerate(("gate", "up")):
            yield name, fused(checkpoint, f"{experts}.gate_up_proj", out_first=out_first, part=part, parts=2)
        yield "down", fused(checkpoint, f"{experts}.down_proj", out_first=out_first)
        return
    for name in ("gate", "up", "down"):
        yield name, matrices(checkpoint, f"{experts}.{{}}.{name}_proj.weight", num_experts)


def _shared_readers(checkpoint: Checkpoint, place: str) -> Readers:
    for name in ("gate", "up", "down"):
        yield f"shared_{name}", transposed(checkpoint, f"{place}.{name}_proj.weight")


def _qwen3_readers(checkpoint: Checkpoint, prefix: str) -> Readers:
    yield from _mlp_readers(checkpoint, prefix, _num_experts(checkpoint.config))


def _qwen3_vl_readers(checkpoint: Checkpoint, prefix: str) -> Readers:
    """Published as `[E, in, out]`, saved by transformers 5 as `[E, out, in]`: both shapes together tell which it is."""
    config, experts = checkpoint.config, f"{prefix}.mlp.experts"
    hidden, width = config["hidden_size"], config["moe_intermediate_size"]
    shapes = [checkpoint.shape(f"{experts}.{name}")[1:] for name in ("gate_up_proj", "down_proj")]
    out_first = shapes == [(2 * width, hidden), (hidden, width)]
    yield from _mlp_readers(checkpoint, prefix, _num_experts(config), out_first=out_first)


def _qwen2_readers(checkpoint: Checkpoint, prefix: str) -> Readers:
    yield from _qwen3_readers(checkpoint, prefix)
    yield "shared_router", transposed(checkpoint, f"{prefix}.mlp.shared_expert_gate.weight")
    yield from _shared_readers(checkpoint, f"{prefix}.mlp.shared_expert")


# -- OLMoE -------------------------------------------------------------------------------------------------------------


def _olmoe_fields(config: Config) -> Config:
    return _qwen3_fields(config | {"moe_intermediate_size": config["intermediate_size"]})


# -- ERNIE 4.5 ---------------------------------------------------------------------------------------------------------


def _ernie_is_moe(config: Config, layer: int) -> bool:
    last = config.get("moe_layer_end_index")
    last = config["num_hidden_layers"] - 1 if last in (None, -1) else last
    first, step = config["moe_layer_start_index"], _step(config, "moe_layer_interval")
    return first <= layer <= last and (layer + 1) % step == 0


def _ernie_has_bias(config: Config) -> bool:
    """ERNIE's own code makes the bias with `moe_use_aux_free` only; transformers always does, without such a field."""
    return bool(config.get("moe_use_aux_free", True))


def _ernie_fields(config: Config) -> Config:
    _only(config, hidden_act="silu", use_bias=False, moe_gate="topk", moe_gate_act="softmax", moe_norm_gate_logits=True)
    _only(config, moe_use_hard_gate=False, moe_group_experts=False)
    return {
        "hidden_size": config["hidden_size"],
        "intermediate_size": config["moe_intermediate_size"],
        "num_experts": config["moe_num_experts"],
        "top_k": config["moe_k"],
        "min_score_sum": config.get("moe_norm_min", 1e-12),
        "balancing": "bias" if _ernie_has_bias(config) else "none",
        "num_shared_experts": config.get("moe_num_shared_experts") or 0,
    }


def _ernie_readers(checkpoint: Checkpoint, prefix: str) -> Readers:
    config = checkpoint.config
    yield from _mlp_readers(checkpoint, prefix, config["moe_num_experts"])
    if _ernie_has_bias(config):
        name = f"{prefix}.mlp.moe_statics.e_score_correction_bias"  # [1, E]
        yield "router_bias", lambda index: checkpoint.read(name, (slice(0, 1), *index))[0]
    if config.get("moe_num_shared_experts"):
        yield from _shared_readers(checkpoint, f"{prefix}.mlp.shared_experts")


# -- DeepSeek ----------------------------------------------------------------------------------------------------------


def _deepseek_is_moe(config: Config, layer: int) -> bool:
    if "mlp_layer_types" in config:  # DeepSeek-V3.2 as transformers 5 writes it
        return config["mlp_layer_types"][layer] == "sparse"
    return layer >= config.get("first_k_dense_replace", 0) and layer % _step(config, "moe_layer_freq") == 0


def _deepseek_fields(config: Config) -> Config:
    """The fields that V2 and V3 share."""
    _only(config, hidden_act="silu")
    return {
        "hidden_size": config["hidden_size"],
        "intermediate_size": config["moe_intermediate_size"],
        "num_experts": config["n_routed_experts"],
        "top_k": config["num_experts_per_tok"],
        "weight_scale": config["routed_scaling_factor"],
        "num_shared_experts": config.get("n_shared_experts") or 0,
    }


def _deepseek_v3_fields(config: Config) -> Config:
    _only(config, scoring_func="sigmoid", topk_method="noaux_tc")
    return _deepseek_fields(config) | {
        "score": "sigmoid",
        "balancing": "bias",
        "num_groups": config["n_group"],
        "topk_groups": config["topk_group"],
        "normalize_weights": bool(config.get("norm_topk_prob", True)),
    }


def _deepseek_v2_fields(config: Config) -> Config:
    """With `norm_topk_prob`, DeepSeek's own code divides by the sum and does not scale, and transformers' scales and
    does not divide: no published model has it, and it is refused."""
    _only(config, scoring_func="softmax", norm_topk_prob=False, mlp_bias=False)
    method = config.get("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise ValueError(f"config.json has topk_method={method!r}: must be 'greedy' or 'group_limited_greedy'")
    limited = method == "group_limited_greedy"
    groups = {"num_groups": config["n_group"], "topk_groups": config["topk_group"], "group_best": 1} if limited else {}
    return _deepseek_fields(config) | groups | {"normalize_weights": False, "balancing": "none"}


def _deepseek_v2_readers(checkpoint: Checkpoint, prefix: str) -> Readers:
    yield from _mlp_readers(checkpoint, prefix, checkpoint.config["n_routed_experts"])
    if checkpoint.config.get("n_shared_experts"):
        yield from _shared_readers(checkpoint, f"{prefix}.mlp.shared_experts")


def _deepseek_v3_readers(checkpoint: Checkpoint, prefix: str) -> Readers:
    yield from _deepseek_v2_readers(checkpoint, prefix)
    yield "router_bias", vector(checkpoint, f"{prefix}.mlp.gate.e_score_correction_bias")


# -- Llama 4 -----------------------------------------------------------------------------------------------------------


def _llama4_is_moe(config: Config, layer: int) -> bool:
    listed = config.get("moe_layers")
    return (layer + 1) % _step(config, "interleave_moe_layer_step") == 0 if listed is None else layer in listed


def _llama4_fields(config: Config) -> Config:
    """The token that goes into an expert is multiplied by the sigmoid of its logit; one shared expert is as wide."""
    return _mixtral_fields(config) | {
        "score": "sigmoid",
        "normalize_weights": False,
        "apply_weights_to": "input",
        "num_shared_experts": 1,
    }


def _llama4_readers(checkpoint: Checkpoint, prefix: str) -> Readers:
    moe = f"{prefix}.feed_forward"
    yield "router", transposed(checkpoint, f"{moe}.router.weight")
    for part, name in enumerate(("gate", "up")):
        yield name, fused(checkpoint, f"{moe}.experts.gate_up_proj", out_first=False, part=part, parts=2)
    yield "down", fused(checkpoint, f"{moe}.experts.down_proj", out_first=False)
    yield from _shared_readers(checkpoint, f"{moe}.shared_expert")


# -- gpt-oss -----------------------------------------------------------------------------------------------------------


def _gpt_oss_fields(config: Config) -> Config:
    return {
        "hidden_size": config["hidden_size"],
        "intermediate_size": config["intermediate_size"],
        "num_experts": config["num_local_experts"],
        "top_k": config["num_experts_per_tok"],
        "activation": "clipped_swiglu",
        "activation_limit": config.get("swiglu_limit", 7.0),
        "activation_alpha": 1.702,
        "expert_bias": True,
        "logits_bias": True,
        "balancing": "none",
    }


def _gpt_oss_readers(checkpoint: Checkpoint, prefix: str) -> Readers:
    """All experts in one tensor, `[E, in, out]` already; gate and up take turns in its last dimension."""
    router, experts = f"{prefix}.mlp.router", f"{prefix}.mlp.experts"
    yield "router", transposed(checkpoint, f"{router}.weight")
    yield "logits_bias", vector(checkpoint, f"{router}.bias")
    for offset, name in enumerate(("gate", "up")):
        yield name, every_other(checkpoint, f"{experts}.gate_up_proj", offset)
        yield f"{name}_bias", every_other(checkpoint, f"{experts}.gate_up_proj_bias", offset)
    yield "down", lambda index: stacked(checkpoint, f"{experts}.down_proj", index)
    yield "down_bias", vector(checkpoint, f"{experts}.down_proj_bias")


_QWEN2 = Family(_qwen_is_moe, _qwen2_fields, _qwen2_readers)
_QWEN3_5 = Family(_always, _normalized(_qwen2_fields), _qwen2_readers)
_QWEN3_VL = Family(_qwen_is_moe, _normalized(_qwen3_fields), _qwen3_vl_readers)
_DEEPSEEK_V3 = Family(_deepseek_is_moe, _deepseek_v3_fields, _deepseek_v3_readers)
_GRANITE_SHARED = Family(_granite_is_moe, _granite_shared_fields, _granite_shared_readers)
_LLAMA4 = Family(_llama4_is_moe, _llama4_fields, _llama4_readers)

FAMILIES = {
    "mixtral": Family(_always, _mixtral_fields, _mixtral_readers),
    "qwen2_moe": _QWEN2,
    "qwen3_moe": Family(_qwen_is_moe, _qwen3_fields, _qwen3_readers),
    "qwen3_next": Family(_qwen_is_moe, _qwen3_next_fields, _qwen2_readers),
    "qwen3_5_moe": _QWEN3_5,
    "qwen3_5_moe_text": _QWEN3_5,
    "qwen3_vl_moe": _QWEN3_VL,
    "qwen3_vl_moe_text": _QWEN3_VL,
    "olmoe": Family(_always, _olmoe_fields, _qwen3_readers),
    "deepseek_v2": Family(_deepseek_is_moe, _deepseek_v2_fields, _deepseek_v2_readers),
    "deepseek_v3": _DEEPSEEK_V3,
    "deepseek_v32": _DEEPSEEK_V3,
    "kimi_k2": _DEEPSEEK_V3,
    "glm4_moe": _DEEPSEEK_V3,
    "dots1": _DEEPSEEK_V3,
    "minimax_m2": Family(_always, _minimax_m2_fields, _minimax_m2_readers),
    "phimoe": Family(_always, _phimoe_fields, _mixtral_readers),
    "granitemoe": Family(_granite_is_moe, _mixtral_fields, _granite_readers),
    "granitemoeshared": _GRANITE_SHARED,
    "granitemoehybrid": _GRANITE_SHARED,
    "ernie4_5_moe": Family(_ernie_is_moe, _ernie_fields, _ernie_readers, unused=("moe_statics.experts_usage",)),
    "llama4": _LLAMA4,
    "llama4_text": _LLAMA4,
    "gpt_oss": Family(_always, _gpt_oss_fields, _gpt_oss_readers),
}
"""By `model_type` of `config.json`, or of its `text_config`."""


def register_family(model_type: str, family: Family) -> None:
    """Lets `load_hugging_face` read checkpoints of another `model_type`, or read a known one in another way.

    Args:
      model_type: as in `config.json`, or in its `text_config`.
      family: for example `dataclasses.replace(FAMILIES["mixtral"], fields=...)` for a model that differs in its config
        alone; `matrices`, `transposed`, `fused` and `vector` make readers.

    Raises TypeError for an argument of another type.
    """
    if not isinstance(model_type, str) or not model_type:
        raise TypeError(f"model_type={model_type!r}: must be the string in config.json")
    if not isinstance(family, Family):
        raise TypeError(f"family={family!r}: must be a xen_moe_jax.flax.hugging_face.Family")
    FAMILIES[model_type] = family
