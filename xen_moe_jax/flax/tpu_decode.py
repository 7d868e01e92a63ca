"""Decode on TPU: the experts of a layer with few tokens are one kernel, which reads the weights of active experts once.

The layer takes it (`adapted`) where a dispatch takes its small blocks: up to 256 tokens a rank with
`KernelConfig(mode="auto")`, or `mode="low_latency"`. Groups of rows then begin at multiples of 16, for which a capacity
that the caller has set might not suffice: with one, the layer keeps its grouped matmuls. The backward pass is that of
the grouped matmuls.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from xen_moe_jax._config import KernelConfig
from xen_moe_jax._mesh import platform, vary_alike
from xen_moe_jax._primitive import declare_composite
from xen_moe_jax._quantized_weight import QuantizedWeight
from xen_moe_jax._shapes import ShapeDtype
from xen_moe_jax.backends.pallas import hardware
from xen_moe_jax.experts import mlp
from xen_moe_jax.flax._config import MoEConfig
from xen_moe_jax.pallas_kernels.decode_experts import GROUP, Pieces, decode_experts, vmem_bytes
from xen_moe_jax.pallas_kernels.launch import Launch
from xen_moe_jax.pallas_kernels.record import LANES
from xen_moe_jax.pallas_kernels.scaled_weights import supports

DTYPES = ("bfloat16", "float32")
MATRICES = ("gate", "up", "down")
CHOICES = ((128, 64, 512), (128, 64, 256), (64, 64, 256), (64, 64, 128), (32, 32, 128))
"""Rows of a visit, rows of a matrix product, and most rows of a slab. The first that fits half of the VMEM is taken,
else the last. Of larger slabs each DMA is longer; of larger visits fewer read an expert's weights twice."""
RESERVED = 2 * hardware.MIB
"""VMEM that the compiler needs beside the buffers."""


def adapted(config: MoEConfig, num_tokens: int) -> MoEConfig:
    """Returns the config of a layer whose experts are the kernel, or `config` itself where they are not.

    Args:
      num_tokens: tokens of a rank.
    """
    asked = config.kernel.mode == "low_latency"
    if not _on_tpu(config) or not (asked or _few(config, num_tokens)):
        return config
    if config.experts is not None or config.grouped_matmul != "auto" or config.layout != "grouped":
        return config  # the caller has chosen
    if reason := _why_not(config):
        if asked:
            warnings.warn(
                f"MoEConfig.kernel.mode='low_latency': the experts take grouped matmuls, not the decode kernel, which "
                f"reads weights once and without pause: {reason}",
                stacklevel=2,
            )
        return config
    alignment = config.alignment if config.alignment % GROUP == 0 else config.alignment * GROUP
    return dataclasses.replace(config, experts=Experts(config, alignment), alignment=alignment)


def padded(x: jax.Array) -> jax.Array:
    """Returns tokens `[T, H]` with zeros up to the next multiple of 128 columns.

    Rows of other widths would be copied behind the dispatch and in front of the combine, all of their capacity.
    """
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % LANES)))


def _on_tpu(config: MoEConfig) -> bool:
    return config.kernel.backend == "pallas" or (config.kernel.backend is None and platform() == "tpu")


def _few(config: MoEConfig, num_tokens: int) -> bool:
    return config.kernel.mode == "auto" and num_tokens <= config.num_chunks * hardware.LOW_LATENCY_TOKENS


def _why_not(config: MoEConfig) -> str | None:
    """Returns the reason why the kernel cannot compute such experts, with a remedy; None where it can."""
    if (config.capacity, config.capacity_factor) != (None, None):
        return "a capacity, into which groups of rows at multiples of 16 might not fit: leave it out"
    if config.apply_weights_to != "rows":
        return f"apply_weights_to={config.apply_weights_to!r}: the kernel computes 'rows' alone"
    for name in ("hidden_size", "intermediate_size"):
        if getattr(config, name) % GROUP:
            return f"{name}={getattr(config, name)}: must be a multiple of {GROUP}"
    return None


@dataclasses.dataclass(frozen=True)
class Experts:
    """`MoEConfig.experts` of an adapted config. In place of group sizes it gets int32 `[R, L]`, the rows that each
    source has sent to each expert: the kernel adds them up, where each operation of XLA would cost a microsecond."""

    config: MoEConfig
    alignment: int
    blocks: tuple[tuple[str, tuple[int, int] | None], ...] = ()
    """For each matrix that is a `QuantizedWeight` its block, or None for scales of channels. Their scales are operands
    beside the weights."""
    takes_received: ClassVar[bool] = True

    def __call__(self, rows: jax.Array, received: jax.Array, weights: dict[str, Any]) -> jax.Array:
        names = self.names(weights)
        kept = {name: weights[name] for name in MATRICES if isinstance(weights.get(name), QuantizedWeight)}
        if rows.dtype.name not in DTYPES:
            return self.composed(rows, received, weights)
        if kept:
            if reason := _why_widened(kept, len(kept) == len(MATRICES) - (not self.config.gated)):
                if self.config.kernel.mode == "low_latency":
                    warnings.warn(f"MoEConfig.kernel.mode='low_latency': {reason}", stacklevel=2)
                return self.composed(rows, received, weights)
            blocks = tuple((n, None if w.scales.shape[-2] == 1 else w.block) for n, w in kept.items())
            flat = [kept[name].values if name in kept else weights[name].astype(rows.dtype) for name in names]
            names += tuple(f"{name}_scales" for name in kept)
            given = vary_alike(rows, received, *flat, *(weight.scales for weight in kept.values()))
            return _run(dataclasses.replace(self, blocks=blocks), names, *given)
        given = vary_alike(rows, received, *(weights[name].astype(rows.dtype) for name in names))
        return _run(self, names, *given)

    @staticmethod
    def names(weights: dict[str, Any]) -> tuple[str, ...]:
        """Returns the names of matrices and biases, in the order in which the kernels take them."""
        names = tuple(name for name in MATRICES if name in weights)
        return names + tuple(f"{name}_bias" for name in names if f"{name}_bias" in weights)

    def together(self, names: tuple[str, ...], operands: Sequence[jax.Array]) -> dict[str, Any]:
        """Returns the weights by name, values and scales as a `QuantizedWeight`."""
        weights: dict[str, Any] = dict(zip(names, operands, strict=True))
        for name, block in self.blocks:
            values, scales = weights[name], weights.pop(f"{name}_scales")
            weights[name] = QuantizedWeight(values, scales, block or (values.shape[-2], 1))
        return weights

    def composed(self, rows: jax.Array, received: jax.Array, weights: dict[str, Any]) -> jax.Array:
        """Returns the same rows by grouped matmuls; the backward pass is theirs."""
        groups = (jnp.sum(received, axis=0, dtype=jnp.int32) + (self.alignment - 1)) // self.alignment
        ends = jnp.minimum(jnp.cumsum(groups * self.alignment), rows.shape[0])  # rows past the capacity were dropped
        hidden = self.config.hidden_size
        out = mlp.grouped_experts(self.config, rows[:, :hidden], jnp.diff(ends, prepend=0), weights)
        return jnp.pad(out, ((0, 0), (0, rows.shape[1] - hidden)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _run(experts: Experts, names: tuple[str, ...], rows: Any, received: Any, *weights: Any) -> Any:
    (out,) = _decode_p.bind(rows, received, *weights, names=names, experts=experts, config=experts.config.kernel)
    return out


def _forward(experts: Experts, names: tuple[str, ...], *operands: Any) -> tuple[Any, Any]:
    return _run(experts, names, *operands), operands


def _backward(experts: Experts, names: tuple[str, ...], operands: Any, cotangent: Any) -> tuple[Any, ...]:
    rows, received, *given = operands
    weights = experts.together(names, given)
    fixed = {name: weights.pop(name) for name, _ in experts.blocks}  # without a gradient

    def composed(rows: Any, weights: Any) -> Any:
        return experts.composed(rows, received, weights | fixed)

    by_rows, by_weights = jax.vjp(composed, rows, weights)[1](cotangent)
    return by_rows, None, *(by_weights.get(name) for name in names)


_run.defvjp(_forward, _backward)


def _shapes(rows: Any, *_: Any, **__: Any) -> Sequence[ShapeDtype]:
    return [(rows.shape, rows.dtype)]


def _lowered(
    rows: jax.Array, received: jax.Array, *weights: jax.Array, names: tuple[str, ...], experts: Experts, config: Any
) -> tuple[jax.Array]:
    by_name = dict(zip(names, weights, strict=True))
    biases = {n: by_name[f"{n}_bias"].astype(jnp.float32) for n in names if f"{n}_bias" in by_name}
    shape = by_name["up"].shape
    scales = {}
    for name, block in experts.blocks:
        of_matrix = by_name[f"{name}_scales"]
        scales[name] = (of_matrix[:, 0] if block is None else of_matrix.ravel(), block)
    policy = functools.partial(_policy, experts.config, rows.shape[1], shape, rows.dtype.itemsize, bool(biases), config)
    pieces, launch = policy(scaled=_scaled(experts, rows.shape[0], received.shape))

    def activate(gate: jax.Array | None, up: jax.Array) -> jax.Array:
        return mlp.activate(experts.config, gate, up)

    out = decode_experts(
        rows,
        received,
        by_name.get("gate"),
        by_name["up"],
        by_name["down"],
        biases or None,
        activate=activate,
        alignment=experts.alignment,
        pieces=pieces,
        launch=launch,
        scales=scales or None,
    )
    return (out,)


_decode_p = declare_composite("decode_experts", _shapes, _lowered)


class Scaled(NamedTuple):
    """Weights of one byte.

    Attributes:
      rows: most rows of a matrix product. Few are better here than many: sums are scaled.
      channels: True where scales of channels lie in VMEM.
    """

    rows: int
    channels: bool


def _scaled(experts: Experts, capacity: int, received: tuple[int, ...]) -> Scaled | None:
    """Returns what weights of one byte ask for, None for others.

    Args:
      capacity: rows of the buffer, the worst case. received: shape, `[R, L]`.
    """
    if not experts.blocks:
        return None
    ranks, local = received
    top_k = experts.config.top_k
    tokens = (capacity - local * (experts.alignment - 1)) / min(top_k, local)
    mean = max(tokens, 0) * top_k / (ranks * local)
    return Scaled(rows_of_product(mean), any(block is None for _, block in experts.blocks))


def rows_of_product(mean: float) -> int:
    """Returns 16, 32, 48 or 64: the rows that most experts do not exceed if they have `mean` rows each."""
    return next((rows for rows in (16, 32, 48) if mean + 2 * math.sqrt(mean) <= rows), 64)


def _why_widened(kept: dict[str, QuantizedWeight], every: bool) -> str | None:
    """Returns the reason why the kernel does not read such weights as they are; None where it does."""
    for name, weight in kept.items():
        if not supports(weight.values, weight.scales, weight.block):
            return (
                f"{name} is {weight.dtype}{list(weight.shape)} with scales of blocks {weight.block}, and is widened: "
                "the kernel reads fp8 (e4m3) and int8 with scales of channels, or of blocks of multiples of 128 x 128, "
                "and widths that are multiples of 32"
            )
    if not every or len({weight.dtype for weight in kept.values()}) > 1:
        return "the experts' matrices are quantized in several ways, or some are not: they are widened"
    scalars = 4 * sum(math.prod(w.scales.shape) for w in kept.values() if w.scales.shape[-2] > 1)
    if scalars > hardware.SMEM_BUDGET:
        return f"scales of {scalars} bytes do not fit the SMEM: weights are widened; spread the experts over more ranks"
    return None


def pieces_for(
    limit: int,
    hidden: int,
    shape: tuple[int, ...],
    itemsize: int,
    *,
    gated: bool,
    biased: bool,
    scaled: Scaled | None = None,
) -> Pieces:
    """Returns the largest slabs that fit half of `limit` bytes of VMEM, or the smallest ones.

    Args:
      shape: of `up`, `[L, H, F]`.
    """
    for most, rows, size in CHOICES:
        if scaled:
            rows = min(rows, scaled.rows)
            most -= most % rows
        pieces = Pieces(most, rows, slab_rows(hidden, size), slab_rows(shape[-1], size))
        if _need(pieces, hidden, shape, itemsize, gated, biased, scaled) <= limit // 2:
            break
    return pieces


def slab_rows(rows: int, most: int) -> int:
    """Returns the rows of a slab, at most `most`: the largest multiple of 256, the side of a matrix unit, or else of
    128, that makes two equal slabs or more of `rows`; `most` where there is none, and the last slab is smaller."""
    sizes = [*range(most, 0, -2 * LANES), *range(most, 0, -LANES)] if most % (2 * LANES) == 0 else [most]
    return next((size for size in sizes if rows % size == 0 and rows > size), most)


def bias_bytes(shape: tuple[int, ...], hidden: int) -> int:
    """Returns the bytes of VMEM that biases of experts take, `shape` being that of `up`."""
    return -(-shape[0] // 8) * 8 * 4 * (2 * shape[2] + hidden)


def _need(
    pieces: Pieces,
    hidden: int,
    shape: tuple[int, ...],
    itemsize: int,
    gated: bool,
    biased: bool,
    scaled: Scaled | None = None,
) -> int:
    """Returns the bytes of VMEM that the kernel takes."""
    width = shape[2]
    beside = (biased + (scaled is not None and scaled.channels)) * bias_bytes(shape, hidden)
    of_weights = itemsize if scaled is None else 1
    return RESERVED + beside + vmem_bytes(pieces, hidden, width, gated, itemsize, of_weights)


def _policy(
    experts: MoEConfig,
    hidden: int,
    shape: tuple[int, ...],
    itemsize: int,
    biased: bool,
    config: KernelConfig,
    scaled: Scaled | None = None,
) -> tuple[Pieces, Launch]:
    """Returns the slabs, and how to launch the kernel.

    Raises:
      ValueError: even the smallest slabs do not fit the VMEM.
    """
    chip = hardware.generation()
    limit = config.vmem_limit_bytes or chip.vmem_bytes
    chosen = pieces_for(limit, hidden, shape, itemsize, gated=experts.gated, biased=biased, scaled=scaled)
    need = _need(chosen, hidden, shape, itemsize, experts.gated, biased, scaled)
    if need > limit:
        raise ValueError(
            f"the decode_experts kernel needs {need} bytes of VMEM for hidden_size={hidden} and "
            f"intermediate_size={shape[-1]}, and {chip.name} allows {limit}: use MoEConfig(grouped_matmul='ragged_dot')"
        )
    return chosen, Launch(1, min(limit, need + need // 4), 0, hardware.interpret(config), chip.cores)
