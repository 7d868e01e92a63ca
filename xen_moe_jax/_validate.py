"""Checks arguments when a call is traced: each error names the value given, the values allowed and the remedy."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from xen_moe_jax import _active, _mesh
from xen_moe_jax._config import BACKENDS, DEFAULT_CONFIG, KernelConfig
from xen_moe_jax._numbers import array as array
from xen_moe_jax._numbers import as_bool, as_int, entries, is_one_of
from xen_moe_jax._numbers import indices as indices
from xen_moe_jax._placement import Placement, check_arrays
from xen_moe_jax._quantize import QMAX, Wire, parse_wire
from xen_moe_jax._spec import DROPS, LAYOUTS, Spec, scale_blocks
from xen_moe_jax._types import BlockScaled, Handle

FLOATS = ("float32", "bfloat16", "float16")
LARGEST = 2**31 - 1


def axes(
    axis_name: Any, caller: str, *, most: int = 2, groups: bool = False
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Returns names and sizes of the mesh axes that the call runs over, at most `most` of them. `groups`: the axis of
    an elastic.Group will do."""
    names = axis_names(axis_name, caller, most)
    manual = _mesh.manual_axes()
    for name in names:
        in_group = _mesh.group_of((name,)) is not None
        if in_group and not (groups and len(names) == 1):
            raise ValueError(
                f"{caller}: axis_name={axis_name!r}: {name!r} is the axis of an elastic.Group; over it run dispatch, "
                "combine, redispatch and moe_mlp"
            )
        if name not in manual and not in_group:
            where = f"the manual axes here are {manual}" if manual else "there is no manual axis here"
            raise ValueError(
                f"{caller}: axis_name={axis_name!r}: {where}. Call it inside jax.shard_map over a mesh that has axis "
                f"{name!r}, or open an elastic.Group of that name"
            )
    return names, tuple(_mesh.axis_size(n) for n in names)


def axis_names(axis_name: Any, caller: str, most: int = 2) -> tuple[str, ...]:
    """Returns `axis_name`, a name or a tuple or list of names, as a tuple. Raises ValueError unless it has one to
    `most` names, all different."""
    names = tuple(axis_name) if isinstance(axis_name, tuple | list) else (axis_name,)
    if not names or len(names) > most or not all(isinstance(n, str) for n in names) or len(set(names)) != len(names):
        raise ValueError(
            f"{caller}: axis_name={axis_name!r}: must be the name of a mesh axis, or a pair (slow axis, fast axis) "
            "of two different names"
        )
    return names


def integer(value: Any, name: str, caller: str, *, minimum: int, maximum: int | None = LARGEST) -> int:
    """Returns `value` as an int. Raises TypeError if it is no int known at trace time, and ValueError if it is below
    `minimum` or above `maximum`, which is None for numbers that need not fit int32."""
    number = as_int(value)
    if number is None:
        raise TypeError(f"{caller}: {name}={value!r}: must be an int known at trace time")
    if number < minimum:
        raise ValueError(f"{caller}: {name}={number}: must be >= {minimum}")
    if maximum is not None and number > maximum:
        raise ValueError(f"{caller}: {name}={number}: must be <= {maximum}: experts, ranks and rows have int32 numbers")
    return number


def boolean(value: Any, name: str, caller: str, *, optional: bool = False) -> Any:
    """Returns `value` as a bool, and with `optional` None as None. Raises TypeError if it is neither."""
    found = as_bool(value)
    if found is None and not (optional and value is None):
        raise TypeError(f"{caller}: {name}={value!r}: must be True{', False or None' if optional else ' or False'}")
    return found


def known_shape(x: jax.Array, caller: str, name: str) -> None:
    """`jax.export` may leave sizes open. The size of every buffer follows from the number of rows; and XLA crashes on
    an exported `shard_map` that broadcasts or reshapes to a size that is open.
    """
    if not all(isinstance(size, int) for size in x.shape):
        raise ValueError(
            f"{caller}: {name} has the symbolic shape ({', '.join(map(str, x.shape))}): every size must be known when "
            "the call is traced; export one program for each shape"
        )


def config(value: Any, caller: str) -> KernelConfig:
    if value is None:
        return DEFAULT_CONFIG
    if not isinstance(value, KernelConfig):
        raise TypeError(f"{caller}: config={value!r}: must be None or an xm.KernelConfig")
    return value


def layout(value: Any, caller: str) -> str:
    if not is_one_of(value, LAYOUTS):
        raise ValueError(f"{caller}: layout={value!r}: must be one of {LAYOUTS}")
    return value


def drop(value: Any, has_weights: bool, caller: str) -> str:
    if not is_one_of(value, DROPS):
        raise ValueError(f"{caller}: drop={value!r}: must be one of {DROPS}")
    if value == "weight" and not has_weights:
        raise ValueError(
            f"{caller}: drop='weight' with topk_weights=None: rows are dropped by their router weights; pass them, or "
            "drop='source' or 'position'"
        )
    return value


def wire(value: Any, caller: str, *, name: str = "wire") -> Wire | None:
    try:
        return parse_wire(value, name)
    except ValueError as error:
        raise ValueError(f"{caller}: {error}") from None


def payload(x: Any, caller: str, *, name: str = "x") -> tuple[jax.Array, jax.Array | None, tuple[int, ...]]:
    """Returns a `[T, H]` float array and None, or the values and scales of a `BlockScaled`; and the dimensions of its
    tokens, which are `(T,)` or have the product `T`.
    """
    if isinstance(x, BlockScaled):
        return _block_scaled(x, caller, name)
    x = array(x, caller, name)
    _rank(x, "[T, H] (tokens of this rank, hidden), or [..., H]", caller, name)
    known_shape(x, caller, name)
    _has_tokens(x, caller, name)
    if x.dtype.name not in FLOATS:
        raise TypeError(
            f"{caller}: {name} has dtype {x.dtype}: must be one of {FLOATS}, or a BlockScaled from xm.quantize"
        )
    return _flat(x), None, x.shape[:-1]


def _block_scaled(x: BlockScaled, caller: str, name: str) -> tuple[jax.Array, jax.Array, tuple[int, ...]]:
    values, scales = array(x.values, caller, f"{name}.values"), array(x.scales, caller, f"{name}.scales")
    _rank(values, "[T, H] or [..., H]", caller, f"{name}.values")
    known_shape(values, caller, f"{name}.values")
    _has_tokens(values, caller, f"{name}.values")
    if values.dtype.name not in QMAX:
        raise TypeError(f"{caller}: {name}.values has dtype {values.dtype}: must be one of {tuple(QMAX)}")
    wanted = (*values.shape[:-1], scale_blocks(values.shape[-1]))
    if scales.shape != wanted or scales.dtype != jnp.float32:
        raise ValueError(
            f"{caller}: {name}.scales is {scales.dtype}{list(scales.shape)}: must be float32{list(wanted)}, one "
            f"scale per 128 "
            "elements of the hidden dimension"
        )
    return _flat(values), _flat(scales), values.shape[:-1]


def routing(
    topk_idx: Any, topk_weights: Any, token_dims: tuple[int, ...] | None, caller: str
) -> tuple[jax.Array, jax.Array | None]:
    """Returns both as `[T, K]`, or None for weights that are None. `token_dims`: those of `x`; None if there is no
    `x`.
    """
    topk_idx = indices(topk_idx, caller, "topk_idx")
    _rank(topk_idx, "[T, K] (tokens, slots), or [..., K]", caller, "topk_idx")
    known_shape(topk_idx, caller, "topk_idx")
    if not jnp.issubdtype(topk_idx.dtype, jnp.integer):
        raise TypeError(f"{caller}: topk_idx has dtype {topk_idx.dtype}: must be an integer dtype (int32)")
    if token_dims is not None and topk_idx.shape[:-1] != token_dims:
        has, wanted = (_tokens(dims) for dims in (topk_idx.shape[:-1], token_dims))
        raise ValueError(f"{caller}: topk_idx has {has} tokens and x has {wanted}: both must have this rank's T")
    if topk_idx.shape[-1] == 0:
        raise ValueError(f"{caller}: topk_idx has shape {topk_idx.shape}: K must be >= 1")
    if topk_weights is None:
        return _flat(topk_idx), None
    topk_weights = array(topk_weights, caller, "topk_weights")
    if topk_weights.shape != topk_idx.shape:
        raise ValueError(
            f"{caller}: topk_weights has shape {topk_weights.shape} and topk_idx {topk_idx.shape}: they must be equal"
        )
    if not jnp.issubdtype(topk_weights.dtype, jnp.floating):
        raise TypeError(f"{caller}: topk_weights has dtype {topk_weights.dtype}: must be a float dtype")
    return _flat(topk_idx), _flat(topk_weights)


def names_every_expert(topk_idx: jax.Array, num_experts: int, caller: str) -> None:
    """Raises ValueError where the integer dtype of `topk_idx` has no number for the last expert."""
    largest = int(jnp.iinfo(topk_idx.dtype).max)
    if largest < num_experts - 1:
        raise ValueError(
            f"{caller}: topk_idx has dtype {topk_idx.dtype}, whose largest number is {largest}: it cannot name expert "
            f"{num_experts - 1} of num_experts={num_experts}; pass int32"
        )


def active(value: Any, spec: Spec, caller: str) -> Any:
    """Returns the mask, bool `[R]`; `_active.EVERY_RANK` for None."""
    num_ranks = spec.num_ranks
    if value is None and _mesh.group_of(spec.axis_name) is not None:
        raise ValueError(
            f"{caller}: active=None over the axis {spec.axis_name} of an elastic.Group, whose ranks come and go: pass "
            "active=group.active() as an argument of the program, so that it is data"
        )
    if value is None:
        return _active.EVERY_RANK
    value = array(value, caller, "active")
    if value.dtype != jnp.bool_:
        raise TypeError(f"{caller}: active has dtype {value.dtype}: must be bool, True for every rank that takes part")
    if value.shape != (num_ranks,):
        raise ValueError(
            f"{caller}: active has shape {value.shape}: must be ({num_ranks},), one entry for every rank of axis_name, "
            "the same on all of them"
        )
    return value


def placement(value: Any, num_experts: int | None, num_ranks: int, caller: str) -> None:
    """Raises unless `value` is a `Placement` of these experts, of any number for None, over these ranks."""
    if not isinstance(value, Placement):
        raise TypeError(f"{caller}: placement is a {type(value).__name__}: must be a Placement of xm.balance, or None")
    check_arrays(value, caller)
    if num_experts is not None and value.num_experts != num_experts:
        raise ValueError(
            f"{caller}: placement has {value.num_experts} experts, and num_experts={num_experts}: they must be equal"
        )
    if value.num_ranks != num_ranks:
        raise ValueError(
            f"{caller}: placement is for {value.num_ranks} ranks, and axis_name has {num_ranks}: plan with "
            f"num_ranks={num_ranks}"
        )


def balance(
    value: Any,
    slots_per_rank: Any,
    num_experts: int,
    num_ranks: int,
    caller: str,
    *,
    axis_name: tuple[str, ...],
    layout: Any,
    capacity: Any,
    placement: Any,
) -> int | None:
    """Returns the slots of a rank with balance="exact"; None without."""
    if value is not None and _mesh.group_of(axis_name) is not None:
        raise ValueError(
            f"{caller}: balance={value!r} in an elastic.Group, where ranks may be absent: plan a placement"
        )
    if value is None:
        if slots_per_rank is not None:
            raise ValueError(f"{caller}: slots_per_rank={slots_per_rank!r} without balance='exact': leave it None")
        return None
    if not is_one_of(value, ("exact",)):
        raise ValueError(f"{caller}: balance={value!r}: must be None or 'exact'")
    if not is_one_of(layout, ("grouped",)):
        raise ValueError(f"{caller}: balance='exact' with layout={layout!r}: only the grouped layout can be balanced")
    for name, given, why in (
        ("capacity", capacity, "its rows are always T * K"),
        ("placement", placement, "it makes a placement of its own"),
    ):
        if given is not None:
            raise ValueError(f"{caller}: balance='exact' with {name}: {why}; pass {name}=None")
    return exact_slots(slots_per_rank, num_experts, num_ranks, caller)


def exact_slots(slots_per_rank: Any, num_experts: int, num_ranks: int, caller: str) -> int:
    """Returns the slots of a rank with balance="exact"; the default for None."""
    local = -(-num_experts // num_ranks)
    if slots_per_rank is None:
        return local + (-(-local // 4) if num_ranks > 1 else 0)
    return integer(slots_per_rank, "slots_per_rank", caller, minimum=local + (num_ranks > 1))


def ranks_per_node(value: Any, num_ranks: int, caller: str) -> int:
    """Returns `value` as an int, or `num_ranks` for None. Raises ValueError unless it divides them."""
    number = integer(num_ranks if value is None else value, "ranks_per_node", caller, minimum=1)
    if num_ranks % number:
        raise ValueError(f"{caller}: ranks_per_node={number}: must divide num_ranks={num_ranks}")
    return number


def same_tokens(token_dims: tuple[int, ...], spec: Spec, caller: str) -> None:
    """Raises ValueError unless these are the tokens of the dispatch, in its dimensions or as `[T]`."""
    if token_dims not in ((spec.num_tokens,), spec.token_dims):
        made_for = _tokens(spec.token_dims or (spec.num_tokens,))
        raise ValueError(f"{caller}: x has {_tokens(token_dims)} tokens: the handle was made for {made_for}")


def rows(y: Any, spec: Spec, caller: str) -> jax.Array:
    """Returns `y` of a combine: rows in the layout of a dispatch with this handle, of any hidden size."""
    if isinstance(y, BlockScaled):
        raise TypeError(f"{caller}: y is a BlockScaled: dequantize() it, and pass wire=... to quantize on the wire")
    y = array(y, caller, "y")
    known_shape(y, caller, "y")
    wanted = (*spec.row_dims, "H")
    if y.shape[:-1] != spec.row_dims or y.ndim != len(wanted):
        raise ValueError(
            f"{caller}: y has shape {y.shape}: the handle comes from a dispatch with layout={spec.layout!r}, whose "
            f"rows are "
            f"[{', '.join(map(str, wanted))}]"
        )
    if y.dtype.name not in FLOATS:
        raise TypeError(f"{caller}: y has dtype {y.dtype}: must be one of {FLOATS}")
    return y


def handle(value: Any, caller: str) -> Handle:
    """Returns `value` if it is a handle over an axis that this code is manual over, with the same size."""
    if not isinstance(value, Handle):
        raise TypeError(
            f"{caller}: handle is a {type(value).__name__}: pass the `handle` field of what dispatch returned"
        )
    names, sizes = axes(value.spec.axis_name, f"{caller} (axis_name of the handle)", groups=True)
    if sizes != value.spec.axis_sizes:
        raise ValueError(
            f"{caller}: the handle was made over axis {names} of size {value.spec.axis_sizes}, here it has size "
            f"{sizes}: use a "
            "handle inside the mesh that made it"
        )
    return dataclasses.replace(value, **_handle_arrays(value, caller))


def _handle_arrays(value: Handle, caller: str) -> dict[str, Any]:
    """The arrays of a handle in the shapes and dtypes that its spec gives them."""
    spec = value.spec
    wanted = {
        "topk_idx": ((spec.num_tokens, spec.top_k), jnp.int32),
        "positions": ((spec.num_ranks, spec.num_tokens, spec.slots), jnp.int32),
        "recv_counts": ((spec.num_ranks, spec.local_experts), jnp.int32),
        "weights": (spec.weights_shape, jnp.float32),
    }
    if value.placement is not None:
        wanted["topk_weights"] = ((spec.num_tokens, spec.top_k), jnp.float32)
    arrays = {}
    for name, (shape, dtype) in wanted.items():
        found = array(getattr(value, name), caller, f"handle.{name}")
        if found.shape != shape or found.dtype != dtype:
            raise ValueError(
                f"{caller}: handle.{name} is {found.dtype}{list(found.shape)}: must be {jnp.dtype(dtype)}"
                f"{list(shape)}, as dispatch returned it; a handle is passed on as a whole"
            )
        arrays[name] = found
    if value.active is not None:
        arrays["active"] = active(value.active, spec, f"{caller} (handle)")
    if value.placement is not None:
        placement(value.placement, None, spec.num_ranks, f"{caller} (handle)")
    return arrays


def row_limit(capacity: int, alignment: int, caller: str) -> None:
    """Raises ValueError, which names the alignment where it may be the cause, if a buffer has rows without a number."""
    if capacity >= 2**31:
        aligned = "" if alignment == 1 else f"alignment={alignment}, "
        raise ValueError(
            f"{caller}: {aligned}capacity={capacity}: row numbers are int32, so it must be below 2**31; pass a capacity"
        )


def axis_numbers(x: jax.Array, split_axis: Any, concat_axis: Any, size: int, tiled: bool, caller: str):
    """Checked, non-negative split and concat axes of an `all_to_all`."""
    split = _axis(split_axis, x.ndim, "split_axis", caller)
    concat = _axis(concat_axis, x.ndim, "concat_axis", caller)
    length = x.shape[split]
    if tiled and length % size:
        raise ValueError(
            f"{caller}: x has {length} elements along split_axis={split}: must be divisible by the {size} ranks; pad it"
        )
    if not tiled and length != size:
        raise ValueError(
            f"{caller}: x has {length} elements along split_axis={split}: without tiled=True it must be the {size} "
            f"ranks"
        )
    return split, concat


def gather_axis(x: jax.Array, value: Any, tiled: bool, caller: str) -> int:
    """The checked, non-negative `axis` of an `all_gather`: an old one, or, without `tiled`, a new one."""
    if tiled and x.ndim == 0:
        raise ValueError(f"{caller}: x is a scalar: with tiled=True it must have an axis to concatenate along")
    return _axis(value, x.ndim + (not tiled), "axis", caller, of="x" if tiled else "the result")


def _axis(value: Any, ndim: int, name: str, caller: str, of: str = "x") -> int:
    value = integer(value, name, caller, minimum=-ndim)
    if value >= ndim:
        raise ValueError(f"{caller}: {name}={value}: {of} has {ndim} dimensions")
    return value % ndim


def index_groups(groups: Any, sizes: tuple[int, ...], caller: str) -> tuple[tuple[int, ...], ...] | None:
    """Returns groups of ranks as tuples. Raises TypeError unless `groups` is a sequence of sequences of ints known at
    trace time, and ValueError unless they are of equal size and name every rank once."""
    if groups is None:
        return None
    total = math.prod(sizes)
    try:
        rows = [entries(group) for group in entries(groups)]
    except TypeError:  # it has no entries, or none that are known
        raise TypeError(f"{caller}: axis_index_groups={groups!r}: must be a list of lists of ranks") from None
    groups = tuple(tuple(integer(i, "axis_index_groups", caller, minimum=0) for i in row) for row in rows)
    if not groups or len({len(g) for g in groups}) != 1 or sorted(i for g in groups for i in g) != list(range(total)):
        raise ValueError(
            f"{caller}: axis_index_groups={groups!r}: must be groups of equal size that name each of "
            f"0..{total - 1} once"
        )
    return groups


def dtype(value: Any, caller: str, *, name: str = "dtype") -> Any:
    """Returns the dtype if rows of it can travel."""
    try:
        found = jnp.dtype(value)
    except TypeError:
        found = None
    allowed = (*FLOATS, *QMAX)
    if found is None or found.name not in allowed:
        raise ValueError(f"{caller}: {name}={value!r}: must be one of {allowed}")
    return found


def backend(value: Any, caller: str) -> str | None:
    if not is_one_of(value, BACKENDS):
        raise ValueError(f"{caller}: backend={value!r}: must be one of {BACKENDS}")
    return value


def _flat(x: jax.Array) -> jax.Array:
    """`[..., N]` as `[T, N]`."""
    x = _mesh.whole(x)
    return x if x.ndim == 2 else x.reshape(-1, x.shape[-1])


def _tokens(token_dims: tuple[int, ...]) -> str:
    return "x".join(map(str, token_dims))


def _rank(x: jax.Array, meaning: str, caller: str, name: str) -> None:
    if x.ndim < 2:
        raise ValueError(f"{caller}: {name} has shape {x.shape}: must be {meaning}")


def _has_tokens(x: jax.Array, caller: str, name: str) -> None:
    # XLA's own compiler crashes on a sharded program whose tokens are all of size zero.
    if 0 in x.shape[:-1]:
        raise ValueError(
            f"{caller}: {name} has shape {x.shape}: T must be >= 1; a rank without tokens passes unused ones, "
            "all slots -1"
        )
