"""Decode with a Flax Linen MoE layer in the padded layout: few tokens, experts as one masked batched matmul.

The layout is a choice of speed: the same weights give the same outputs in both.
"""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from xen_moe_jax.flax import MoEConfig
from xen_moe_jax.flax.linen import MoE


def main() -> float:
    """Returns the largest difference between the two layouts' outputs."""
    mesh = jax.make_mesh((jax.device_count(),), ("ep",), axis_types=(jax.sharding.AxisType.Auto,))
    grouped = MoEConfig(
        hidden_size=64, intermediate_size=96, num_experts=32, top_k=4, num_shared_experts=1, dtype=jnp.bfloat16
    )
    padded = dataclasses.replace(grouped, layout="padded")
    with jax.set_mesh(mesh):
        # 5 sequences, one new token each: not a multiple of the devices, so the layer pads with unused tokens.
        x = jax.random.normal(jax.random.key(0), (5, 1, grouped.hidden_size), jnp.bfloat16)
        variables = MoE(grouped).init(jax.random.key(1), x)
        print("sharding of the expert weights:", nn.get_partition_spec(variables)["params"]["gate"])

        variables = nn.unbox(variables)
        y_grouped, _ = jax.jit(MoE(grouped).apply)(variables, x)
        y_padded, metrics = jax.jit(MoE(padded).apply)(variables, x)
    difference = float(np.abs(np.asarray(y_padded, np.float32) - np.asarray(y_grouped, np.float32)).max())
    used = np.flatnonzero(np.asarray(metrics.tokens_per_expert))
    print(f"{x.shape[0]} tokens used {used.size} of {grouped.num_experts} experts; layouts differ by {difference:.1e}")
    return difference


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    main()
