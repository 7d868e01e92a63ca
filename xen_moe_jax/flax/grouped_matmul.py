"""Which grouped matmul the experts use: chosen once a process and platform, and shown by `xen-moe-jax doctor`.

A grouped matmul multiplies rows `[C, A]`, sorted by expert, with weights `[L, A, B]`, expert by expert: `group_sizes`
int32 `[L]` says how many rows each has. `jax.lax.ragged_dot` is always there; XLA runs it at a few percent of a GPU's
peak. tokamax (the extra "tokamax") has kernels for NVIDIA GPUs and TPUs behind the same call.
"""

from __future__ import annotations

import functools
import importlib.util
import warnings
from collections.abc import Callable

import jax

GroupedMatmul = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""`(rows [C, A], weights [L, A, B], group_sizes int32 [L]) -> [C, B]`; rows past the last group are unspecified."""

TOKAMAX_PLATFORMS = ("gpu", "cuda", "tpu")
"""Platforms on which "auto" takes tokamax where it is installed: elsewhere it computes what `ragged_dot` does."""


def ragged_dot(rows: jax.Array, weights: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """`jax.lax.ragged_dot`."""
    return jax.lax.ragged_dot(rows, weights, group_sizes)


def tokamax(rows: jax.Array, weights: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """`tokamax.ragged_dot`: its best implementation for the device, an autotuned one where tokamax has it cached."""
    import tokamax as library

    return library.ragged_dot(rows, weights, group_sizes, manual_axis_type=jax.typeof(rows).manual_axis_type)


BY_NAME: dict[str, GroupedMatmul] = {"ragged_dot": ragged_dot, "tokamax": tokamax}


def installed() -> bool:
    """Whether tokamax can be imported."""
    return importlib.util.find_spec("tokamax") is not None


def choose(grouped_matmul: str | GroupedMatmul) -> GroupedMatmul:
    """The function behind `MoEConfig.grouped_matmul`.

    Raises ModuleNotFoundError for "tokamax" where it is not installed.
    """
    if not isinstance(grouped_matmul, str):
        return grouped_matmul
    if grouped_matmul == "auto":
        return BY_NAME[automatic(jax.default_backend())]
    if grouped_matmul == "tokamax" and not installed():
        raise ModuleNotFoundError(
            "MoEConfig.grouped_matmul='tokamax': not installed; pip install 'xen-moe-jax[tokamax]', or use 'auto'",
            name="tokamax",
        )
    return BY_NAME[grouped_matmul]


@functools.cache
def automatic(platform: str) -> str:
    """What "auto" means on a platform, decided once; on a GPU without tokamax it warns, once."""
    if platform in TOKAMAX_PLATFORMS and installed():
        return "tokamax"
    if platform in ("gpu", "cuda"):
        warnings.warn(
            "the experts of MoE layers use jax.lax.ragged_dot, which runs at a few percent of a GPU's peak: "
            "pip install 'xen-moe-jax[tokamax]' for kernels made for it (MoEConfig(grouped_matmul='ragged_dot') keeps "
            "this one and says nothing)",
            stacklevel=2,
        )
    return "ragged_dot"


def describe(platform: str) -> dict[str, str]:
    """For `doctor`: the choice on a platform without its warning, what tokamax is here, and the remedy if any."""
    has = installed()
    name = "tokamax" if has and platform in TOKAMAX_PLATFORMS else "ragged_dot"
    slow = platform in ("gpu", "cuda") and not has
    choice = "tokamax" if name == "tokamax" else "jax.lax.ragged_dot"
    return {"choice": choice, "remedy": "pip install 'xen-moe-jax[tokamax]'" if slow else ""}
