"""Experts and the combine of their rows as one differentiable step: fewer passes over the rows in the backward pass.

Where nothing is fused, this is `combine(experts(rows))`. Where the kernels for Hopper GPUs or for TPUs multiply, the
value has the bits of `combine(experts(rows))` on these kernels, because `mlp.inner_rows` takes the activation, rounded
once, from the same kernel. The backward pass is another one. A combine weights the rows `[C, H]`, so that its
transpose multiplies the cotangent's rows by the router weights, and the gradient of these weights reads the experts'
output. Both can be computed in front of the last matmul, where a row has F elements. The gradient of `down` then takes
weighted rows of the activation (`inner`), `w` being the router weights:

    by_inner = rows_of_cotangent @ down.T           by_row_weights = sum(inner * by_inner)
    by_down  = (w * inner).T @ rows_of_cotangent    cotangent of the activation = w * by_inner

So neither the experts' output nor `inner` is kept, and no pass over `[C, H]` is made between two kernels. The
arithmetic between the matmuls reads the projections and `by_inner`, and writes the cotangents of the projections and
`w * inner`. On a GPU XLA makes one kernel of it, and experts in fp8 have one that also quantizes
(`pallas_kernels/hopper/float8_activation.py`). On a TPU the kernel of `rows_of_cotangent @ down.T` does it.

On a TPU the gradient of the tokens is asynchronous: the gradient of the rows goes home to the tokens while the
gradients of the projections' weights are computed, on which it does not depend. So `_run_on_tpu` takes the tokens, too,
and returns their gradient itself, in place of that of the rows, which the dispatch would send home as one operation.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from typing import Any

import jax

from xen_moe_jax import backends
from xen_moe_jax._api import combine, redispatch
from xen_moe_jax._async_primitives import order
from xen_moe_jax._config import KernelConfig, RowsInHalves, RowsLater
from xen_moe_jax._mesh import platform, vary_alike
from xen_moe_jax._numbers import as_int
from xen_moe_jax._overlap import combine_done, combine_start, define_derivative, overlap
from xen_moe_jax._quantize import parse_wire, quantize
from xen_moe_jax._quantized_weight import QuantizedWeight
from xen_moe_jax._spec import Spec
from xen_moe_jax._types import Flight, Handle, Routed
from xen_moe_jax.backends.pallas import hardware
from xen_moe_jax.experts import grouped_matmul, hopper, hopper_float8, mlp, on_tpu, waves
from xen_moe_jax.experts.function import ExpertFunction
from xen_moe_jax.experts.lent import Lent, in_place, one_at_once


@dataclasses.dataclass(frozen=True)
class Return:
    """How rows go home to their tokens: arguments of `combine`."""

    wire: Any = None
    gradient_wire: Any = None
    config: KernelConfig | None = None

    def __call__(self, y: jax.Array, handle: Handle, *, weighted: bool) -> jax.Array:
        assert not isinstance(self.config, RowsLater), "y was made of rows that have not come"
        return combine(y, handle, weighted=weighted, **vars(self))

    def transposed(self, cotangent: jax.Array, handle: Handle) -> jax.Array:
        """Returns the rows `[C, H]` of a cotangent `[T, H]`. Rows past the last group are unspecified: the kernels do
        not read them. `combine`'s own transpose sets them to zero by a pass over all rows."""
        return redispatch(
            cotangent, handle, wire=self.gradient_wire, gradient_wire=self.gradient_wire, config=self.config
        )

    def started(self, by_rows: jax.Array, handle: Handle) -> Flight:
        """Starts the transpose of the dispatch: the rows' gradient goes home to the tokens."""
        wire = self.gradient_wire
        return combine_start(by_rows, handle, weighted=False, wire=wire, gradient_wire=wire, config=self.config)


def experts_and_combine(
    function: ExpertFunction,
    weights: mlp.Weights,
    routed: Routed,
    back: Return,
    tokens: tuple[jax.Array, jax.Array | None] | None = None,
) -> jax.Array:
    """Returns `[T, H]`: the experts' outputs for the rows of `routed`, added up for each token.

    Args:
      weights: of this rank's experts or slots, by name, as in `mlp.grouped_experts`.
      back: how the outputs go home.
      tokens: `[T, H]` or `[..., H]`, whose rows `routed` has, by a dispatch with the gradient wire and the config of
        `back`, and their router weights, or None for ones; None where the tokens are quantized, or where `routed` was
        made in another way.
    """
    by_rows = function.apply_weights_to == "rows"
    if by_hopper(function, routed.x, weights):
        if by_rows:
            return _weighted_combine(function, weights, routed, back, _run)
        return _plain_combine(back, run_experts(function, weights, routed), routed.handle)
    if by_rows and _own(function, weights) and by_pallas(function, routed.x, weights):
        flies = routed.handle.placement is None and _flies(routed.handle.spec, back.config)
        return _weighted_combine(function, weights, routed, back, _run_on_tpu, tokens if flies else None)
    at_home = function.layout == "grouped" and routed.handle.placement is None
    if by_rows and at_home and mlp.by_float8_kernels(function, routed.x, weights):
        return _weighted_float8(function, weights, routed, back)
    y = run_experts(function, weights, routed)
    return back(y, routed.handle, weighted=by_rows)


def by_hopper(function: ExpertFunction, x: Any, weights: mlp.Weights) -> bool:
    """Returns True if the Hopper kernels compute the experts of rows `x [C, H]`, with their derivatives."""
    return _own(function, weights) and grouped_matmul.by_hopper(function.grouped_matmul, x, weights["up"])


def by_pallas(function: ExpertFunction, rows: Any, weights: mlp.Weights) -> bool:
    """Returns True if kernels of `on_tpu` compute both gradients of rows, and the arithmetic between them."""
    inner = jax.ShapeDtypeStruct((rows.shape[0], weights["up"].shape[2]), rows.dtype)
    pairs = [*((rows, weights[name]) for name in mlp.projection_names(function)), (inner, weights["down"])]
    return not function.expert_bias and all(grouped_matmul.by_pallas(function.grouped_matmul, *pair) for pair in pairs)


def config_for_rows(
    function: ExpertFunction, x: jax.Array, weights: mlp.Weights, capacity: Any, config: KernelConfig | None
) -> KernelConfig | None:
    """Returns the config for the dispatch and the combine of tokens `x [..., H]`.

    It is a `RowsInHalves` with the fields of `config` where kernels for TPUs make the rows of both combines: the
    experts' outputs, and in the backward pass the gradient of the rows. These kernels may then write a row as two
    halves, and the combines read it so. Elsewhere, and with a backend that reads no halves, it is `config` itself.

    Args:
      capacity: rows `C` of the dispatch. With None, the exact worst case, `config` is returned.
    """
    rows = as_int(capacity)
    by_rows = function.apply_weights_to == "rows" and _own(function, weights)
    backend = None if config is None else config.backend
    if (
        backend not in (None, "pallas")
        or not by_rows
        or rows is None
        or x.dtype != jax.numpy.bfloat16
        or x.shape[-1] % 256
    ):
        return config
    given = jax.ShapeDtypeStruct((rows, x.shape[-1]), x.dtype)
    if by_hopper(function, given, weights) or not by_pallas(function, given, weights):
        return config
    return RowsInHalves.of(config)


def _own(function: ExpertFunction, weights: mlp.Weights) -> bool:
    """Returns True for the library's experts on grouped rows, with weights that are not quantized: a quantized weight
    has no derivative."""
    own = function.experts is None and function.layout == "grouped"
    return own and not any(isinstance(weight, QuantizedWeight) for weight in weights.values())


def run_experts(function: ExpertFunction, weights: mlp.Weights, routed: Routed) -> jax.Array:
    """Returns the experts' outputs for the rows of `routed`, in the layout of these rows."""
    rows, sizes, *factors = rows_for_experts(function, routed)
    return mlp.built_in(function)(rows, sizes, weights, *factors)


def sent_as(function: ExpertFunction, x: Any, wire: Any) -> tuple[Any, Any]:
    """Returns the tokens and the wire for a dispatch.

    A function of the caller's with a true attribute `takes_block_scaled` gets the rows of an fp8 or int8 wire as they
    arrive, as a `BlockScaled`. For it the tokens are quantized here, in front of the dispatch, which then has no
    gradient.
    """
    grouped = function.grouped_matmul if callable(function.grouped_matmul) and function.layout == "grouped" else None
    takes = getattr(function.experts or grouped, "takes_block_scaled", False) and function.apply_weights_to != "input"
    format_ = parse_wire(wire) if takes else None
    if format_ is None or format_.is_mxfp4:
        return x, wire
    return quantize(x, format_.dtype, format_.scale_format), None


def rows_for_experts(function: ExpertFunction, routed: Routed) -> tuple[jax.Array, ...]:
    """Returns rows, group sizes, and the rows' router weights where the experts apply them.

    Experts with a true attribute `takes_received` get int32 `[R, L]`, the rows of each source for each expert, in place
    of the group sizes.
    """
    sizes = routed.group_sizes if function.layout == "grouped" else routed.num_tokens_per_expert
    if getattr(function.experts, "takes_received", False):
        sizes = routed.handle.recv_counts
    return routed.x, sizes, *([] if function.apply_weights_to == "rows" else [routed.weights])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _plain_combine(back: Return, y: jax.Array, handle: Handle) -> jax.Array:
    """A combine without weights. In its cotangent, rows past the last group are unspecified instead of zero."""
    return back(y, handle, weighted=False)


def _plain_forward(back: Return, y: jax.Array, handle: Handle) -> tuple[jax.Array, Handle]:
    return _plain_combine(back, y, handle), handle


def _plain_backward(back: Return, handle: Handle, cotangent: jax.Array) -> tuple[jax.Array, None]:
    return back.transposed(cotangent, handle), None


_plain_combine.defvjp(_plain_forward, _plain_backward)


def _flies(spec: Spec, config: KernelConfig | None) -> bool:
    """Returns True if the gradient of the rows goes home by a start and a done: to other ranks along one mesh axis, and
    of so many tokens that a start costs little beside them. `spec` is that of a dispatch without a placement."""
    few = hardware.low_latency(spec, config or KernelConfig()) or spec.num_ranks == 1
    return len(spec.axis_name) == 1 and not few


def _in_waves(spec: Spec, config: KernelConfig | None, active: Any, *wires: Any) -> bool:
    """Returns True if the experts' outputs go home and the cotangent's rows come in waves (`waves.py`): by the kernels
    for TPUs, with so many rows that they have several windows."""
    backend = (config or KernelConfig()).backend or backends.for_platform(platform())
    formats = [parse_wire(wire) for wire in wires]
    by_kernels = backend == "pallas" and not any(wire is not None and wire.is_mxfp4 for wire in formats)
    return by_kernels and active is None and len(waves.windows(spec)) > 1


def config_for_waves(config: RowsInHalves, spec: Spec, wire: Any, active: Any, *wires: Any) -> RowsInHalves:
    """Returns the config for a dispatch and a combine: a `RowsLater` if the rows come in waves, else `config`.

    Args:
      config: of `config_for_rows`, for experts in `experts_and_combine` that are given the tokens.
      wire: of the dispatch. wires: of the combine and of gradients.
    """
    routing = spec.num_ranks * spec.num_tokens * spec.top_k  # numbers that every rank gathers
    later = routing <= MOST_ROUTING and _flies(spec, config) and _in_waves(spec, config, active, wire, *wires)
    return RowsLater.of(config, row_wire=parse_wire(wire)) if later else config


MOST_ROUTING = 2**21
"""Slots of all ranks, with which rows may come in waves: every rank gathers three numbers of each of them first."""


def _weighted_combine(
    function: ExpertFunction, weights: mlp.Weights, routed: Routed, back: Return, run: Any, *tokens: Any
) -> jax.Array:
    """Returns `[T, H]`: experts and a weighted combine, by `run`, which is `_run`, or `_run_on_tpu` with `tokens`."""
    routed, weights, tokens = vary_alike(routed, weights, tokens)
    last = {name: weights.pop(name) for name in list(weights) if name.startswith("down")}
    handle = jax.lax.stop_gradient(routed.handle)
    operands = routed.x, routed.handle.weights, weights, last, routed.group_sizes, handle, *tokens
    return run(_Step(function, back), *operands)


@dataclasses.dataclass(frozen=True)
class _Step:
    """Static arguments of `_run` and `_run_on_tpu`, and the parts of their value."""

    function: ExpertFunction
    back: Return

    @property
    def halves(self) -> bool:
        """True if the combines of the experts' outputs and of the rows' gradient may read rows in halves."""
        return isinstance(self.back.config, RowsInHalves)

    def in_waves(self, handle: Handle) -> bool:
        """True if rows travel in waves, given that they fly at all."""
        back = self.back
        return _in_waves(handle.spec, back.config, handle.active, back.wire, back.gradient_wire)

    def inner(self, rows: Any, first: Any, sizes: Any) -> Any:
        return mlp.inner_rows(self.function, rows, sizes, first)

    def outer(self, inner: Any, last: Any, sizes: Any) -> Any:
        return mlp.outer_rows(self.function, inner, sizes, last)

    def home(self, y: Any, handle: Any, row_weights: Any) -> Any:
        return self.back(y, dataclasses.replace(handle, weights=row_weights), weighted=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(step: _Step, rows: Any, row_weights: Any, first: Any, last: Any, sizes: Any, handle: Any) -> Any:
    """Returns `[T, H]`: experts of `rows [C, H]`, combined with `row_weights`, float32 `[C]`.

    Args:
      first: weights and biases of the projections by name.
      last: weight and bias of `down` by name.
      sizes: int32 `[L]`, rows of each group.
    """
    first, last = one_at_once(first), one_at_once(last)
    return step.home(step.outer(step.inner(rows, first, sizes), last, sizes), handle, row_weights)


def _forward(
    step: _Step, rows: Any, row_weights: Any, first: Any, last: Any, sizes: Any, handle: Any
) -> tuple[Any, Any]:
    inner, projections = mlp.inner_rows_and_projections(step.function, rows, sizes, first)
    out = step.home(step.outer(inner, last, sizes), handle, row_weights)
    return out, (projections, rows, first, row_weights, last, sizes, handle)


def _backward(step: _Step, kept: Any, cotangent: Any) -> tuple[Any, ...]:
    projections, rows, first, row_weights, last, sizes, handle = kept
    projections, row_weights, cotangent = jax.tree.map(hopper.first_order, (projections, row_weights, cotangent))
    by_output = step.back.transposed(cotangent, handle)

    def outer(inner: Any, last: Any, row_weights: Any) -> Any:
        return mlp.outer_rows(step.function, inner, sizes, last, row_weights)

    # A compiled program has no matmul whose result is not used: here it has neither the product by `down`, which is the
    # output, nor the gradient of `last`.
    (by_weighted,) = jax.vjp(lambda inner: outer(inner, last, row_weights), projections[0])[1](by_output)
    behind = functools.partial(mlp.behind_activation, mlp.in_kernels(step.function))
    run = in_place if isinstance(last["down"], Lent) else operator.call
    by_projections, weighted, by_row_weights = run(behind, by_weighted, projections, row_weights)
    by_last, of_bias = jax.vjp(functools.partial(outer, weighted), last, row_weights)[1](by_output)
    # The cotangent's rows are used here for the last time: those of the rows' gradient come after them.
    # Unlike `optimization_barrier`, `order` keeps no `by_last` that is not asked for, as where experts are frozen.
    by_last, sizes = order(by_last, sizes)

    def again(rows: Any, first: Any) -> Any:
        return mlp.projections_again(step.function, rows, sizes, first, projections)

    by_rows, by_first = jax.vjp(again, rows, first)[1](by_projections)
    return by_rows, by_row_weights + of_bias, by_first, by_last, None, None


define_derivative(_run, _forward, _backward)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Given:
    """A residual without arrays, which says whether `_run_on_tpu` was given tokens."""

    tokens: bool


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run_on_tpu(
    step: _Step, rows: Any, row_weights: Any, first: Any, last: Any, sizes: Any, handle: Any, tokens: Any
) -> Any:
    """The value of `_run`. With tokens `[T, H]` its derivative is that by the tokens in place of that by their rows;
    `tokens`, a pair with their router weights, may be None. The derivative by these is that by `row_weights`."""
    return _value_on_tpu(step, False, rows, row_weights, first, last, sizes, handle, tokens)[0]


def _value_on_tpu(step: _Step, keep: bool, *operands: Any) -> tuple[Any, waves.Kept, list[Any]]:
    """Returns the value of `_run_on_tpu`, what its backward pass reads of the rows, and with `keep` the projections,
    else none."""
    rows, row_weights, first, last, sizes, handle, tokens = operands
    weights, _ = mlp.weights_and_biases(step.function, first)
    activation = mlp.in_kernels(step.function)
    if tokens is not None and step.in_waves(handle):
        return waves.value(
            rows,
            tokens,
            weights,
            last["down"],
            row_weights,
            sizes,
            handle,
            activation,
            keep=keep,
            halves=step.halves,
            wire=parse_wire(step.back.wire),
            config=step.back.config or KernelConfig(),
        )
    inner, projections = on_tpu.activated_and_products(rows, weights, sizes, activation, keep=keep)
    y = on_tpu.product_in_halves(inner, last["down"], sizes) if step.halves else step.outer(inner, last, sizes)
    return step.home(y, handle, row_weights), waves.Kept(rows, row_weights, []), projections


def _forward_on_tpu(
    step: _Step, rows: Any, row_weights: Any, first: Any, last: Any, sizes: Any, handle: Any, tokens: Any
) -> tuple[Any, Any]:
    operands = rows, row_weights, first, last, tokens
    rows, row_weights, first, last, tokens = jax.tree.map(hopper.first_order, operands)
    out, kept, projections = _value_on_tpu(step, True, rows, row_weights, first, last, sizes, handle, tokens)
    return out, (projections, kept, first, last, sizes, handle, _Given(tokens is not None))


def _backward_on_tpu(step: _Step, residuals: Any, cotangent: Any) -> tuple[Any, ...]:
    projections, kept, first, last, sizes, handle, given = residuals
    rows, row_weights, _ = kept
    projections, row_weights, cotangent = jax.tree.map(hopper.first_order, (projections, row_weights, cotangent))
    weights, _ = mlp.weights_and_biases(step.function, first)
    activation = mlp.in_kernels(step.function)
    by_routed: tuple[Any, Any]  # the gradients by the rows and by the tokens
    if given.tokens and step.in_waves(handle):
        by_tokens, by_weights, by_down, by_row_weights = waves.gradients(
            cotangent,
            kept._replace(row_weights=row_weights),
            weights,
            last["down"],
            projections,
            sizes,
            handle,
            activation,
            halves=step.halves,
            wire=parse_wire(step.back.gradient_wire),
            config=step.back.config or KernelConfig(),
        )
        by_routed = None, (by_tokens, None)
    else:
        by_output = step.back.transposed(cotangent, handle)
        by_projections, weighted, by_row_weights = on_tpu.behind_activation(
            by_output, last["down"], projections, row_weights, sizes, activation
        )
        by_down = on_tpu.by_weight(weighted, sizes, by_output, on_tpu.DEFAULT)
        # the cotangent's rows are used here for the last time, as in `_backward`
        by_down, sizes = order(by_down, sizes)
        by_rows = on_tpu.by_rows(weights, sizes, by_projections, on_tpu.DEFAULT, halves=step.halves)

        def gradients(rows: Any, by_projections: Any) -> list[Any]:
            return [on_tpu.by_weight(rows, sizes, by, on_tpu.DEFAULT) for by in by_projections]

        if given.tokens:
            flight, by_weights = overlap(step.back.started(by_rows, handle), gradients, rows, by_projections)
            by_routed = None, (combine_done(flight), None)
        else:
            by_weights = gradients(rows, by_projections)
            by_routed = by_rows, None
    by_first = dict(zip(mlp.projection_names(step.function), by_weights, strict=True))
    return by_routed[0], by_row_weights, by_first, {"down": by_down}, None, None, by_routed[1]


_run_on_tpu.defvjp(_forward_on_tpu, _backward_on_tpu)


def _weighted_float8(function: ExpertFunction, weights: mlp.Weights, routed: Routed, back: Return) -> jax.Array:
    """Returns `[T, H]`: experts in fp8 and a weighted combine, with the backward pass of this module."""
    routed, weights = vary_alike(routed, weights)
    operands = mlp.float8_operands(function, routed.x, routed.group_sizes, weights)
    step = _Float8Step(mlp.in_kernels(function), back, *routed.x.shape)
    return _run_float8(step, routed.handle.weights, jax.lax.stop_gradient(routed.handle), *operands)


@dataclasses.dataclass(frozen=True)
class _Float8Step:
    """Static arguments of `_run_float8`: the activation, the rows' way home, and the rows `count` and elements of a row
    `hidden` without padding."""

    activation: Any
    back: Return
    count: int
    hidden: int

    def run(self, keep: bool, row_weights: Any, handle: Any, *operands: Any) -> tuple[jax.Array, Any]:
        y, kept = hopper_float8.run(self.activation, *operands, keep=keep)
        y = y[: self.count, : self.hidden]
        return self.back(y, dataclasses.replace(handle, weights=row_weights), weighted=True), kept


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run_float8(step: _Float8Step, row_weights: Any, handle: Any, *operands: Any) -> jax.Array:
    return step.run(False, row_weights, handle, *operands)[0]


def _float8_forward(step: _Float8Step, row_weights: Any, handle: Any, *operands: Any) -> tuple[jax.Array, Any]:
    out, kept = step.run(True, row_weights, handle, *operands)
    return out, (kept, row_weights, handle)


def _float8_backward(step: _Float8Step, kept: Any, cotangent: Any) -> tuple[Any, ...]:
    of_run, row_weights, handle = kept
    by_y = hopper_float8.whole(step.back.transposed(cotangent, handle), 0, 1)
    padded = jax.numpy.pad(row_weights, (0, by_y.shape[0] - step.count))
    by_x, by_first, by_last, by_row_weights = hopper_float8.back(step.activation, of_run, by_y, padded)
    return by_row_weights[: step.count], None, by_x, None, tuple(by_first), by_last, None


define_derivative(_run_float8, _float8_forward, _float8_backward)
