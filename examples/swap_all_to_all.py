"""A hand-written MoE layer around `jax.lax.all_to_all`: swap in `xen_moe_jax.all_to_all` and nothing else changes.

The layer is the classic one: each rank fills a fixed number of places per expert, exchanges them, runs its expert, and
exchanges back. `xm.dispatch` needs no such places and drops nothing; the swap is the first step for existing code.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import xen_moe_jax as xm

TOKENS, FEATURES, PLACES = 16, 32, 6


def moe_layer(all_to_all, x: jax.Array, expert: jax.Array, weight: jax.Array) -> jax.Array:
    """One expert per rank. `x [T, H]`, `expert int32 [T]`, this rank's `weight [1, H, H]` -> `[T, H]`."""
    ranks = jax.lax.axis_size("ep")
    chosen = expert[:, None] == jnp.arange(ranks)
    place = jnp.take_along_axis(jnp.cumsum(chosen, axis=0) - 1, expert[:, None], axis=1)[:, 0]
    send = jnp.zeros((ranks, PLACES, FEATURES), x.dtype).at[expert, place].set(x, mode="drop")
    received = all_to_all(send, "ep", 0, 0)
    y = jax.nn.silu(received @ weight[0])
    returned = all_to_all(y, "ep", 0, 0)
    return returned.at[expert, place].get(mode="fill", fill_value=0)


def main() -> float:
    """Returns the largest difference between the two programs, in outputs and gradients."""
    ranks = jax.device_count()
    mesh = jax.make_mesh((ranks,), ("ep",), axis_types=(jax.sharding.AxisType.Auto,))
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (ranks * TOKENS, FEATURES))
    expert = jax.random.randint(keys[1], (ranks * TOKENS,), 0, ranks)
    weights = jax.random.normal(keys[2], (ranks, FEATURES, FEATURES)) / FEATURES**0.5

    def run(all_to_all):
        layer = jax.shard_map(
            functools.partial(moe_layer, all_to_all), mesh=mesh, in_specs=jax.P("ep"), out_specs=jax.P("ep")
        )
        gradient = jax.jit(jax.grad(lambda x, w: jnp.sum(layer(x, expert, w) ** 2), argnums=(0, 1)))
        return jax.jit(layer)(x, expert, weights), gradient(x, weights)

    before, after = run(jax.lax.all_to_all), run(xm.all_to_all)
    differences = jax.tree.map(lambda a, b: float(np.abs(np.asarray(a) - np.asarray(b)).max()), before, after)
    largest = max(jax.tree.leaves(differences))
    print(f"jax.lax.all_to_all -> xen_moe_jax.all_to_all on {ranks} ranks: largest difference {largest}")
    return largest


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    main()
