"""Declares an operation to JAX: one primitive, its abstract evaluation, one lowering rule per platform.

A jaxpr then names the operation (`xen_moe_dispatch`), and `lower(lowering_platforms=("tpu",))` works anywhere: CPU and
every unknown platform run the plain JAX backend, TPU the Pallas kernels, CUDA the compiled ones.
"""

from __future__ import annotations

import contextlib
import functools
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from xen_moe_jax import _jax_internals, _mesh, _nodes, _profiles, _ranks, _tested_jax, backends
from xen_moe_jax._shapes import ShapeDtype
from xen_moe_jax.backends.base import Call, Exchange, Move

_declared: list[Primitive] = []
PLATFORMS = (None, "cpu", "tpu", "cuda")
"""Platforms with a lowering rule; None is any other."""
NOT_FOR_BACKENDS = ("gradient_wire",)
"""Parameters that only derivative rules read."""


def declare(
    operation: str,
    shapes: Callable[..., Sequence[ShapeDtype]],
    *,
    mask: Callable[..., Sequence[Any]] | None = None,
    finish: Callable[..., Any] | None = None,
    otherwise: Callable[..., Any] | None = None,
    multiplies: bool = False,
) -> Primitive:
    """Declares a primitive `xen_moe_<operation>` whose lowering asks `backends` for the backend that runs it.

    `shapes(*avals, **params)` gives its results; the first operand gives their mesh and varying axes.
    For a backend that does not take `active`, `mask(operands, spec)` makes operands without it; `finish(results,
    operands, spec)` then completes the backend's results. `otherwise(*operands, **params)`, made of other primitives,
    runs where a backend does not have the operation. `multiplies`: it is a `_Multiplication`.
    """
    primitive = _primitive(operation, shapes, multiplies)
    rules = {platform: _lowering(operation, platform, mask, finish, otherwise) for platform in PLATFORMS}

    def rule(ctx: mlir.LoweringRuleContext, *operands: Any, **params: Any) -> Any:
        platforms = _jax_internals.platforms_of(ctx)
        if len(platforms) > 1:  # rules that are registered by platform would fail here in JAX, which cannot say why
            raise NotImplementedError(
                f"{operation} for platforms={platforms} in one program: kernels differ by platform, and XLA runs no "
                "program that holds another platform's. Export one program for each platform"
            )
        with _precision(params):
            return rules.get(platforms[0], rules[None])(ctx, *operands, **params)

    mlir.register_lowering(primitive, rule, cacheable=False)  # not cacheable: two equal calls are two sites
    _declared.append(primitive)
    return primitive


def declare_composite(
    operation: str, shapes: Callable[..., Sequence[ShapeDtype]], function: Callable, *, multiplies: bool = False
) -> Primitive:
    """Declares a primitive that `function(*operands, **params)` computes on every platform, out of other primitives.
    `multiplies`: it is a `_Multiplication`."""
    primitive = _primitive(operation, shapes, multiplies)

    def rule(ctx: mlir.LoweringRuleContext, *operands: Any, **params: Any) -> Any:
        with _precision(params):
            return _lower(ctx, operands, _plain_avals(ctx), functools.partial(function, **params))

    mlir.register_lowering(primitive, rule, cacheable=False)
    return primitive


class _Multiplication(Primitive):
    """A primitive that multiplies with the `jax.default_matmul_precision` of the code that calls it, which is its
    parameter `precision`. This code has ended when the primitive is lowered."""

    def bind(self, *operands: Any, **params: Any) -> Any:
        return super().bind(*operands, **{"precision": jax.config.jax_default_matmul_precision, **params})


def _precision(params: dict[str, Any]) -> AbstractContextManager[Any]:
    """Takes `precision` out of the parameters, and makes it hold in a `with` statement."""
    return jax.default_matmul_precision(params.pop("precision")) if "precision" in params else contextlib.nullcontext()


def _primitive(operation: str, shapes: Callable[..., Sequence[ShapeDtype]], multiplies: bool) -> Primitive:
    primitive = (_Multiplication if multiplies else Primitive)(f"xen_moe_{operation}")
    primitive.multiple_results = True

    def abstract_eval(*avals: Any, **params: Any) -> tuple[list[Any], Any]:
        params.pop("precision", None)
        _lower_per_device_order()
        return _results(avals[0], shapes(*avals, **params)), _effects(params)

    def outside(*_: Any, **params: Any) -> Any:
        axis_name = _axis_of(params)
        within = "jax.jit" if axis_name and _mesh.group_of(axis_name) is not None else "jax.shard_map"
        raise ValueError(f"xen_moe_{operation} was called with concrete arrays outside {within}")

    primitive.def_impl(outside)
    primitive.def_effectful_abstract_eval(abstract_eval)
    batching.primitive_batchers[primitive] = functools.partial(_vmap, primitive)
    return primitive


def _results(like: Any, shapes: Sequence[ShapeDtype]) -> list[Any]:
    """Avals of the given shapes and dtypes that keep the varying manual axes and the mesh of `like`."""
    sharding = getattr(like, "sharding", None)
    avals = []
    for shape, dtype in shapes:
        changes: dict[str, Any] = {"shape": tuple(shape), "dtype": jnp.dtype(dtype), "weak_type": False}
        if sharding is not None:
            spec = jax.sharding.PartitionSpec(*[None] * len(shape))
            changes["sharding"] = sharding.update(spec=spec)
        avals.append(like.update(**changes))
    return avals


@functools.cache
def _lower_per_device_order() -> None:
    """Makes the mesh's devices part of the program on GPUs."""
    if jax.default_backend() == "gpu":
        _jax_internals.lower_per_device_order(_declared)


def _effects(params: dict[str, Any]) -> Any:
    """Returns no effects, except in interpret mode and in groups: their callbacks must run in program order, also
    through remat."""
    config = params["config"]
    if config.backend == "pallas" and config.interpret:
        return _jax_internals.interpret_effects()
    axis_name = _axis_of(params)
    return _ranks.effects(axis_name, config) if axis_name else set()


def _axis_of(params: dict[str, Any]) -> tuple[str, ...]:
    """Returns the axes of the ranks; none for a composite that reaches no other rank, or on TPUs alone."""
    return params["spec"].axis_name if "spec" in params else params.get("axis_name", ())


def _lowering(
    operation: str,
    platform: str | None,
    mask: Callable[..., Sequence[Any]] | None,
    finish: Callable[..., Any] | None,
    otherwise: Callable[..., Any] | None,
) -> Callable:
    def rule(ctx: mlir.LoweringRuleContext, *operands: Any, **params: Any) -> Any:
        _tested_jax.warn_of_newer()
        axis_name = _axis_of(params)
        backend = backends.for_lowering(platform, params["config"], axis_name)
        function = backend.operation(operation)
        known = {name: value for name, value in params.items() if name not in NOT_FOR_BACKENDS}
        known["config"] = _tuned_config(operation, ctx, params)
        avals = _plain_avals(ctx)
        call: Any = None
        if function is not None:
            call = (Call if "spec" in known else Move if "new_slots" in known else Exchange)(**known)
        if function is None or (otherwise is not None and not backend.runs(operation, avals, call)):
            if otherwise is None:
                raise NotImplementedError(f"the {backend.name} backend does not run {operation}")
            return _lower(ctx, operands, avals, functools.partial(otherwise, **params))
        backend.check_wire(params.get("wire"))
        if "spec" in params and not backend.takes_nodes:
            _nodes.check_backend(params["spec"], params["config"], backend.name)
        run: Callable[..., Any] = functools.partial(function, call)
        if (group := _mesh.group_of(axis_name)) is not None:
            run = _noted(run, group, operation, avals, known)
        if mask is not None and not backend.takes_active:
            run = _masked(run, mask, finish, params["spec"])
        if _ranks.by_host(axis_name, params["config"]):
            run = _guarded(run, operation, axis_name, takes_active=mask is not None)
        avals = backend.operand_avals(operation, avals, call)
        with jax.enable_x64(False) if backend.in_32_bits else contextlib.nullcontext():
            return _lower(ctx, operands, avals, run)

    return rule


def _site(ctx: mlir.LoweringRuleContext) -> int:
    """A number for this call in this program: from the program's name, the call's scopes and its place among the calls.

    Not from source lines: a program that is compiled again from the same code finds itself in the compilation cache,
    and all processes of a job agree.
    """
    attributes = ctx.module_context.module.operation.attributes
    program = str(attributes["sym_name"]) if "sym_name" in attributes else ""
    return zlib.crc32(f"{program} {ctx.name_stack} {ctx.module_context.new_channel()}".encode()) or 1


def _tuned_config(operation: str, ctx: mlir.LoweringRuleContext, params: dict[str, Any]) -> Any:
    """The caller's config, its unset fields filled in from a profile of the devices that the program is for. Profiles
    are of one node."""
    if operation not in _profiles.OPERATIONS or _nodes.several(params["spec"].num_ranks, params["config"]):
        return params["config"]
    payload: Any = ctx.avals_in[0]
    wire = params["wire"]
    mesh = getattr(ctx.module_context.axis_context, "mesh", None)
    hidden, dtype = payload.shape[-1], payload.dtype.name
    spec, config = params["spec"], params["config"]
    return _profiles.resolve(config, operation, spec, hidden, dtype, wire.dtype if wire else None, mesh)


def _plain_avals(ctx: mlir.LoweringRuleContext) -> Sequence[Any]:
    """Returns avals without varying axes: these were checked when the primitive was traced, and only get in the way
    inside its implementation."""
    return [_jax_internals.without_varying(aval) for aval in ctx.avals_in]


def _lower(ctx: mlir.LoweringRuleContext, operands: Sequence[Any], avals: Sequence[Any], run: Callable) -> Any:
    plain = ctx.replace(avals_in=avals)
    mesh = getattr(ctx.module_context.axis_context, "mesh", None)
    exported = _jax_internals.lowers_for_export(ctx)
    with _mesh.lowering_for(mesh, _site(ctx), exported), _jax_internals.without_varying_checks(), _usual_promotion():
        results = mlir.lower_fun(_as_tuple(run), multiple_results=True)(plain, *operands)
    ctx.set_tokens_out(plain.tokens_out)  # interpret mode orders its callbacks by tokens
    return results


@contextlib.contextmanager
def _usual_promotion() -> Iterator[None]:
    """Traces an implementation under JAX's defaults: the caller's settings concern the caller's code alone."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def _masked(
    run: Callable, mask: Callable[..., Sequence[Any]], finish: Callable[..., Any] | None, spec: Any
) -> Callable:
    def masked(*operands: Any) -> Any:
        results = run(*mask(operands, spec))
        return results if finish is None else finish(results, operands, spec)

    return masked


def _noted(run: Callable, group: Any, operation: str, avals: Sequence[Any], params: dict[str, Any]) -> Callable:
    """Returns `run` for a group: once it has been traced, it notes the operation (`Group.note`), because a process that
    joins compares its operations with those of the group. An operation that cannot be traced is no part of a
    program."""

    def noted(*operands: Any) -> Any:
        arrays = " ".join(f"{aval.dtype.name}{list(aval.shape)}" for aval in avals)
        results = run(*operands)
        group.note({"operation": operation, "operands": arrays, "site": _mesh.lowering_site(), **params})
        return results

    return noted


def _guarded(run: Callable, operation: str, axis_name: tuple[str, ...], takes_active: bool) -> Callable:
    """In a group: with results that are poisoned where it has failed. `active` is the fifth operand."""

    def guarded(*operands: Any) -> Any:
        return _ranks.poison_failed(run(*operands), operands[4] if takes_active else None, operation, axis_name)

    return guarded


def _as_tuple(f: Callable) -> Callable:
    def wrapped(*args: Any) -> tuple[Any, ...]:
        out = f(*args)
        return out if isinstance(out, tuple) else (out,)

    return wrapped


def in_turn(call: Callable[..., Any], operands: Sequence[Any], dims: Sequence[int | None]) -> tuple[Any, Any]:
    """A batching rule: `call(*operands)` for one entry of the batch after the other, in a loop.

    A batch cannot join the tokens of one call: its capacity, drops and order of rows would be those of all entries
    together. In a loop every entry gets the bits of a call of its own, and all ranks take the same number of turns.
    """
    mapped = {i: dim for i, dim in enumerate(dims) if dim is not None}
    operands = _mesh.vary_alike(*operands)  # vmap(spmd_axis_name=) makes mapped operands vary over one more mesh axis

    def one(entries: Sequence[Any]) -> list[Any]:
        given = list(operands)
        for i, entry in zip(mapped, entries, strict=True):
            given[i] = entry
        return list(call(*given))

    results = jax.lax.map(one, [jnp.moveaxis(operands[i], dim, 0) for i, dim in mapped.items()])
    return results, [0] * len(results)


def _vmap(primitive: Primitive, operands: Sequence[Any], dims: Sequence[int | None], **params: Any) -> tuple[Any, Any]:
    return in_turn(functools.partial(primitive.bind, **params), operands, dims)


# Starts and dones under vmap: the operations of all entries of a batch would be pending at once, in the same buffers.
# So a start does nothing, and its done runs the whole operation for one entry after the other: the same bits, without
# overlap.


def batch_start(shapes: Callable[..., Sequence[ShapeDtype]]) -> Any:
    """Batches a start: zeros, the same for every entry, stand for the pending arrays that `shapes` describes."""

    def entry(a: Any, dim: int | None) -> Any:
        return a if dim is None else jax.ShapeDtypeStruct((*a.shape[:dim], *a.shape[dim + 1 :]), a.dtype)

    def rule(operands: Any, dims: Any, **params: Any) -> Any:
        entries = [entry(a, dim) for a, dim in zip(operands, dims, strict=True)]
        zeros = [jnp.zeros(shape, dtype) for shape, dtype in shapes(*entries, **params)]
        varying = _mesh.vary_alike(*zeros, *operands)[: len(zeros)]
        return list(varying), [None] * len(zeros)

    return rule


def batch_done(operation: str, run: Callable[..., Any], count: int) -> Any:
    """Batches a done: `run` of its first `count` operands is the whole operation, and nothing is pending."""

    def rule(operands: Any, dims: Any, **params: Any) -> Any:
        if all(dim is None for dim in dims[:count]):
            raise NotImplementedError(
                f"vmap of {operation}: its start is outside of the vmap, and what is pending inside: finish the flight "
                "before the vmap"
            )
        return in_turn(functools.partial(run, **params), operands[:count], dims[:count])

    return rule
