"""MaxText's routed experts by dispatch and combine: call `install` before training.

Where `sparse_matmul=true` and there are several expert shards, MaxText sorts the rows by expert, exchanges them by
`jax.lax.ragged_all_to_all`, sorts them again, and takes all of it back. `install` puts one `dispatch` and one `combine`
there. Router, losses, grouped matmuls, biases and quantization stay MaxText's own, and so does `use_ring_of_experts`.
"""

import jax
import jax.numpy as jnp
from maxtext.common.common_types import DecoderBlockType
from maxtext.layers import moe
from maxtext.version import __version__

import xen_moe_jax as xm

VERSION = "0.2.5"
"""The release of MaxText whose functions are replaced here; all of them are in maxtext/layers/moe.py."""
MoE, RouteOutput = moe.RoutedMoE, moe.RouteOutput
own_permute, own_unpermute, expert_shards = MoE.permute, MoE.unpermute, MoE.get_expert_parallelism_size


def is_ours(layer) -> bool:
    """Returns True where dispatch sends the rows: several expert shards, and MaxText's all-to-all, not its ring."""
    return expert_shards(layer) > 1 and not layer.config.use_ring_of_experts


def permute(layer, inputs, gate_logits, pre_bias_logits, use_custom_sort_vjp=True, rngs=None, **options):
    """Replaces MaxText's sort of this shard's slots: returns the rows of this shard's experts, from every shard."""
    if not is_ours(layer):
        return own_permute(layer, inputs, gate_logits, pre_bias_logits, use_custom_sort_vjp, rngs, **options)
    chosen = [options.get(name) for name in ("input_ids", "forced_routed_experts")]
    weights, experts = layer.get_topk(gate_logits, pre_bias_logits, rngs, *chosen)  # [batch, length, top-k] each
    # MaxText's balancing loss and bias updates are of the same choice. Its sort is not used, so that XLA removes it.
    options["precomputed_topk"] = weights, experts
    own = own_permute(layer, inputs, gate_logits, pre_bias_logits, use_custom_sort_vjp, rngs, **options)
    lb_loss, bias_updates = own[5:7]

    slots, shards = experts.size, expert_shards(layer)
    x, experts, weights = (a.reshape(slots // experts.shape[-1], -1) for a in (inputs, experts, weights))
    if layer.config.decoder_block == DecoderBlockType.LLAMA4:  # weighs what goes into the expert
        x, weights = x * jax.nn.sigmoid(weights.astype(jnp.float32)), jnp.ones_like(weights)
    factor = -1.0 if layer.force_dropless else layer.get_ragged_buffer_factor()
    capacity = layer.get_ragged_buffer_size(slots, shards, layer.num_experts, experts.shape[-1], factor)
    routed = xm.dispatch(
        x.astype(layer.dtype), experts, weights, num_experts=layer.num_experts,
        axis_name=layer._expert_parallelism_name, capacity=capacity if factor > 0 else None, drop="source",
    )  # fmt: skip
    overflow = routed.num_dropped > 0
    expert_of_row = jnp.minimum(routed.expert_ids(), layer.num_experts // shards - 1)  # valid past the last group, too
    way_back = routed.handle, overflow
    return (routed.x, way_back, weights, routed.group_sizes, expert_of_row, lb_loss, bias_updates,
            None, overflow, None, None)  # fmt: skip


def unpermute(layer, intermediate, way_back, weights, batch_size, sequence_length, *arguments, **options):
    """Replaces the sort back: expert outputs return to the shards of their tokens, which weigh and add them."""
    if not is_ours(layer):
        return own_unpermute(layer, intermediate, way_back, weights, batch_size, sequence_length, *arguments, **options)
    y = xm.combine(intermediate, way_back[0])  # `[rows, emb]`, or `[rows, emb / tensor shards]`
    return y.reshape(batch_size, sequence_length, -1).astype(layer.dtype)


def route_output(*, sorted_selected_experts, **fields):
    """MaxText's all-to-all says nothing of rows that it dropped; dispatch does."""
    if isinstance(sorted_selected_experts, tuple):
        fields["has_overflow"] = sorted_selected_experts[1]
    return RouteOutput(sorted_selected_experts=sorted_selected_experts, **fields)


def get_expert_parallelism_size(layer) -> int:
    """1 inside `shard_map`, where nothing is left for MaxText to exchange."""
    inside = set(jax.sharding.get_abstract_mesh().manual_axes) & {*jax.tree.leaves(layer._expert_parallelism_name)}
    return 1 if inside and is_ours(layer) else expert_shards(layer)


def install() -> None:
    """Replaces four methods and a constructor of `maxtext.layers.moe`, for every layer of this process.

    Raises:
      RuntimeError: this is another MaxText than the one that the replacements were written and tested for.
    """
    if __version__ != VERSION:
        raise RuntimeError(
            f"maxtext_experts is for MaxText {VERSION}, and {__version__} is installed: compare what it replaces in "
            "maxtext/layers/moe.py, then set VERSION"
        )
    MoE.permute, MoE.unpermute, MoE.get_expert_parallelism_size = permute, unpermute, get_expert_parallelism_size
    moe.RouteOutput = route_output
