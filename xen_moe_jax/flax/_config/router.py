"""Fields of `MoEConfig` about the router: how a token's experts and their weights are chosen."""

from __future__ import annotations

import dataclasses
from typing import Any

from xen_moe_jax.flax._config.checks import (
    require,
    require_booleans,
    require_choices,
    require_numbers,
    require_positive_ints,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RouterFields:
    """Router: how a token's experts and their weights are chosen.

    Attributes:
      top_k: experts per token `K`.
      choice: how experts are chosen: "top_k" of the scores, or "hash" of `token_ids` (arXiv:2106.04426), which the call
        must then be given. Weights are the scores of the chosen experts in both.
      score: router scores, "softmax" over experts, "sigmoid" of each (DeepSeek-V3), "sparsemixer" (Phi-3.5-MoE at
        inference: a softmax whose weights are `routing.sparsemixer_weights`), or, with choice="hash", "uniform": no
        router at all.
      sparsemixer_eps: `eps` of `routing.sparsemixer_weights`.
      normalize_weights: divide the chosen scores by their sum, so that a token's weights add up to `weight_scale`.
      min_score_sum: normalized softmax weights are divided by `max(sum, min_score_sum)` (ERNIE 4.5).
      weight_scale: factor on the router weights (DeepSeek-V3: 2.5).
      logits_bias: the router's logits have a bias (a parameter; the "bias" of `balancing` is another thing).
      num_groups, topk_groups: experts form `num_groups` equal groups and a token may use the best `topk_groups` only;
        1 and 1 is plain top-k.
      group_best: a group's score is the sum of its `group_best` best (DeepSeek-V3: 2, DeepSeek-V2: 1).
      return_topk_idx: `MoEMetrics.topk_idx` holds the experts that each token used (router replay).
    """

    top_k: int
    choice: str = "top_k"
    score: str = "softmax"
    sparsemixer_eps: float = 0.01
    normalize_weights: bool = True
    min_score_sum: float = 0.0
    weight_scale: float = 1.0
    logits_bias: bool = False
    num_groups: int = 1
    topk_groups: int = 1
    group_best: int = 2
    return_topk_idx: bool = False


def check_router(config: Any) -> None:
    """Raises ValueError for the first of these fields of a `MoEConfig` that is wrong. `num_experts` is valid here."""
    require_positive_ints(config, "top_k", "num_groups", "topk_groups", "group_best")
    experts, groups = config.num_experts, config.num_groups
    require(config.top_k <= experts, "top_k", config.top_k, f"must be <= num_experts={experts}")
    require(experts % groups == 0, "num_groups", groups, f"must divide num_experts={experts}")
    require(config.topk_groups <= groups, "topk_groups", config.topk_groups, f"must be <= num_groups={groups}")
    reachable = config.topk_groups * (experts // groups)
    require(config.top_k <= reachable, "top_k", config.top_k, f"topk_groups groups hold only {reachable} experts")
    require_choices(config, "choice", ("top_k", "hash"))
    require_choices(config, "score", ("softmax", "sigmoid", "sparsemixer", "uniform"))
    require_booleans(config, "normalize_weights", "logits_bias", "return_topk_idx")
    require_numbers(config, "weight_scale", "sparsemixer_eps", "min_score_sum")
    floor = config.min_score_sum
    remedy = "only score='softmax' with normalize_weights=True divides by a sum that it could bound; leave it 0"
    require(not floor or (config.score == "softmax" and config.normalize_weights), "min_score_sum", floor, remedy)
    if config.score == "sparsemixer":
        for name, needed in (("normalize_weights", False), ("choice", "top_k"), ("num_groups", 1)):
            require(getattr(config, name) == needed, name, getattr(config, name), f"sparsemixer needs {needed!r}")
    if config.choice == "hash":
        require(groups == 1, "num_groups", groups, "choice='hash' knows no groups; leave it 1")
    if config.score == "uniform":
        require(config.choice == "hash", "score", config.score, "only choice='hash' can do without scores")
        require(not config.logits_bias, "logits_bias", config.logits_bias, "score='uniform' has no logits")
