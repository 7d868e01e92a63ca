"""Train a Flax NNX model with an MoE layer: experts over the mesh axis "ep", balanced by a router bias.

Run it anywhere: python examples/train_nnx.py. On a machine without accelerators it makes 8 virtual CPU devices.
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from xen_moe_jax.flax import MoEConfig
from xen_moe_jax.flax.nnx import MoE

FEATURES = 32


class Model(nnx.Module):
    """One MoE layer with a residual, and a linear read-out."""

    def __init__(self, config: MoEConfig, *, rngs: nnx.Rngs) -> None:
        self.moe = MoE(config, rngs=rngs)
        self.read_out = nnx.Linear(FEATURES, 1, rngs=rngs)

    def __call__(self, x: jax.Array):
        y, metrics = self.moe(x)
        return self.read_out(x + y)[..., 0], metrics


@nnx.jit
def train_step(model: Model, optimizer: nnx.Optimizer, x: jax.Array, target: jax.Array):
    def loss_of(model: Model):
        prediction, metrics = model(x)
        return jnp.mean((prediction - target) ** 2) + metrics.aux_loss, metrics

    (loss, metrics), gradients = nnx.value_and_grad(loss_of, has_aux=True)(model)
    optimizer.update(model, gradients)
    model.moe.update_bias(metrics)  # once per step; with balancing="aux_loss" the loss does it instead
    return loss, metrics


def main(steps: int = 60) -> list[float]:
    """Fits `|x_0| + |x_1|`; returns the loss of every step."""
    mesh = jax.make_mesh((jax.device_count(),), ("ep",), axis_types=(jax.sharding.AxisType.Auto,))
    config = MoEConfig(
        hidden_size=FEATURES,
        intermediate_size=32,
        num_experts=16,
        top_k=2,
        score="sigmoid",  # DeepSeek-V3's router: sigmoid scores, a bias for balance, groups of experts
        balancing="bias",
        bias_update_rate=0.01,
        num_groups=4,
        topk_groups=2,
    )
    with jax.set_mesh(mesh):
        model = Model(config, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)
        over_ranks = jax.NamedSharding(mesh, jax.P("ep"))
        losses = []
        for step in range(steps):
            x = jax.device_put(jax.random.normal(jax.random.key(step), (256, FEATURES)), over_ranks)
            loss, metrics = train_step(model, optimizer, x, jnp.abs(x[:, 0]) + jnp.abs(x[:, 1]))
            losses.append(float(loss))
            if step % 10 == 0 or step == steps - 1:
                print(f"step {step:>3}  loss {losses[-1]:.3f}  busiest expert over the mean {metrics.max_load:.2f}")
    return losses


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    main()
