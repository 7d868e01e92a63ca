"""Checks the arguments that a user gave to an operation and makes the operands of the primitives from them."""

from __future__ import annotations

import dataclasses
import math
import os
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from xen_moe_jax import _active, _drops, _exact, _home_sums, _layout, _nodes, _ranks, _validate, backends
from xen_moe_jax._config import KernelConfig
from xen_moe_jax._mesh import vary_over
from xen_moe_jax._placement import Placement
from xen_moe_jax._quantize import Wire
from xen_moe_jax._spec import Spec, exact_capacity, worst_case_capacity
from xen_moe_jax._types import Handle

OWN_AND_JAX = tuple(os.path.dirname(file) for file in (__file__, jax.__file__))
"""Folders whose code is not the user's: a warning shows the line that called it."""


@dataclasses.dataclass(frozen=True)
class Static:
    """Static half of one call."""

    spec: Spec
    wire: Wire | None
    gradient_wire: Wire | None
    config: KernelConfig

    @property
    def params(self) -> dict[str, Any]:
        """The fields as parameters of a primitive."""
        return dict(vars(self))


class Known(NamedTuple):
    """The fields of a `Routed` that are no results of the primitive; a pytree.

    `withheld`: int32 `[]`, rows of this rank that are not sent because of `active`, and rows for this rank that are not
    sent because of `drop`; None where there are neither. `active`, `placement` and `topk_weights` are the handle's.
    """

    withheld: jax.Array | None
    active: jax.Array | None
    placement: Placement | None
    topk_weights: jax.Array | None


class PreparedDispatch(NamedTuple):
    """`x [T, H]`, float32 `scales [T, ceil(H/128)]` or `[T, 0]`, sanitised `topk_idx`, `topk_weights` `[T, K]`.

    `given_topk_idx`: int32, as the caller gave it; the operand of a dispatch, which handles indices out of range.
    It also returns the indices sanitised, with -1 for slots that `active` leaves out, so that nothing else need run
    before a dispatch. `dispatch_start` takes `topk_idx`. Where `drop` chose rows, both hold its choice (`_drops.py`).
    With a placement both hold slots, which `static.spec` counts as experts. `active`: bool `[R]`, or
    `_active.EVERY_RANK`.
    """

    static: Static
    x: jax.Array
    scales: jax.Array
    topk_idx: jax.Array
    topk_weights: jax.Array
    given_topk_idx: jax.Array
    active: jax.Array
    known: Known

    @property
    def operands(self) -> tuple[jax.Array, ...]:
        """Operands of a synchronous dispatch."""
        return self.x, self.scales, self.given_topk_idx, self.topk_weights, self.active

    @property
    def start_operands(self) -> tuple[jax.Array, ...]:
        """Operands of `dispatch_start`; `dispatch_done` reads the routing again."""
        return self.x, self.scales, self.topk_idx, self.topk_weights, self.active


class PreparedCombine(NamedTuple):
    """`y` in the rows' shape, and the arrays of the handle.

    `at_home`: further operands of a combine whose rows are added as at their homes (`_home_sums.py`), or None.
    """

    static: Static
    weighted: bool
    at_home: tuple[jax.Array, jax.Array] | None
    y: jax.Array
    topk_idx: jax.Array
    positions: jax.Array
    recv_counts: jax.Array
    active: jax.Array
    weights: jax.Array

    @property
    def operands(self) -> tuple[jax.Array, ...]:
        return self[3:]

    @property
    def params(self) -> dict[str, Any]:
        return {**self.static.params, "weighted": self.weighted}


class PreparedRedispatch(NamedTuple):
    """`x [T, H]`, and the arrays of the handle."""

    static: Static
    x: jax.Array
    topk_idx: jax.Array
    positions: jax.Array
    recv_counts: jax.Array
    active: jax.Array

    @property
    def operands(self) -> tuple[jax.Array, ...]:
        return self[1:]


def dispatch(
    caller: str,
    x: Any,
    topk_idx: Any,
    topk_weights: Any,
    *,
    num_experts: Any,
    axis_name: Any,
    layout: Any,
    capacity: Any,
    alignment: Any,
    drop: Any,
    wire: Any,
    gradient_wire: Any,
    active: Any,
    placement: Any,
    balance: Any,
    slots_per_rank: Any,
    config: KernelConfig | None,
) -> PreparedDispatch:
    config = _validate.config(config, caller)
    values, scales, token_dims = _validate.payload(x, caller)
    num_tokens = values.shape[0]
    topk_idx, topk_weights = _validate.routing(topk_idx, topk_weights, token_dims, caller)
    drop = _validate.drop(drop, topk_weights is not None, caller)
    parsed_wire = _validate.wire(wire, caller)
    if scales is not None and parsed_wire is not None:
        raise ValueError(f"{caller}: wire={wire!r} with a BlockScaled x: it is quantized already; pass wire=None")
    num_experts = _validate.integer(num_experts, "num_experts", caller, minimum=1)
    _validate.names_every_expert(topk_idx, num_experts, caller)
    names, sizes = _validate.axes(axis_name, caller, groups=True)
    entries = num_experts
    if placement is not None:
        _validate.placement(placement, num_experts, math.prod(sizes), caller)
        entries = placement.experts.size
    exact = _validate.balance(
        balance, slots_per_rank, num_experts, math.prod(sizes), caller,
        axis_name=names, layout=layout, capacity=capacity, placement=placement,
    )  # fmt: skip
    if exact is not None:
        entries = math.prod(sizes) * exact
        alignment = _validate.integer(alignment, "alignment", caller, minimum=1)
        capacity = exact_capacity(num_tokens=num_tokens, top_k=topk_idx.shape[1], slots=exact, alignment=alignment)
    spec = _make_spec(
        caller,
        names,
        sizes,
        num_experts=entries,
        num_tokens=num_tokens,
        token_dims=token_dims,
        top_k=topk_idx.shape[1],
        layout=layout,
        capacity=capacity,
        alignment=alignment,
    )
    static = _static(spec, parsed_wire, gradient_wire, config, values.shape[1], caller)
    checked = _validate.active(active, spec, caller)
    out_of_reach = None
    if placement is not None:
        topk_idx = placement.route(topk_idx, _ranks.index(spec.axis_name))
    elif exact is not None:
        topk_idx, placement, out_of_reach = _exact.assign(topk_idx, num_experts, checked, spec, static.config)
    idx = _layout.sanitize(topk_idx, spec.num_experts)
    weights = jnp.ones(idx.shape, jnp.float32) if topk_weights is None else topk_weights.astype(jnp.float32)
    if scales is None:
        # Not zeros: in a scan over layers with remat JAX would take these out of the loop as a constant, and an operand
        # without elements of a manual computation in a loop ends Shardy with a segmentation fault (jaxlib 0.11.2).
        scales = values[:, :0].astype(jnp.float32)
    given = topk_idx if topk_idx.dtype == jnp.int32 else idx  # another width may hold values that int32 cannot
    values, scales, idx, weights, given, checked = vary_over(
        [values, scales, idx, weights, given, checked], spec.axis_name
    )
    kept = _active.entries(idx, checked, spec)
    withheld = out_of_reach
    if exact is None and _active.given(checked):
        withheld = _active.withheld(idx, kept, spec)
    decided = _drops.keep_rows(kept, weights, checked, drop=drop, spec=spec, config=static.config)
    if decided is not None:
        kept, dropped = decided
        given, withheld = kept, dropped if withheld is None else withheld + dropped
    home = placement if placement is not None and placement.sums == "home" else None
    known = Known(withheld, checked if _active.given(checked) else None, home, None if home is None else weights)
    return PreparedDispatch(static, values, scales, kept, weights, given, checked, known)


def combine(
    caller: str,
    y: Any,
    handle: Any,
    *,
    weighted: Any,
    wire: Any,
    gradient_wire: Any,
    active: Any,
    placement: Any,
    config: KernelConfig | None,
) -> PreparedCombine:
    config = _validate.config(config, caller)
    handle = _validate.handle(handle, caller)
    spec = handle.spec
    y = _validate.rows(y, spec, caller)
    chosen = _validate.boolean(weighted, "weighted", caller, optional=True)
    chosen = spec.layout != "ranked" if chosen is None else chosen
    if chosen and spec.layout == "ranked":
        raise ValueError(
            f"{caller}: weighted=True with layout='ranked': a row stands for several experts; apply "
            "routed.topk_weights while reducing over the local experts and pass weighted=False"
        )
    static = _static(spec, _validate.wire(wire, caller), gradient_wire, config, y.shape[-1], caller)
    checked = _validate.active(handle.active if active is None else active, spec, caller)
    operands = [y, handle.topk_idx, handle.positions, handle.recv_counts, checked, handle.weights]
    operands = vary_over(operands, spec.axis_name)
    return PreparedCombine(static, chosen, _at_home(handle, placement, checked, static, caller), *operands)


def _at_home(
    handle: Handle, placement: Any, active: Any, static: Static, caller: str
) -> tuple[jax.Array, jax.Array] | None:
    """Operands that a combine needs to add rows as their homes would; None where it adds them on the ranks that hold
    them: without a placement or by one whose `sums` say so, and where rows were added before or are quantized."""
    spec, own = handle.spec, handle.placement
    if placement is not None:
        _validate.placement(placement, own and own.num_experts, spec.num_ranks, caller)
        if own is None and placement.sums == "home":
            raise ValueError(
                f"{caller}: placement was given, and the dispatch that made the handle had none, or one with "
                "sums='rank': pass it to dispatch, which routes by it; combine then knows it"
            )
        if placement.experts.size != spec.num_experts:
            raise ValueError(
                f"{caller}: placement has {placement.slots_per_rank} slots on a rank, and the dispatch had "
                f"{spec.local_experts}: pass the dispatch's own placement, or None"
            )
    placement = own if placement is None else placement
    if placement is None or placement.sums == "rank" or spec.layout == "ranked" or static.wire is not None:
        return None
    moved = _active.entries(handle.topk_idx, active, spec)  # a rank may have left since the dispatch
    home = _home_sums.homes(moved, jnp.asarray(placement.experts), placement.num_experts)
    home, weights = vary_over([home, lax.stop_gradient(handle.topk_weights)], spec.axis_name)
    return home, weights


def redispatch(
    caller: str, x: Any, handle: Any, *, wire: Any, gradient_wire: Any, active: Any, config: KernelConfig | None
) -> PreparedRedispatch:
    config = _validate.config(config, caller)
    handle = _validate.handle(handle, caller)
    spec = handle.spec
    values, scales, token_dims = _validate.payload(x, caller)
    if scales is not None:
        raise TypeError(f"{caller}: x is a BlockScaled: pass the float array and wire=... instead")
    _validate.same_tokens(token_dims, spec, caller)
    static = _static(spec, _validate.wire(wire, caller), gradient_wire, config, values.shape[1], caller)
    checked = _validate.active(handle.active if active is None else active, spec, caller)
    operands = [values, handle.topk_idx, handle.positions, handle.recv_counts, checked]
    return PreparedRedispatch(static, *vary_over(operands, spec.axis_name))


def _static(
    spec: Spec, wire: Wire | None, gradient_wire: Any, config: KernelConfig, hidden: int, caller: str
) -> Static:
    """Builds the static half of a call. Empty operands run on the reference backend, so kernels never see a zero
    dimension."""
    if spec.num_tokens == 0 or spec.capacity == 0 or hidden == 0:
        config = dataclasses.replace(config, backend="reference")
    else:
        config = backends.with_nodes(spec.axis_sizes, config)
    _nodes.check(spec, config, caller)
    return Static(spec, wire, _validate.wire(gradient_wire, caller, name="gradient_wire"), config)


def _make_spec(
    caller: str,
    names: tuple[str, ...],
    sizes: tuple[int, ...],
    *,
    num_experts: int,
    num_tokens: int,
    token_dims: tuple[int, ...],
    top_k: int,
    layout: Any,
    capacity: Any,
    alignment: Any,
) -> Spec:
    layout = _validate.layout(layout, caller)
    alignment = _validate.integer(alignment, "alignment", caller, minimum=1)
    if alignment > 1 and layout != "grouped":
        raise ValueError(f"{caller}: alignment={alignment} with layout={layout!r}: only 'grouped' has groups to align")
    worst = worst_case_capacity(
        layout=layout,
        num_ranks=math.prod(sizes),
        num_tokens=num_tokens,
        top_k=top_k,
        num_experts=num_experts,
        alignment=alignment,
    )
    if capacity is None:
        capacity = worst
    elif layout == "padded":
        raise ValueError(
            f"{caller}: capacity={capacity!r} with layout='padded': its rows are always [L, R*T]; pass None"
        )
    else:
        capacity = _validate.integer(capacity, "capacity", caller, minimum=0, maximum=None)
        if capacity == 0 and worst > 0:
            warnings.warn(
                f"{caller}: capacity=0: every row is dropped, and combine returns zeros; pass the rows that a rank "
                "keeps, or None for the worst case",
                skip_file_prefixes=OWN_AND_JAX,
            )
    _validate.row_limit(capacity, alignment, caller)
    token_dims = token_dims if len(token_dims) > 1 else ()
    return Spec(names, sizes, num_experts, num_tokens, top_k, layout, capacity, alignment, token_dims)
