"""Gradients through an fp8 wire: dispatch sends float8_e4m3fn with one scale per 128 elements, combine float32.

The wire is straight-through: the forward pass sees the rounding of fp8, gradients travel in the input's own dtype.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import xen_moe_jax as xm

TOKENS, FEATURES, EXPERTS, TOP_K = 64, 256, 16, 2


def moe_layer(wire, x: jax.Array, router: jax.Array, weights: jax.Array) -> jax.Array:
    """`x [T, H]`, `router [H, E]`, this rank's `weights [L, H, H]` -> `[T, H]`."""
    topk_idx, topk_weights = xm.routing.top_k(x @ router, TOP_K)
    routed = xm.dispatch(x, topk_idx, topk_weights, num_experts=EXPERTS, axis_name="ep", wire=wire)
    y = jax.nn.silu(jax.lax.ragged_dot(routed.x, weights, routed.group_sizes))
    return xm.combine(y, routed.handle)


def main() -> dict[str, float]:
    """Returns the relative error that the fp8 wire adds to the output and to each gradient."""
    ranks = jax.device_count()
    mesh = jax.make_mesh((ranks,), ("ep",), axis_types=(jax.sharding.AxisType.Auto,))
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (ranks * TOKENS, FEATURES))
    router = jax.random.normal(keys[1], (FEATURES, EXPERTS)) / FEATURES**0.5
    weights = jax.random.normal(keys[2], (EXPERTS, FEATURES, FEATURES)) / FEATURES**0.5

    def run(wire):
        layer = jax.shard_map(
            functools.partial(moe_layer, wire),
            mesh=mesh,
            in_specs=(jax.P("ep"), jax.P(), jax.P("ep")),
            out_specs=jax.P("ep"),
        )
        gradient = jax.jit(jax.grad(lambda *a: jnp.mean(layer(*a) ** 2), argnums=(0, 1, 2)))
        names = ("output", "gradient of x", "gradient of the router", "gradient of the experts")
        return dict(zip(names, (jax.jit(layer)(x, router, weights), *gradient(x, router, weights)), strict=True))

    exact, quantized = run(None), run("float8_e4m3fn")
    errors = {}
    for name, reference in exact.items():
        reference = np.asarray(reference)
        errors[name] = float(np.linalg.norm(np.asarray(quantized[name]) - reference) / np.linalg.norm(reference))
        print(f"{name:<24} relative error {errors[name]:.2%}")
    bytes_per_row = FEATURES * 4, FEATURES + 4 * (FEATURES // 128)
    print(f"bytes of a row on the wire: {bytes_per_row[0]} -> {bytes_per_row[1]}")
    return errors


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    main()
