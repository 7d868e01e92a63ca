"""Drop-ins for `all_to_all`, `ragged_all_to_all` and `all_gather` of `jax.lax`: same arguments, same meaning, this
library's backends."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from xen_moe_jax import _jax_internals, _mesh, _shapes, _validate, backends
from xen_moe_jax._collective_primitives import all_gather_p, all_to_all_p, ragged_all_to_all_p
from xen_moe_jax._config import KernelConfig
from xen_moe_jax._numbers import is_one_of


@jax.named_scope("xen_moe_all_to_all")
def all_to_all(
    x: Any,
    axis_name: Any,
    split_axis: int,
    concat_axis: int,
    *,
    axis_index_groups: Any = None,
    tiled: bool = False,
    config: KernelConfig | None = None,
) -> Any:
    """`jax.lax.all_to_all`: splits `x` along `split_axis`, sends part `i` to rank `i`, concatenates along
    `concat_axis`.

    Args:
      x: array or pytree of arrays. Without `tiled`, the split axis has one element per rank and disappears, and a new
        axis of the number of ranks stands at `concat_axis`; with `tiled` it is cut into equal chunks that are
        concatenated.
      axis_name, split_axis, concat_axis, axis_index_groups, tiled: as in `jax.lax.all_to_all`.
      config: tuning; never changes the result.

    Returns:
      An array of the dtype of `x`, or a pytree of such arrays, with the shapes of `jax.lax.all_to_all`.

    Raises:
      ValueError, TypeError: an argument is wrong, or the call is not inside `jax.shard_map` over `axis_name`.
    """
    caller = "all_to_all"
    config = _validate.config(config, caller)
    if _mesh.vmapped(axis_name):
        return _inside_vmap(x, axis_name, split_axis, concat_axis, axis_index_groups, tiled)
    names, sizes = _validate.axes(axis_name, caller, most=8)
    groups = _validate.index_groups(axis_index_groups, sizes, caller)
    config = backends.with_nodes(sizes, config, slow_axis=False)

    def one(leaf: Any) -> jax.Array:
        leaf = _validate.array(leaf, caller, "x")
        size = _mesh.group_size(sizes, groups)
        split, concat = _validate.axis_numbers(leaf, split_axis, concat_axis, size, tiled, caller)
        data, wrap = _data(leaf)
        (data,) = _mesh.vary_over([data], names)
        (out,) = all_to_all_p.bind(
            data,
            axis_name=names,
            axis_sizes=sizes,
            split_axis=split,
            concat_axis=concat,
            tiled=bool(tiled),
            axis_index_groups=groups,
            config=config,
        )
        return wrap(out)

    return jax.tree.map(one, x)


def _inside_vmap(x: Any, axis_name: Any, split_axis: int, concat_axis: int, axis_index_groups: Any, tiled: bool) -> Any:
    """Exchanges over an axis that an enclosing `vmap` names, by JAX's own operation: the parts change places inside a
    device."""
    names = tuple(axis_name) if isinstance(axis_name, tuple | list) else (axis_name,)
    with _mesh.varying_unchecked(names):
        return jax.lax.all_to_all(
            x, axis_name, split_axis, concat_axis, axis_index_groups=axis_index_groups, tiled=tiled
        )


WHOLE_BYTES = {
    "int2": "int8",
    "uint2": "uint8",
    "int4": "int8",
    "uint4": "uint8",
    "float4_e2m1fn": "bfloat16",
}
"""What elements of less than a byte, which XLA packs on GPUs, travel as: a dtype that has all their values."""


def _data(x: jax.Array) -> tuple[jax.Array, Callable[[jax.Array], jax.Array]]:
    """Returns the data of an array, and a function that makes an array like `x` of such data.

    The data of PRNG keys are their numbers, which have further dimensions behind those of `x`; those of elements of
    less than a byte are the same values in a dtype of `WHOLE_BYTES`. For every other array, the data are the array
    itself.
    """
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        implementation = jax.random.key_impl(x)
        return jax.random.key_data(x), lambda out: jax.random.wrap_key_data(out, impl=implementation)
    if x.dtype.name in WHOLE_BYTES:
        return x.astype(WHOLE_BYTES[x.dtype.name]), lambda out: out.astype(x.dtype)
    return x, lambda out: out


GATHERED = ("varying", "reduced", "invarying")


@jax.named_scope("xen_moe_all_gather")
def all_gather(
    x: Any,
    axis_name: Any,
    *,
    axis_index_groups: Any = None,
    axis: int = 0,
    tiled: bool = False,
    to: str = "varying",
    wire: Any = None,
    config: KernelConfig | None = None,
) -> Any:
    """`jax.lax.all_gather`: the arrays of all ranks, on every rank, in the order of the ranks.

    Its gradient is `jax.lax.psum_scatter`.

    Args:
      x: array or pytree of arrays, of one shape on all ranks. Without `tiled` the arrays of all ranks are stacked along
        a new `axis`; with `tiled` they are concatenated along an old one.
      axis_name, axis_index_groups, axis, tiled, to: as in `jax.lax.all_gather`. With `to` other than "varying", JAX's
        own operation gathers.
      wire: None, or the format in which float arrays travel, as in `dispatch`: every rank's part, this rank's too, is
        quantized in blocks along its last dimension. Gradients are straight-through and travel in their own dtype.
      config: tuning; never changes the result.

    Returns:
      An array of the dtype of `x`, or a pytree of such arrays, with the shapes of `jax.lax.all_gather`.

    Raises:
      ValueError, TypeError: an argument is wrong, or the call is not inside `jax.shard_map` over `axis_name`.
    """
    caller = "all_gather"
    config = _validate.config(config, caller)
    wire = _validate.wire(wire, caller)
    if not is_one_of(to, GATHERED):
        raise ValueError(f"{caller}: to={to!r}: must be one of {GATHERED}, as in jax.lax.all_gather")
    if wire is not None and (to != "varying" or _mesh.vmapped(axis_name)):
        raise ValueError(
            f"{caller}: wire={wire.dtype!r} with to={to!r}, axis_name={axis_name!r}: JAX's own operation takes this "
            "call, which knows no wire: leave the wire out, or gather over a mesh axis with to='varying'"
        )
    if to != "varying" or _mesh.vmapped(axis_name):
        names = tuple(axis_name) if isinstance(axis_name, tuple | list) else (axis_name,)
        with _mesh.varying_unchecked(names) if _mesh.vmapped(axis_name) else contextlib.nullcontext():
            return jax.lax.all_gather(x, axis_name, axis_index_groups=axis_index_groups, axis=axis, tiled=tiled, to=to)
    names, sizes = _validate.axes(axis_name, caller, most=8)
    groups = _validate.index_groups(axis_index_groups, sizes, caller)
    # between nodes the CUDA backend gathers by a dispatch, which has no groups
    config = backends.with_nodes(sizes, config, slow_axis=groups is None)

    def one(leaf: Any) -> jax.Array:
        leaf = _validate.array(leaf, caller, "x")
        _validate.known_shape(leaf, caller, "x")
        place = _validate.gather_axis(leaf, axis, tiled, caller)
        if wire is not None and (leaf.dtype.name not in _validate.FLOATS or leaf.ndim == 0):
            raise TypeError(
                f"{caller}: wire={wire.dtype!r} with x {leaf.dtype}{list(leaf.shape)}: only arrays of "
                f"{_validate.FLOATS} are quantized, along their last dimension: leave the wire out"
            )
        data, wrap = _data(leaf)
        (data,) = _mesh.vary_over([data], names)
        shape: dict[str, Any] = {
            "axis_sizes": sizes, "axis_index_groups": groups, "concat_axis": place, "tiled": bool(tiled)
        }  # fmt: skip
        if 0 in data.shape:  # XLA refuses to gather along an empty dimension
            ((dims, dtype),) = _shapes.all_gather(data, **shape)
            return wrap(_mesh.vary(jnp.zeros(dims, dtype), _jax_internals.varying_axes(data)))
        (out,) = all_gather_p.bind(data, axis_name=names, wire=wire, config=config, **shape)
        return wrap(out)

    return jax.tree.map(one, x)


@jax.named_scope("xen_moe_ragged_all_to_all")
def ragged_all_to_all(
    operand: jax.Array,
    output: jax.Array,
    input_offsets: jax.Array,
    send_sizes: jax.Array,
    output_offsets: jax.Array,
    recv_sizes: jax.Array,
    *,
    axis_name: Any,
    axis_index_groups: Any = None,
    config: KernelConfig | None = None,
) -> jax.Array:
    """`jax.lax.ragged_all_to_all`, on every platform, with a right gradient.

    Rows `operand[input_offsets[p] : input_offsets[p] + send_sizes[p]]` go to rank `p`'s result, at row
    `output_offsets[p]`.

    Args:
      operand: `[N, ...]`, rows to send. output: `[M, ...]`, same trailing shape and dtype: the result where nothing
        arrives.
      input_offsets, send_sizes, output_offsets, recv_sizes: integer `[R]`. `output_offsets[p]` counts rows of rank
        `p`'s output; `recv_sizes[s]` counts the rows that source `s` sends here. They are `[n * R]` for `n` segments
        for each peer, with the segments of a peer side by side. These are `n` exchanges, one after the other, so one
        segment for each peer is the fastest.
      axis_name, axis_index_groups: as in `jax.lax.ragged_all_to_all`.
      config: tuning; never changes the result.

    Returns:
      `[M, ...]`. Rows outside `operand` or `output` are neither read nor written. If two sources write one row by
      segments of the same number, either may win; by segments of different numbers, the later segment wins.

    Raises:
      ValueError, TypeError: an argument is wrong, or the call is not inside `jax.shard_map` over `axis_name`.
      NotImplementedError: `axis_name` is an axis of an enclosing `jax.vmap`.
    """
    caller = "ragged_all_to_all"
    config = _validate.config(config, caller)
    if _mesh.vmapped(axis_name):
        raise NotImplementedError(
            f"{caller}: axis_name={axis_name!r}: an axis of an enclosing vmap cannot be exchanged over; use a "
            "mesh axis (jax.lax.ragged_all_to_all cannot either)"
        )
    names, sizes = _validate.axes(axis_name, caller, most=8)
    groups = _validate.index_groups(axis_index_groups, sizes, caller)
    config = backends.with_nodes(sizes, config, slow_axis=False)
    operand, output = _validate.array(operand, caller, "operand"), _validate.array(output, caller, "output")
    if operand.ndim == 0 or operand.shape[1:] != output.shape[1:] or operand.dtype != output.dtype:
        raise ValueError(
            f"{caller}: operand is {operand.dtype}{list(operand.shape)} and output "
            f"{output.dtype}{list(output.shape)}: they may "
            "differ in the first dimension only"
        )
    for name, rows in (("operand", operand), ("output", output)):
        _validate.known_shape(rows, caller, name)
    size = _mesh.group_size(sizes, groups)
    offsets: list[jax.Array] = []
    for name, value in (
        ("input_offsets", input_offsets),
        ("send_sizes", send_sizes),
        ("output_offsets", output_offsets),
        ("recv_sizes", recv_sizes),
    ):
        value = _validate.array(value, caller, name)
        if value.ndim != 1 or not value.shape[0] or value.shape[0] % size:
            raise ValueError(
                f"{caller}: {name} has shape {value.shape}: must be ({size},), one entry for each rank, or a multiple "
                "of that for several segments for each"
            )
        if offsets and value.shape != offsets[0].shape:
            raise ValueError(
                f"{caller}: {name} has shape {value.shape} and input_offsets {offsets[0].shape}: they must be equal"
            )
        if not jnp.issubdtype(value.dtype, jnp.integer):
            raise TypeError(f"{caller}: {name} has dtype {value.dtype}: must be an integer dtype")
        if jnp.iinfo(value.dtype).max > _validate.LARGEST:  # no row has such a number, whatever its low 32 bits name
            value = jnp.clip(value, max(jnp.iinfo(value.dtype).min, -_validate.LARGEST), _validate.LARGEST)
        offsets.append(value.astype(jnp.int32))
    operand, wrap = _data(operand)
    output, _ = _data(output)
    operand, output, *offsets = _mesh.vary_over([operand, output, *offsets], names)
    if 0 in (*operand.shape, *output.shape):  # nothing can arrive
        return wrap(output)

    def exchange(output: jax.Array, segment: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        (out,) = ragged_all_to_all_p.bind(
            operand, output, *segment, axis_name=names, axis_sizes=sizes, axis_index_groups=groups, config=config
        )
        return out, None

    if offsets[0].shape[0] == size:
        return wrap(exchange(output, tuple(offsets))[0])
    in_turn = tuple(value.reshape(size, -1).T for value in offsets)  # the i-th segment of every peer
    return wrap(jax.lax.scan(exchange, output, in_turn)[0])
