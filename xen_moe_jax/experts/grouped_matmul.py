"""Chooses the grouped matmul of the experts, once a process and platform; `xen-moe-jax doctor` shows the choice.

A grouped matmul multiplies rows `[C, A]`, sorted by expert, with weights `[L, A, B]`, expert by expert: `group_sizes`
int32 `[L]` says how many rows each has. `jax.lax.ragged_dot` is always there; XLA runs it at a few percent of a GPU's
peak. This library has kernels of its own for Hopper GPUs (`hopper.py`) and for TPUs (`on_tpu.py`). tokamax (the extra
"tokamax") has kernels for NVIDIA GPUs and TPUs behind the same call. docs/lab/layers.md has the speed of each.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from xen_moe_jax._mesh import platform, vary_alike
from xen_moe_jax.experts import hopper, on_tpu
from xen_moe_jax.experts.ragged_dot import ragged_dot

GroupedMatmul = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""`(rows [C, A], weights [L, A, B], group_sizes int32 [L]) -> [C, B]`; rows past the last group are unspecified."""

TOKAMAX_PLATFORMS = ("gpu", "cuda", "tpu")
"""Platforms on which "auto" takes tokamax where it is installed: elsewhere tokamax only calls `ragged_dot`."""


def tokamax(rows: jax.Array, weights: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """Calls `tokamax.ragged_dot`: its best implementation for the device, an autotuned one where tokamax has it cached.

    Its gradient of the weights multiplies rows past the last group by zero, and a NaN there would stay a NaN. So rows
    are set to zero there and, by the transpose of the second mask, cotangents as well. On a Hopper GPU this gradient is
    that of `jax.lax.ragged_dot`, since tokamax's is off by 3 % of its norm there (docs/lab/layers.md).
    """
    used = (jnp.arange(rows.shape[0], dtype=jnp.int32) < jnp.sum(group_sizes))[:, None]
    rows = jnp.where(used, rows, jnp.zeros((), rows.dtype))
    if hopper.on_hopper():
        out = _by_tokamax_but_the_weights_gradient(*vary_alike(rows, weights, group_sizes))
    else:
        out = _by_tokamax(rows, weights, group_sizes)
    return jnp.where(used, out, jnp.zeros((), out.dtype))


def _by_tokamax(rows: jax.Array, weights: jax.Array, group_sizes: jax.Array) -> jax.Array:
    import tokamax as library

    return library.ragged_dot(rows, weights, group_sizes, manual_axis_type=jax.typeof(rows).manual_axis_type)


@jax.custom_vjp
def _by_tokamax_but_the_weights_gradient(rows: Any, weights: Any, group_sizes: Any) -> Any:
    return _by_tokamax(rows, weights, group_sizes)


def _forward(rows: Any, weights: Any, group_sizes: Any) -> tuple[Any, Any]:
    return _by_tokamax(rows, weights, group_sizes), (rows, weights, group_sizes)


def _backward(kept: Any, cotangent: Any) -> tuple[Any, Any, None]:
    rows, weights, group_sizes = kept
    _, by_rows = jax.vjp(lambda rows: _by_tokamax(rows, weights, group_sizes), rows)
    _, by_weights = jax.vjp(lambda weights: ragged_dot(rows, weights, group_sizes), weights)
    return *by_rows(cotangent), *by_weights(cotangent), None


_by_tokamax_but_the_weights_gradient.defvjp(_forward, _backward)


BY_NAME: dict[str, GroupedMatmul] = {"ragged_dot": ragged_dot, "tokamax": tokamax, "hopper": hopper.grouped_matmul}


def installed() -> bool:
    """Returns True if tokamax can be imported."""
    return importlib.util.find_spec("tokamax") is not None


def choose(grouped_matmul: str | GroupedMatmul) -> GroupedMatmul:
    """Returns the function that a value of `MoEConfig.grouped_matmul` stands for.

    Raises:
      ModuleNotFoundError: "tokamax", where it is not installed.
    """
    if not isinstance(grouped_matmul, str):
        return functools.partial(_of_the_caller, grouped_matmul)
    if grouped_matmul == "auto":
        return auto
    if grouped_matmul == "tokamax" and not installed():
        raise ModuleNotFoundError(
            "grouped_matmul='tokamax': not installed; pip install 'xen-moe-jax[tokamax]', or use 'auto'",
            name="tokamax",
        )
    return BY_NAME[grouped_matmul]


def _of_the_caller(function: GroupedMatmul, rows: jax.Array, weights: jax.Array, group_sizes: jax.Array) -> jax.Array:
    shape = (rows.shape[0], weights.shape[2])
    return checked(function(rows, weights, group_sizes), shape, f"grouped_matmul={name_of(function)}", "[C, B]")


def name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", None) or repr(function)


def checked(result: Any, shape: tuple[int, ...], given: str, what: str) -> Any:
    """Returns the result of a callable of the user's if it is a floating-point array of `shape`.

    Raises TypeError or ValueError that name `given`, the result, and `what`, the meaning of the expected shape.
    """
    if not hasattr(result, "shape") or not hasattr(result, "dtype"):
        raise TypeError(f"{given} returned a {type(result).__name__}: must return one array, {what}")
    if tuple(result.shape) != tuple(shape):
        raise ValueError(f"{given} returned shape {list(result.shape)}: must be {list(shape)}, {what}")
    if not jnp.issubdtype(result.dtype, jnp.floating):
        raise TypeError(f"{given} returned dtype {result.dtype}: must be floating point, as its rows are")
    return result


def auto(rows: jax.Array, weights: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """Uses this library's kernels on a Hopper GPU for the operands that they support; otherwise the choice of
    `automatic`."""
    if by_hopper("auto", rows, weights):
        return hopper.grouped_matmul(rows, weights, group_sizes)
    if by_pallas("auto", rows, weights):
        return on_tpu.products(rows, [weights], group_sizes)[0]
    return BY_NAME[automatic(platform())](rows, weights, group_sizes)


def by_hopper(grouped_matmul: str | GroupedMatmul, rows: jax.Array, weights: jax.Array) -> bool:
    """Returns True if this library's kernels multiply such operands for `grouped_matmul`, with activation and biases.

    With "auto" on a Hopper GPU it warns, once for each shape, where the kernels do not take the operands, or where they
    pad the weights by a copy.
    """
    if grouped_matmul not in ("auto", "hopper"):
        return False
    supported = hopper.supports(rows, weights)
    if hopper.on_hopper() and (grouped_matmul == "auto" or supported):
        warn_once(why_not(rows.shape[1], weights.shape[2], rows.dtype, weights.dtype, weights.shape[0]))
    return supported


def by_pallas(grouped_matmul: str | GroupedMatmul, rows: Any, weights: Any) -> bool:
    """Returns True if this library's kernels multiply such rows on a TPU: with "auto", where tokamax is not
    installed. It warns, once for each shape, where the kernels do not take the operands."""
    if grouped_matmul != "auto" or installed() or platform() != "tpu":
        return False
    reason = on_tpu.why_not(rows, weights)
    if reason is not None and rows.size:
        warn_once(
            f"grouped matmul of {rows.dtype.name}{list(rows.shape)} by {weights.dtype.name}{list(weights.shape)} "
            f"leaves this library's TPU kernels: {reason}. It is multiplied by jax.lax.ragged_dot, which is slower "
            "(MoEConfig(grouped_matmul='ragged_dot') says nothing)"
        )
    return reason is None


def why_not(depth: int, columns: int, dtype: Any, weights_dtype: Any = None, groups: int = 1) -> str | None:
    """Returns why rows `[C, depth]` times `[groups, depth, columns]` miss a Hopper GPU's full speed, and the cost.

    Returns None if they do not. It needs no device.
    """
    rows = jax.ShapeDtypeStruct((1, depth), dtype)
    weights = jax.ShapeDtypeStruct((groups, depth, columns), weights_dtype or dtype)
    shapes = f"grouped matmul of {rows.dtype.name}[C, {depth}] by {weights.dtype.name}{list(weights.shape)}"
    reason = hopper.why_not(rows, weights)
    if reason is not None:
        other = "tokamax" if installed() else f"jax.lax.ragged_dot, at {RAGGED_DOT_RATE}"
        return f"{shapes} leaves this library's Hopper kernels: {reason}. It is multiplied by {other}"
    copied = hopper.copied_bytes(depth, columns, groups, weights.dtype)
    if copied:
        return (
            f"{shapes}: {depth} or {columns} is below {hopper.LEAST} or no multiple of {hopper.COLUMN_ALIGNMENT}, "
            f"so the weights are padded by a copy of {copied / 2**20:.0f} MiB in every call"
        )
    return None


@dataclasses.dataclass(frozen=True)
class Answer:
    """Whether experts have a Hopper GPU's full speed.

    Attributes:
      fast: True if this library's kernels multiply the weights where they lie.
      detail: the same in words, with reason and cost where it is False.
    """

    fast: bool
    detail: str


def on_hopper(hidden: int, width: int, dtype: Any, experts: int = 1) -> Answer:
    """Answers `xen-moe-jax memory` and `doctor` for `experts` of a rank with matmuls of `hidden` by `width`."""
    reason = why_not(hidden, width, dtype, groups=experts)
    kind = jnp.dtype(dtype).name
    fast = f"this library's kernels multiply experts of {hidden} by {width} in {kind}, and copy no weights"
    return Answer(reason is None, reason or fast)


RAGGED_DOT_RATE = "about a twelfth of their rate (47 against 565 TFLOP/s in bfloat16 on an H200)"


@functools.cache
def warn_once(message: str | None) -> None:
    """Warns, unless there was this warning before or `message` is None."""
    if message is not None:
        warnings.warn(message, stacklevel=2)


@functools.cache
def automatic(platform: str) -> str:
    """Returns the function of "auto" on a platform where `hopper` is no choice; on a GPU without tokamax it warns
    once."""
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
    """For `doctor`: the choice on a platform without its warning, the state of tokamax, and the remedy if any."""
    has = installed()
    if platform in ("gpu", "cuda") and jax.default_backend() == "gpu" and hopper.on_hopper():
        other = "tokamax" if has else "jax.lax.ragged_dot"
        kinds = " and ".join(hopper.DTYPES)
        choice = f"this library's Hopper kernels for {kinds}; else {other}"
        return {"choice": choice, "remedy": ""}
    if platform == "tpu" and not has:
        choice = f"this library's Pallas kernels for {' and '.join(on_tpu.DTYPES)}; else jax.lax.ragged_dot"
        return {"choice": choice, "remedy": ""}
    name = "tokamax" if has and platform in TOKAMAX_PLATFORMS else "ragged_dot"
    slow = platform in ("gpu", "cuda") and not has
    choice = "tokamax" if name == "tokamax" else "jax.lax.ragged_dot"
    return {"choice": choice, "remedy": "pip install 'xen-moe-jax[tokamax]'" if slow else ""}
