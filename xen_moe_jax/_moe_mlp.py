"""The routed MLP as one operation: dispatch, gated MLP and combine, for users with or without Flax."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from xen_moe_jax import _exact, _layout, _validate
from xen_moe_jax._api import dispatch_for
from xen_moe_jax._config import KernelConfig, RowsInHalves
from xen_moe_jax._float8_weight import Float8Weight, without_codes
from xen_moe_jax._numbers import is_one_of, plain
from xen_moe_jax._placement import Placement
from xen_moe_jax._quantized_weight import QuantizedWeight, adopted, check_format, without_gradient
from xen_moe_jax._replicated import combine_replicated, dispatch_replicated_for
from xen_moe_jax._spec import Spec
from xen_moe_jax._types import BlockScaled, MoEMLPInfo, Routed
from xen_moe_jax.experts import float8, gathered, hopper, lent, tpu_decode, tpu_decode_layer
from xen_moe_jax.experts.arrived import Way, dispatch_quantized
from xen_moe_jax.experts.combined import (
    Return,
    by_hopper,
    config_for_rows,
    config_for_waves,
    experts_and_combine,
    run_experts,
    sent_as,
)
from xen_moe_jax.experts.function import ACTIVATIONS, APPLY_WEIGHTS_TO, GROUPED_MATMULS, ExpertFunction

CALLER = "moe_mlp"
LAYOUTS = ("grouped", "padded")
NAMES = ("gate", "up", "down")


@jax.named_scope("xen_moe_mlp")
def moe_mlp(
    x: jax.Array,
    topk_idx: jax.Array,
    topk_weights: jax.Array | None,
    gate: jax.Array | None,
    up: jax.Array,
    down: jax.Array,
    *,
    num_experts: int,
    axis_name: str | tuple[str, str],
    activation: str = "swiglu",
    activation_limit: float = 7.0,
    activation_alpha: float = 1.702,
    biases: tuple[jax.Array | None, jax.Array, jax.Array] | None = None,
    apply_weights_to: str = "rows",
    experts: str | Callable[..., jax.Array] | None = None,
    grouped_matmul: str | Callable[..., jax.Array] = "auto",
    layout: str = "grouped",
    capacity: int | None = None,
    alignment: int = 1,
    drop: str = "position",
    wire: Any = None,
    combine_wire: Any = None,
    gradient_wire: Any = None,
    active: jax.Array | None = None,
    placement: Placement | None = None,
    balance: str | None = None,
    slots_per_rank: int | None = None,
    replicated: bool = False,
    return_info: bool = False,
    config: KernelConfig | None = None,
) -> Any:
    """Sends tokens to their experts, computes these, and adds up the results. Call it inside `jax.shard_map`.

    The value is that of `dispatch`, two or three grouped matmuls and `combine`, to the last bit, and so are the
    derivatives, except on a Hopper GPU or a TPU. There the backward pass keeps neither the experts' outputs nor their
    weighted cotangents, so that gradients differ by the rounding of these, and a second derivative is an error that
    names `ragged_dot`. The kernels there compute the activation in float32 and round it once, in this call and in the
    Flax layers; elsewhere, and with biases on a TPU, it is computed in the dtype of the rows. On a GPU, on an axis of
    one rank, the matmuls read the tokens where they lie. On a TPU the cotangents of `gate`'s and `up`'s rows are added
    up in float32 and rounded once, and few tokens (`config.mode`) take one kernel for all of it, as the Flax layers do
    (docs/design/tpu.md).

    It has no start and done halves: work for the time of a transfer goes between the halves of `dispatch` and of
    `combine`, and the experts, which run between the two, are the caller's matmuls then.

    Args:
      x: `[T, H]`, or `[..., H]`, float32, bfloat16 or float16: this rank's tokens, as in `dispatch`.
      topk_idx, topk_weights: `[T, K]`, as in `dispatch`.
      gate, up: `[L, H, F]` of the dtype of `x`, this rank's experts, `L = ceil(num_experts / R)`; `gate` is None for
        activations with one projection. A `QuantizedWeight` in place of an array, or a `qwix.QArray` of its formats, is
        widened where it is multiplied by; experts in fp8 or int8 multiply by its codes, which must be in their dtype
        and in blocks of 128 x 128. Experts in fp8 also take a `Float8Weight`, whose codes this call uses instead of
        quantizing (but with `balance="exact"` the weights travel, and are quantized where they arrive).
      down: `[L, F, H]`.
      num_experts, axis_name: as in `dispatch`.
      activation: with `gate`: "swiglu" (arXiv:2002.05202), "geglu", or "clipped_swiglu" (gpt-oss:
        `g * sigmoid(activation_alpha * g) * (u + 1)`, `g` clipped above and `u` on both sides at `activation_limit`).
        With `gate=None`: "gelu" or "relu2" (arXiv:2109.08668).
      activation_limit, activation_alpha: the numbers of "clipped_swiglu".
      biases: `(gate [L, F], up [L, F], down [L, H])`, the first None where `gate` is None; None for experts without.
      apply_weights_to: where a router weight meets its row: "rows", the expert's output, while combine adds up;
        "activation", in front of `down`, rounded with it; "input", the token that goes into the expert, rounded once.
      experts: in place of the MLP: `experts(rows, group_sizes, weights) -> rows` with a dict of the weights (and of
        "gate_bias", ...), as `MoEConfig.experts`. Shapes of the weights are then its own matter. "float8_e4m3fn" or
        "int8", or such a dtype: the MLP with rows, weights and cotangents quantized in front of each matmul, as
        `MoEConfig.expert_dtype`; rows that travelled in this dtype are multiplied as they arrived. Kernels multiply fp8
        on a Hopper GPU. Elsewhere, with `grouped_matmul="ragged_dot"`, and in int8, plain JAX multiplies, slowly. These
        experts have no forward mode, and their second derivative is an error.
      grouped_matmul: "auto" (the fastest one), "ragged_dot" (the only one with forward mode and second derivatives),
        "tokamax", "hopper", or a function `(rows [C, A], weights [L, A, B], group_sizes [L]) -> [C, B]`. It, or
        `experts`, gets the rows of an fp8 or int8 `wire` as they arrive, as a `BlockScaled`, if it has a true attribute
        `takes_block_scaled`, except with apply_weights_to="input". There is no gradient then. In "ragged_dot" XLA may
        multiply every row by every expert, as zeros where the row is another expert's: a NaN or an infinity in the
        weights of one expert, or of a slot without an expert, then reaches all rows of the rank.
      layout: "grouped", or "padded" (batched matmuls over `[L, R*T, H]`).
      capacity, alignment, drop, wire, gradient_wire, active: as in `dispatch`.
      combine_wire: the `wire` of the combine.
      placement, balance, slots_per_rank: as in `dispatch`. With a placement the weights are those of this rank's slots
        (`placement.move` brings them there), `L` is `S`; with `balance="exact"` they are those of `L` experts as ever,
        and are moved in here, to `S` slots. Where `slots_per_rank` is None the Hopper kernels copy none: borrowed
        experts are fetched for each matmul, one or two at a time: less memory, more time (`experts/lent.py`).
      replicated: the tokens are the same on every rank of `axis_name` (decode): `dispatch_replicated` and
        `combine_replicated`, so that only one sum travels. Arguments about what travels must be unset.
      return_info: also return counts.
      config: tuning; never changes the result.

    Returns:
      `[T, H]`, or `[..., H]`; with `return_info=True` a pair of it and a `MoEMLPInfo`.

    Raises:
      ValueError, TypeError: an argument is wrong, or the call is not inside `jax.shard_map` over `axis_name`.
    """
    _validate.config(config, CALLER)
    experts = float8.dtype_name(experts)
    if isinstance(experts, str):
        grouped_matmul, experts = float8.choose(experts, grouped_matmul, None, layout, f"{CALLER}: experts"), None
    function = ExpertFunction(
        activation=activation,
        activation_limit=plain(activation_limit),
        activation_alpha=plain(activation_alpha),
        expert_bias=biases is not None,
        apply_weights_to=apply_weights_to,
        experts=experts,
        grouped_matmul=grouped_matmul,
        layout=layout,
    )
    _check(function)
    if isinstance(x, BlockScaled):
        raise TypeError(f"{CALLER}: x is a BlockScaled: pass the float array, and wire=... to quantize on the wire")
    x = _validate.array(x, CALLER, "x")
    values, _, _ = _validate.payload(x, CALLER)
    topk_idx = _validate.indices(topk_idx, CALLER, "topk_idx")
    if topk_weights is not None:
        topk_weights = _validate.array(topk_weights, CALLER, "topk_weights")
    for name, given in (("wire", wire), ("combine_wire", combine_wire), ("gradient_wire", gradient_wire)):
        _validate.wire(given, CALLER, name=name)
    num_local = _num_local(num_experts, axis_name, placement)
    weights = _weights(function, values, (gate, up, down), biases, num_local)
    _validate.boolean(replicated, "replicated", CALLER)
    _validate.boolean(return_info, "return_info", CALLER)
    _validate.drop(drop, topk_weights is not None, CALLER)
    routing: dict[str, Any] = {
        "num_experts": num_experts,
        "axis_name": axis_name,
        "layout": layout,
        "alignment": alignment,
    }
    decode = None if replicated else _decode(function, routing, values, topk_idx, weights, config)
    at_home = active is None and placement is None and balance is None and slots_per_rank is None
    if decode is not None and topk_weights is not None and at_home:
        given = {"wire": wire, "combine_wire": combine_wire, "capacity": capacity}
        decode = tpu_decode.adapted(dataclasses.replace(decode, **given), math.prod(values.shape[:-1]))
        if decode.experts is not None:
            options = routing | {"drop": drop, "gradient_wire": gradient_wire, "config": config}
            return _few_tokens(decode, x, topk_idx, topk_weights, weights, options | given, return_info)
    if replicated:
        unset = {"capacity": capacity, "wire": wire, "combine_wire": combine_wire, "active": active}
        unset |= {"gradient_wire": gradient_wire, "placement": placement, "balance": balance}
        _check_unset(unset | {"slots_per_rank": slots_per_rank})
        routed = dispatch_replicated_for(CALLER, x, topk_idx, topk_weights, **routing)
        y = run_experts(function, weights, routed)
        out = combine_replicated(y, routed.handle, weighted=apply_weights_to == "rows")
    else:
        sending: dict[str, Any] = {
            "capacity": capacity,
            "drop": drop,
            "wire": wire,
            "gradient_wire": gradient_wire,
            "active": active,
        }
        axis_sizes = _validate.axes(axis_name, CALLER, groups=True)[1]
        num_ranks = math.prod(axis_sizes)
        lends = is_one_of(balance, ("exact",)) and slots_per_rank is None and num_ranks > 1
        lends = lends and by_hopper(function, values, weights)
        if lends:
            slots_per_rank = _exact.slots_at_home(num_experts, num_ranks)
        sending |= {"placement": placement, "balance": balance, "slots_per_rank": slots_per_rank}
        on_its_own = all(value is None for name, value in sending.items() if name not in ("capacity", "drop"))
        on_its_own &= combine_wire is None and num_ranks == 1
        if on_its_own and gathered.takes(function, weights, values, topk_idx, capacity):
            numbers, alone = gathered.numbers(x), gathered.alone(config)
            routed = dispatch_for(CALLER, numbers, topk_idx, topk_weights, **routing, **sending, config=alone)
            out = gathered.experts_and_combine(function, weights, x, routed, config)
            return (out, _info(routed)) if return_info else out
        arriving = float8.wire_of_rows(function, wire)
        if arriving is None:
            x, sending["wire"] = sent_as(function, x, wire)
            if placement is balance is slots_per_rank is None and len(axis_sizes) == 1:
                config = config_for_rows(function, values, weights, capacity, config)
                if isinstance(config, RowsInHalves):  # with a capacity
                    axes, count = _validate.axes(axis_name, CALLER, groups=True), math.prod(values.shape[:-1])
                    top_k = math.prod(topk_idx.shape[-1:])  # without dimensions the dispatch refuses it
                    spec = Spec(*axes, num_experts, count, top_k, layout, int(capacity or 0), alignment)
                    config = config_for_waves(config, spec, wire, active, combine_wire, gradient_wire)
            routed = dispatch_for(CALLER, x, topk_idx, topk_weights, **routing, **sending, config=config)
            tokens = None if isinstance(x, BlockScaled) else (x, topk_weights)
        else:
            tokens = None
            sending |= {"wire": None, "gradient_wire": None}
            if num_ranks == 1 and hopper.on_hopper():
                config = gathered.alone(config)
            way = Way(arriving, gradient_wire, config)
            routed = dispatch_quantized(CALLER, x, topk_idx, topk_weights, way, **routing, **sending)
        if balance is not None:
            weights = {name: without_codes(array) for name, array in weights.items()}
            found = routed.handle.placement
            move = functools.partial(found.move, axis_name=axis_name, active=active, config=config)
            if lends:
                weights = lent.weights_of(weights, routed.handle, move, config)
            else:
                weights = move(weights, None, found)
        back = Return(combine_wire, gradient_wire, config)
        out = experts_and_combine(function, weights, routed, back, tokens)
    return (out, _info(routed)) if return_info else out


def _decode(
    function: ExpertFunction, routing: dict[str, Any], x: Any, topk_idx: Any, weights: dict[str, Any], config: Any
) -> tpu_decode.Call | None:
    """Returns the call as the decode kernels of TPUs know it; None where a token could name more slots than a rank has
    experts, so that a buffer of the worst case could be too small: which rows it drops is the same on every
    platform."""
    top_k = jnp.shape(topk_idx)[-1] if jnp.ndim(topk_idx) else 0
    if function.experts is not None or not 0 < top_k <= weights["up"].shape[0]:
        return None
    return tpu_decode.Call(
        **vars(function),
        hidden_size=x.shape[-1],
        intermediate_size=weights["up"].shape[-1],
        num_experts=routing["num_experts"],
        top_k=top_k,
        axis_name=routing["axis_name"],
        kernel=config or KernelConfig(),
        alignment=routing["alignment"],
    )


def _few_tokens(
    call: tpu_decode.Call, x: Any, topk_idx: Any, topk_weights: Any, weights: Any, options: dict[str, Any], info: bool
) -> Any:
    """Returns the result of `moe_mlp` by the decode kernels of TPUs. One kernel computes the whole call where it takes
    the call and `info` is false. Otherwise a kernel computes the experts alone, between a dispatch and a combine."""
    hidden = x.shape[-1]

    def composed(x: Any, topk_idx: Any, topk_weights: Any, weights: Any, return_info: bool = False) -> Any:
        matrices = (weights.get(name) for name in NAMES)
        biases = tuple(weights.get(f"{name}_bias") for name in NAMES) if call.expert_bias else None
        function = {"activation": call.activation, "experts": call.experts, "alignment": call.alignment}
        padded = tpu_decode.padded(x.reshape(-1, hidden)).reshape(*x.shape[:-1], -1)
        result = moe_mlp(
            padded, topk_idx, topk_weights, *matrices, biases=biases, return_info=return_info, **options | function
        )
        out, *more = result if return_info else (result,)
        return (out[..., :hidden], *more) if return_info else out[..., :hidden]

    rows = x.reshape(-1, hidden)
    if info or not tpu_decode_layer.takes_layer(call, rows, weights):
        return composed(x, topk_idx, topk_weights, weights, info)
    # the operands of a dispatch are checked as it checks them
    jax.eval_shape(functools.partial(composed, weights=weights), x, topk_idx, topk_weights)
    slots = _layout.sanitize(topk_idx.reshape(-1, call.top_k), call.num_experts)
    factors = topk_weights.reshape(-1, call.top_k)
    assert isinstance(call.experts, tpu_decode.Experts)
    return tpu_decode_layer.layer(call.experts, composed, weights, rows, slots, factors).reshape(x.shape)


def _info(routed: Routed) -> MoEMLPInfo:
    return MoEMLPInfo(routed.num_tokens_per_expert, routed.num_dropped)


def _num_local(num_experts: Any, axis_name: Any, placement: Any) -> int:
    """Returns the experts of a rank, or the slots of a rank of a placement."""
    total = _validate.integer(num_experts, "num_experts", CALLER, minimum=1)
    num_ranks = math.prod(_validate.axes(axis_name, CALLER, groups=True)[1])
    if placement is None:
        return -(-total // num_ranks)
    _validate.placement(placement, total, num_ranks, CALLER)
    return placement.slots_per_rank


def _check(function: ExpertFunction) -> None:
    """Raises ValueError or TypeError for the first field that is wrong."""
    for name, choices in (
        ("activation", ACTIVATIONS),
        ("apply_weights_to", APPLY_WEIGHTS_TO),
        ("grouped_matmul", GROUPED_MATMULS),
        ("layout", LAYOUTS),
    ):
        value = getattr(function, name)
        if name == "grouped_matmul" and callable(value):
            continue
        if not is_one_of(value, choices):
            more = {
                "grouped_matmul": ", or a function (rows, weights, group_sizes)",
                "layout": "; for 'ranked' call dispatch and combine",
            }.get(name, "")
            raise ValueError(f"{CALLER}: {name}={value!r}: must be one of {choices}{more}")
    if not function.calls_its_matmul:
        raise ValueError(
            f"{CALLER}: grouped_matmul={function.grouped_matmul!r} with layout='padded': XLA multiplies its batches; "
            "use 'auto'"
        )
    for name in ("activation_limit", "activation_alpha"):
        value = getattr(function, name)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            raise ValueError(f"{CALLER}: {name}={value!r}: must be a finite number > 0, known at trace time")
    if function.experts is None:
        return
    if not callable(function.experts):
        raise TypeError(f"{CALLER}: experts={function.experts!r}: must be a function (rows, group_sizes, weights)")
    if function.apply_weights_to == "activation":
        raise ValueError(
            f"{CALLER}: apply_weights_to='activation' with experts=...: functions of your own get no router weights; "
            "use 'rows' or 'input'"
        )


def _check_unset(arguments: dict[str, Any]) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise ValueError(f"{CALLER}: {name}={value!r} with replicated=True: no rows travel; leave it None")


def _weights(
    function: ExpertFunction, x: jax.Array, arrays: tuple[Any, ...], biases: Any, num_local: int
) -> dict[str, jax.Array]:
    """Returns the weights by name, checked against each other and against the tokens."""
    given = dict(zip(NAMES, arrays))
    if biases is not None:
        if not isinstance(biases, tuple | list) or len(biases) != len(NAMES):
            raise TypeError(f"{CALLER}: biases is a {type(biases).__name__}: must be None, or a tuple (gate, up, down)")
        given |= {f"{name}_bias": bias for name, bias in zip(NAMES, biases)}
    for name in ("gate", "gate_bias"):
        if name in given and (given[name] is not None) != function.gated:
            remedy = "pass the array" if function.gated else "has one projection: pass None"
            what = "None" if given[name] is None else "an array"
            raise ValueError(f"{CALLER}: {name} is {what} with activation={function.activation!r}: {remedy}")
    weights = {
        name: _array(function, name, array) for name, array in given.items() if name[:4] != "gate" or array is not None
    }
    if function.experts is None:
        _check_shapes(x.shape[-1:], x.dtype, weights, num_local)
    return weights


def _array(function: ExpertFunction, name: str, array: Any) -> Any:
    array = adopted(f"{CALLER}: {name}", array)
    if isinstance(array, Float8Weight):
        if function.grouped_matmul not in float8.MATMULS:
            raise TypeError(f"{CALLER}: {name} is a Float8Weight: pass experts={float8.DTYPE!r} with it, or its master")
        if array.master is None:
            raise TypeError(f"{CALLER}: {name} is a Float8Weight without a master: pass codes.of(weight)")
        return array.of(_array(function, name, array.master)).without_codes_gradient()
    if isinstance(array, QuantizedWeight):
        check_format(f"{CALLER}: {name}", array)
        return without_gradient(array)
    array = _validate.array(array, CALLER, name)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(f"{CALLER}: {name} has dtype {array.dtype}: must be floating point")
    return array


def _check_shapes(hidden: tuple[int, ...], dtype: Any, weights: dict[str, jax.Array], num_local: int) -> None:
    up = weights["up"]
    if 0 in up.shape:  # XLA's compiler crashes on a sharded program with such operands
        raise ValueError(f"{CALLER}: up has shape {up.shape}: must be [L, H, F], each at least 1")
    width = up.shape[-1] if up.ndim else 0
    sizes = (num_local, *hidden, width)
    wanted = {"gate": ("LHF", sizes), "up": ("LHF", sizes), "down": ("LFH", (num_local, width, *hidden))}
    wanted |= {"gate_bias": ("LF", (num_local, width)), "up_bias": ("LF", (num_local, width))}
    wanted |= {"down_bias": ("LH", (num_local, *hidden))}
    for name, array in weights.items():
        letters, shape = wanted[name]
        if array.shape != shape:
            raise ValueError(
                f"{CALLER}: {name} has shape {array.shape}: must be [{', '.join(letters)}] = {list(shape)}, for "
                f"L = {num_local} experts of this rank (slots of its placement), H of x, and F, the last of up"
            )
        if not isinstance(array, QuantizedWeight) and array.dtype != dtype:
            raise TypeError(
                f"{CALLER}: {name} has dtype {array.dtype} and x has {dtype}: they must be equal; pass "
                f"{name}.astype(x.dtype)"
            )
