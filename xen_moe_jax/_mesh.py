"""Questions about the mesh: manual axes while a call is traced, devices while it is lowered."""

from __future__ import annotations

import contextlib
import contextvars
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from xen_moe_jax import _jax_internals


def manual_axes() -> tuple[str, ...]:
    """Mesh axes that the code being traced is manual over: not empty inside `jax.shard_map`."""
    return tuple(jax.sharding.get_abstract_mesh().manual_axes)


_groups: dict[str, Any] = {}


def join(axis_name: str, group: Any) -> None:
    """From now on `axis_name` is the axis of `group` wherever no mesh has an axis of that name: `xen_moe_jax.elastic`.
    A group has `rank`, `num_ranks`, `exchange`, `good`, `note`, `failed` and `device_keys`."""
    if axis_name in _groups:
        raise ValueError(f"axis_name={axis_name!r}: this process has, or had, another group of that name")
    _groups[axis_name] = group


def group_of(axis_name: tuple[str, ...]) -> Any:
    """The group whose axis this is; None for axes of a mesh."""
    if len(axis_name) != 1 or axis_name[0] not in _groups or axis_name[0] in manual_axes():
        return None
    return _groups[axis_name[0]]


def group_failure() -> str:
    """Returns why a group of this process has failed, or "". The backend of the kernels tells of their failures."""
    for group in _groups.values():
        if group.failed:
            return group.failed
    return ""


def vmapped(axis_name: Any) -> bool:
    """Returns True if one of the names is an axis of an enclosing `jax.vmap`."""
    names = axis_name if isinstance(axis_name, tuple | list) else (axis_name,)
    return any(_is_bound(name) for name in names if isinstance(name, Hashable) and name not in manual_axes())


def automatic_axes() -> tuple[str, ...]:
    """Mesh axes that the code being traced leaves to XLA, which partitions no Mosaic kernel over them."""
    mesh = jax.sharding.get_abstract_mesh()
    return tuple(name for name in mesh.axis_names if name not in mesh.manual_axes)


def _is_bound(name: Any) -> bool:
    try:
        jax.lax.axis_size(name)
    except (NameError, TypeError, ValueError):
        return False
    return True


def varying_unchecked(names: tuple[Any, ...]) -> contextlib.AbstractContextManager[Any]:
    """Switches off JAX's check of varying axes, which knows mesh axes only, for collectives over vmapped axes alone."""
    if set(names) & set(manual_axes()):
        return contextlib.nullcontext()
    return _jax_internals.without_varying_checks()


def axis_size(name: str) -> int:
    group = group_of((name,))
    return group.num_ranks if group is not None else jax.sharding.get_abstract_mesh().shape[name]


def group_size(axis_sizes: tuple[int, ...], axis_index_groups: Any) -> int:
    """Number of ranks that communicate with each other: all ranks of the axes, or of one group of
    `axis_index_groups`."""
    return math.prod(axis_sizes) if axis_index_groups is None else len(axis_index_groups[0])


def vary_over(operands: Sequence[Any], axis_name: tuple[str, ...]) -> list[Any]:
    """Makes all operands vary over `axis_name` and over every axis that one of them varies over; literals stay
    literals. Operands that are sharded over an explicit axis become whole: no operation divides its results over it."""
    operands = [whole(x) for x in operands]
    if group_of(axis_name) is not None or not _jax_internals.checks_varying(axis_name[0]):
        return operands
    wanted = frozenset(axis_name).union(*map(_jax_internals.varying_axes, operands))
    return [vary(x, wanted) for x in operands]


def whole(array: Any, *dimensions: int) -> Any:
    """Returns `array` with all of its elements on every device of the mesh's explicit axes. With `dimensions`, negative
    numbers, it is whole along these alone."""
    spec = jax.typeof(array).sharding.spec
    numbers = [len(spec) + number for number in dimensions or range(-len(spec), 0)]
    return _sharded(array, jax.P(*(None if i in numbers else axes for i, axes in enumerate(spec))))


def divided_alike(array: Any, other: Any) -> Any:
    """Returns `array` sharded as `other`, of the same shape, if explicit axes divide its last dimension."""
    spec = jax.typeof(other).sharding.spec
    return _sharded(array, spec) if spec and spec[-1] else array


def _sharded(array: Any, spec: Any) -> Any:
    sharding = jax.typeof(array).sharding
    return array if tuple(sharding.spec) == tuple(spec) else jax.sharding.reshard(array, sharding.update(spec=spec))


def parts(array: Any, dimension: int = -1) -> int:
    """Returns the number of parts into which explicit axes of the mesh divide a dimension of `array`."""
    sharding = jax.typeof(array).sharding
    names = (sharding.spec and sharding.spec[dimension]) or ()
    return math.prod(sharding.mesh.shape[name] for name in (names if isinstance(names, tuple) else (names,)))


def sharded_alike(function: Callable[..., Any], array: Any, *others: Any) -> Any:
    """Returns `function(array, *others)`. Over explicit axes XLA divides the work, and the result is sharded as `array`
    is."""
    sharding = jax.typeof(array).sharding
    if not any(sharding.spec):
        return function(array, *others)
    by_xla = jax.sharding.auto_axes(function, axes=sharding.mesh.explicit_axes, out_sharding=sharding)
    return by_xla(array, *others)


def vary(array: Any, axes: frozenset[str]) -> Any:
    """Makes `array` vary over mesh `axes` too: as far as JAX knows, the result of a kernel varies over no axis. A
    literal stays one."""
    missing = tuple(sorted(axes - _jax_internals.varying_axes(array)))
    return jax.lax.pcast(array, missing, to="varying") if missing and not isinstance(array, np.generic) else array


def vary_alike(*operands: Any) -> Any:
    """Makes all arrays of the operands, pytrees each, vary over every mesh axis that one of them varies over."""
    leaves, tree = jax.tree.flatten(operands)
    axes = frozenset().union(*map(_jax_internals.varying_axes, leaves))
    return jax.tree.unflatten(tree, [vary(leaf, axes) for leaf in leaves])


def platform() -> str:
    """The platform that the code being traced will most likely run on: "cpu", "tpu", "cuda" or another. It is that of
    the mesh where the mesh knows it, and else that of JAX's default backend."""
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    if str(getattr(device, "device_kind", "")).startswith("TPU"):
        return "tpu"
    found = getattr(device, "platform", None) or jax.default_backend()
    return "cuda" if found == "gpu" else found


_lowering_mesh: contextvars.ContextVar[Any] = contextvars.ContextVar("mesh", default=None)
_lowering_exported: contextvars.ContextVar[bool] = contextvars.ContextVar("exported", default=False)
_lowering_site: contextvars.ContextVar[int] = contextvars.ContextVar("site", default=0)
_exchanges: contextvars.ContextVar[list[int]] = contextvars.ContextVar("exchanges")


@contextlib.contextmanager
def lowering_for(mesh: Any, site: int, exported: bool = False) -> Iterator[None]:
    """Inside this context, `lowering_mesh()` is `mesh`, `lowering_site()` is `site` and `lowering_exported()` is
    `exported`."""
    tokens = _lowering_mesh.set(mesh), _lowering_site.set(site), _lowering_exported.set(exported)
    counted = _exchanges.set([0])
    try:
        yield
    finally:
        _lowering_mesh.reset(tokens[0])
        _lowering_site.reset(tokens[1])
        _lowering_exported.reset(tokens[2])
        _exchanges.reset(counted)


def lowering_exported() -> bool:
    """Returns True if `jax.export` is lowering the program: other devices than the mesh's will run it."""
    return _lowering_exported.get()


def lowering_site() -> int:
    """Distinguishes the operation that is being lowered from other operations of the same shapes: uint32, equal in
    every process."""
    return _lowering_site.get()


def next_exchange() -> int:
    """Counts the exchanges of the operation that is being lowered."""
    count = _exchanges.get()
    count[0] += 1
    return count[0]


def lowering_mesh() -> Any:
    """The mesh that an operation is being lowered for; an `AbstractMesh` where no devices are known, None in a
    group."""
    mesh = _lowering_mesh.get()
    if mesh is None and not _groups:
        raise ValueError("xen_moe_jax operations must be inside jax.shard_map when they are lowered")
    return mesh
