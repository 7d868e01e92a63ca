"""Decode on TPU: the experts of a layer with few tokens are one kernel, which reads the weights of active experts once.

A layer takes it (`adapted`) where a dispatch takes its small blocks: up to 256 tokens a rank with
`KernelConfig(mode="auto")`, or `mode="low_latency"`. Groups of rows then begin at multiples of 16, for which a capacity
that the caller has set might not suffice: with one, the layer keeps its grouped matmuls. The backward pass is that of
the grouped matmuls.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Sequence
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
from xen_moe_jax.experts.function import ExpertFunction
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call(ExpertFunction):
    """A call of `xm.moe_mlp` with the fields of a `MoEConfig` that this module and `tpu_decode_layer` read."""

    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    axis_name: str | tuple[str, ...]
    kernel: KernelConfig
    capacity: int | None = None
    capacity_factor: float | None = None
    alignment: int = 1
    wire: Any = None
    combine_wire: Any = None
    balance: str | None = None
    num_slots: int | None = None
    num_chunks: int = 1


def adapted(config: Any, num_tokens: int) -> Any:
    """Returns the config of a layer whose experts are the kernel, or `config` itself where they are not.

    Args:
      config: a `MoEConfig`, or a `Call`.
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
                f"mode='low_latency': the experts take grouped matmuls, not the decode kernel, which "
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


def _on_tpu(config: Any) -> bool:
    return config.kernel.backend == "pallas" or (config.kernel.backend is None and platform() == "tpu")


def _few(config: Any, num_tokens: int) -> bool:
    return config.kernel.mode == "auto" and num_tokens <= config.num_chunks * hardware.LOW_LATENCY_TOKENS


def _why_not(config: Any) -> str | None:
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

    config: Any
    alignment: int
    blocks: tuple[tuple[str, tuple[int, int] | None], ...] = ()
    """For each matrix that is a `QuantizedWeight` its block, or None for scales of channels. Their scales are operands
    beside the weights."""
    takes_received: ClassVar[bool] = True

    def __call__(self, rows: jax.Array, received: jax.Array, weights: dict[str, Any]) -> jax.Array:
        read = self.reading(weights, rows.dtype)
        if read is None:
            return self.composed(rows, received, weights)
        experts, names, operands = read
        return _run(experts, names, *vary_alike(rows, received, *operands))

    def reading(self, weights: dict[str, Any], dtype: Any) -> tuple[Experts, tuple[str, ...], list[jax.Array]] | None:
        """Returns the experts of kernels that read such weights for rows of `dtype`, and names and arrays of their
        operands; None where kernels do not, which `mode="low_latency"` makes a warning."""
        names = self.names(weights)
        kept = {name: weights[name] for name in MATRICES if isinstance(weights.get(name), QuantizedWeight)}
        if jnp.dtype(dtype).name not in DTYPES:
            return None
        if kept and (reason := _why_widened(kept, len(kept) == len(MATRICES) - (not self.config.gated))):
            if self.config.kernel.mode == "low_latency":
                warnings.warn(f"mode='low_latency': {reason}", stacklevel=2)
            return None
        operands = [kept[name].values if name in kept else weights[name].astype(dtype) for name in names]
        operands += [weight.scales for weight in kept.values()]
        blocks = tuple((n, None if w.scales.shape[-2] == 1 else w.block) for n, w in kept.items())
        return dataclasses.replace(self, blocks=blocks), names + tuple(f"{name}_scales" for name in kept), operands

    def scales_of(self, weights: dict[str, Any]) -> dict[str, tuple[jax.Array, tuple[int, int] | None]] | None:
        """Returns the scales as kernels take them, of weights that are quantized."""
        found = {}
        for name, block in self.blocks:
            of_matrix = weights[f"{name}_scales"]
            found[name] = (of_matrix[:, 0] if block is None else of_matrix.ravel(), block)
        return found or None

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

    def composed(rows: Any, weights: Any) -> Any:
        return experts.composed(rows, received, weights)

    by_rows, *by_weights = gradients(experts, names, given, composed, (rows,), cotangent)
    return by_rows, None, *by_weights


def gradients(
    experts: Experts,
    names: tuple[str, ...],
    given: Sequence[jax.Array],
    composed: Callable[..., Any],
    operands: tuple[Any, ...],
    cotangent: Any,
) -> tuple[Any, ...]:
    """Returns the gradients of `composed(*operands, weights)` by `operands`, and by what is `given` under `names`:
    quantized weights have none."""
    weights = experts.together(names, given)
    fixed = {name: weights.pop(name) for name, _ in experts.blocks}

    def of(weights: Any, *operands: Any) -> Any:
        return composed(*operands, weights | fixed)

    by_weights, *by_operands = jax.vjp(of, weights, *operands)[1](cotangent)
    return *by_operands, *(by_weights.get(name) for name in names)


_run.defvjp(_forward, _backward)


def _shapes(rows: Any, *_: Any, **__: Any) -> Sequence[ShapeDtype]:
    return [(rows.shape, rows.dtype)]


def _lowered(
    rows: jax.Array, received: jax.Array, *weights: jax.Array, names: tuple[str, ...], experts: Experts, config: Any
) -> tuple[jax.Array]:
    by_name = dict(zip(names, weights, strict=True))
    biases = biases_of(names, by_name)
    scaled = _scaled(experts, rows.shape[0], received.shape)
    pieces, launch = _policy(Matrices.of(by_name, rows, scaled), rows.shape[1], config)

    def activate(gate: jax.Array | None, up: jax.Array) -> jax.Array:
        return mlp.activate(experts.config, gate, up)

    out = decode_experts(
        rows,
        received,
        by_name.get("gate"),
        by_name["up"],
        by_name["down"],
        biases,
        activate=activate,
        alignment=experts.alignment,
        pieces=pieces,
        launch=launch,
        scales=experts.scales_of(by_name),
    )
    return (out,)


def biases_of(names: tuple[str, ...], weights: dict[str, jax.Array]) -> dict[str, jax.Array] | None:
    """Returns the biases as kernels take them, by the name of their matrix."""
    return {n: weights[f"{n}_bias"].astype(jnp.float32) for n in names if f"{n}_bias" in weights} or None


_decode_p = declare_composite("decode_experts", _shapes, _lowered, multiplies=True)


class Matrices(NamedTuple):
    """The weights of a rank's experts, as far as VMEM is concerned.

    Attributes:
      shape: of `up`, `[L, H, F]`. dtype: of the rows. gated, biased: there is a `gate`; there are biases. scaled: of
        weights of one byte; None for others.
    """

    shape: tuple[int, ...]
    dtype: str
    gated: bool
    biased: bool
    scaled: Scaled | None = None

    @classmethod
    def of(cls, weights: dict[str, Any], rows: Any, scaled: Scaled | None) -> Matrices:
        return cls(weights["up"].shape, rows.dtype.name, "gate" in weights, "up_bias" in weights, scaled)

    @property
    def itemsize(self) -> int:
        """Bytes of an element of the rows."""
        return int(jnp.dtype(self.dtype).itemsize)

    @property
    def weight_bytes(self) -> int:
        """Bytes of a weight."""
        return self.itemsize if self.scaled is None else 1

    def bytes_beside(self, hidden: int) -> int:
        """Returns the bytes of VMEM of biases, of scales of channels, and of the compiler; rows have `hidden`
        columns."""
        local, _, width = self.shape
        rows = self.biased + (self.scaled is not None and self.scaled.channels)
        return RESERVED + rows * -(-local // 8) * 8 * 4 * (2 * width + hidden)


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


def pieces_for(limit: int, hidden: int, matrices: Matrices) -> Pieces:
    """Returns the largest slabs that fit half of `limit` bytes of VMEM, or the smallest ones.

    Args:
      hidden: columns of a row.
    """
    for most, rows, size in CHOICES:
        if matrices.scaled:
            rows = min(rows, matrices.scaled.rows)
            most -= most % rows
        pieces = Pieces(most, rows, slab_rows(hidden, size), slab_rows(matrices.shape[-1], size))
        if _need(pieces, hidden, matrices) <= limit // 2:
            break
    return pieces


def slab_rows(rows: int, most: int) -> int:
    """Returns the rows of a slab, at most `most`: the largest multiple of 256, the side of a matrix unit, or else of
    128, that makes two equal slabs or more of `rows`; `most` where there is none, and the last slab is smaller."""
    sizes = [*range(most, 0, -2 * LANES), *range(most, 0, -LANES)] if most % (2 * LANES) == 0 else [most]
    return next((size for size in sizes if rows % size == 0 and rows > size), most)


def _need(pieces: Pieces, hidden: int, matrices: Matrices) -> int:
    """Returns the bytes of VMEM that the kernel takes."""
    width, itemsize = matrices.shape[2], matrices.itemsize
    inside = vmem_bytes(pieces, hidden, width, matrices.gated, itemsize, matrices.weight_bytes)
    return matrices.bytes_beside(hidden) + inside


def _policy(matrices: Matrices, hidden: int, config: KernelConfig) -> tuple[Pieces, Launch]:
    """Returns the slabs, and how to launch the kernel.

    Raises:
      ValueError: even the smallest slabs do not fit the VMEM.
    """
    chip = hardware.generation()
    limit = config.vmem_limit_bytes or chip.vmem_bytes
    chosen = dataclasses.replace(pieces_for(limit, hidden, matrices), widened=not chip.multiplies_float8)
    need = _need(chosen, hidden, matrices)
    if need > limit:
        raise ValueError(
            f"the decode_experts kernel needs {need} bytes of VMEM for hidden_size={hidden} and "
            f"intermediate_size={matrices.shape[-1]}, and {chip.name} allows {limit}: use "
            "grouped_matmul='ragged_dot'"
        )
    return chosen, Launch(1, min(limit, need + need // 4), 0, hardware.interpret(config), chip.cores)
