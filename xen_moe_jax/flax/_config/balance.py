"""Fields of `MoEConfig` about the balance: losses and the bias that keep the experts evenly loaded."""

from __future__ import annotations

import dataclasses
from typing import Any

from xen_moe_jax.flax._config.checks import require, require_choices, require_numbers


@dataclasses.dataclass(frozen=True, kw_only=True)
class BalanceFields:
    """Balance: losses and the bias that keep the experts evenly loaded.

    Attributes:
      balancing: "aux_loss" (the load-balancing loss of the Switch Transformer, in `MoEMetrics.aux_loss`), "bias" (a
        router bias that steers the choice and not the weights, moved after each step: arXiv:2408.15664), or "none".
      aux_loss_weight: factor on the load-balancing loss; used with balancing="aux_loss".
      sequence_loss_weight: factor on the balancing loss of each sequence (DeepSeek-V3, arXiv:2412.19437, eq. 17); a
        sequence is the dimension before the features, `x [..., S, H]`.
      z_loss_weight: factor on the mean squared log-sum-exp of the logits (ST-MoE, arXiv:2202.08906, eq. 5).
      bias_update_rate: how far one update moves the bias; used with balancing="bias".
    """

    balancing: str = "aux_loss"
    aux_loss_weight: float = 0.01
    sequence_loss_weight: float = 0.0
    z_loss_weight: float = 0.0
    bias_update_rate: float = 0.001


def check_balance(config: Any) -> None:
    """Raises ValueError for the first of these fields of a `MoEConfig` that is wrong, alone or beside the router's."""
    require_choices(config, "balancing", ("aux_loss", "bias", "none"))
    require_numbers(config, "aux_loss_weight", "sequence_loss_weight", "z_loss_weight", "bias_update_rate")
    if config.choice == "hash":
        require(config.balancing == "none", "balancing", config.balancing, "choice='hash' has no balance; use 'none'")
        weight = config.sequence_loss_weight
        require(weight == 0, "sequence_loss_weight", weight, "choice='hash' cannot be steered; leave it 0")
    if config.score == "sparsemixer":
        remedy = "sparsemixer chooses by the logits alone; use 'aux_loss' or 'none'"
        require(config.balancing != "bias", "balancing", config.balancing, remedy)
    if config.score == "uniform":
        require(config.z_loss_weight == 0, "z_loss_weight", config.z_loss_weight, "score='uniform' has no logits")
