"""The primitives, their abstract evaluation and their lowerings. The only file that touches semi-private JAX.

Each operation is one `jax.extend.core.Primitive`, so that a jaxpr names it, with one lowering rule per platform:
CPU and every unknown platform run `xen_moe_jax.reference`, TPU `xen_moe_jax.pallas`, CUDA `xen_moe_jax.cuda`.
"""

from __future__ import annotations

import contextvars
import functools
import importlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax._src import config as jax_config
from jax._src import dispatch as jax_dispatch
from jax._src import distributed, effects
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from xen_moe_jax import _backends, _ragged_gradient
from xen_moe_jax._config import KernelConfig
from xen_moe_jax._quantize import Wire
from xen_moe_jax._spec import Spec, scale_blocks

ShapeDtype = tuple[tuple[int, ...], Any]


# -- abstract evaluation ----------------------------------------------------------------------------------------------


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


def dispatch_shapes(*operands: Any, spec: Spec, wire: Wire | None, config: KernelConfig) -> list[ShapeDtype]:
    """Results of a dispatch, in the order of docs/internals.md; four operands are a `BlockScaled` x."""
    x = operands[0]
    hidden = x.shape[1]
    shapes: list[ShapeDtype] = [(spec.rows_shape(hidden), x.dtype)]
    if len(operands) == 4:
        shapes.append((spec.rows_shape(scale_blocks(hidden)), jnp.float32))
    shapes.append(((spec.num_ranks, spec.num_tokens, spec.slots), jnp.int32))
    shapes.append(((spec.num_ranks, spec.local_experts), jnp.int32))
    shapes.append((spec.weights_shape, jnp.float32))
    if spec.layout == "ranked":
        shapes.append((spec.weights_shape, jnp.int32))
    return shapes


def _combine_shapes(y: Any, *_: Any, spec: Spec, weighted: bool, wire: Any, config: Any) -> list[ShapeDtype]:
    return [((spec.num_tokens, y.shape[-1]), y.dtype)]


def _redispatch_shapes(x: Any, *_: Any, spec: Spec, wire: Any, config: Any) -> list[ShapeDtype]:
    return [(spec.rows_shape(x.shape[1]), x.dtype)]


def _all_to_all_shapes(
    x: Any, *, axis_name, axis_sizes, split_axis, concat_axis, tiled, axis_index_groups, config
) -> list[ShapeDtype]:
    size = group_size(axis_sizes, axis_index_groups)
    shape = list(x.shape)
    if tiled:
        shape[split_axis] //= size
        shape[concat_axis] *= size
    else:
        del shape[split_axis]
        shape.insert(concat_axis, size)
    return [(tuple(shape), x.dtype)]


def _ragged_shapes(operand: Any, output: Any, *_: Any, **params: Any) -> list[ShapeDtype]:
    return [(output.shape, output.dtype)]


def group_size(axis_sizes: tuple[int, ...], axis_index_groups: Any) -> int:
    """Ranks that talk to each other: those of the axes, or of one of the groups that they are cut into."""
    return math.prod(axis_sizes) if axis_index_groups is None else len(axis_index_groups[0])


# -- registration -----------------------------------------------------------------------------------------------------


def _lowering(operation: str, platform: str | None, semaphores: tuple[int, ...] = ()) -> Callable:
    def rule(ctx: mlir.LoweringRuleContext, *operands: Any, **params: Any) -> Any:
        implementation = _backends.implementation(operation, platform, params["config"])
        bound = functools.partial(implementation, **params)
        if operation in ("dispatch", "dispatch_start") and len(operands) == 3:
            bound = functools.partial(_without_scales, bound)
        # varying axes were checked when the primitive was traced; inside its implementation they only get in the way
        avals = [_without_varying(aval) for aval in ctx.avals_in]
        for i in semaphores:
            avals[i] = _semaphores_like(avals[i])
        plain = ctx.replace(avals_in=avals)
        mesh = _lowering_mesh.set(getattr(ctx.module_context.axis_context, "mesh", None))
        try:
            with jax_config._check_vma(False):
                results = mlir.lower_fun(_as_tuple(bound), multiple_results=True)(plain, *operands)
        finally:
            _lowering_mesh.reset(mesh)
        ctx.set_tokens_out(plain.tokens_out)  # interpret mode orders its callbacks by tokens
        return results

    return rule


_lowering_mesh: contextvars.ContextVar[Any] = contextvars.ContextVar("mesh", default=None)


def lowering_mesh() -> Any:
    """The mesh that an operation is being lowered for; an `AbstractMesh` where no devices are known."""
    mesh = _lowering_mesh.get()
    if mesh is None:
        raise ValueError("xen_moe_jax operations must be inside jax.shard_map when they are lowered")
    return mesh


@functools.cache
def _lower_per_device_order() -> None:
    """On GPUs the mesh's devices are part of the program: JAX must not reuse a lowering for another device order."""
    if jax.default_backend() == "gpu":
        for primitive in (dispatch_p, combine_p, redispatch_p, all_to_all_p, ragged_all_to_all_p):
            jax_dispatch.prim_requires_devices_during_lowering.add(primitive)


def key_value_client() -> Any:
    """The client of `jax.distributed`'s key-value store; None before `jax.distributed.initialize()`."""
    return distributed.global_state.client


def _interpret_effects(config: KernelConfig) -> Any:
    """None, except in interpret mode: its callbacks must run in program order, also through custom_vjp and remat."""
    if config.backend != "pallas" or not config.interpret:
        return set()
    interpret = importlib.import_module("jax._src.pallas.mosaic.interpret.params")
    found = interpret.get_interpret_effects()
    for allowed in (effects.custom_derivatives_allowed_effects, effects.remat_allowed_effects):
        for effect in found:
            allowed.add_type(type(effect))
    return found


def _without_varying(aval: Any) -> Any:
    return aval.update(manual_axis_type=type(aval.mat)())


def _without_scales(implementation: Callable, x: Any, topk_idx: Any, topk_weights: Any) -> Any:
    return implementation(x, None, topk_idx, topk_weights)


def _as_tuple(f: Callable) -> Callable:
    def wrapped(*args: Any) -> tuple[Any, ...]:
        out = f(*args)
        return out if isinstance(out, tuple) else (out,)

    return wrapped


def _no_vmap(name: str, *_: Any, **__: Any) -> Any:
    raise NotImplementedError(
        f"vmap of {name} is not supported: tokens already form a batch. Fold the mapped axis into the token axis "
        "(reshape [B, T, ...] to [B*T, ...]) before the call, or loop over it with jax.lax.map."
    )


def _semaphores_like(aval: Any) -> Any:
    """TPU DMA semaphores of the shape of an int32 array, which is what carries them between two kernels."""
    tpu = importlib.import_module("jax.experimental.pallas.tpu")
    return tpu.SemaphoreType.DMA(aval.shape).get_array_aval()


def _primitive(operation: str, shapes: Callable, semaphores: tuple[int, ...] = ()) -> Primitive:
    """`semaphores`: operands that are TPU semaphores, declared as int32 arrays."""
    primitive = Primitive(f"xen_moe_{operation}")
    primitive.multiple_results = True

    def abstract_eval(*avals: Any, **params: Any) -> tuple[list[Any], Any]:
        _lower_per_device_order()
        return _results(avals[0], shapes(*avals, **params)), _interpret_effects(params["config"])

    def outside(*_: Any, **params: Any) -> Any:
        raise ValueError(f"xen_moe_{operation} was called with concrete arrays outside jax.shard_map")

    primitive.def_impl(outside)
    primitive.def_effectful_abstract_eval(abstract_eval)
    batching.primitive_batchers[primitive] = functools.partial(_no_vmap, operation)
    mlir.register_lowering(primitive, _lowering(operation, None, semaphores))
    for platform in ("cpu", "tpu", "cuda"):
        mlir.register_lowering(primitive, _lowering(operation, platform, semaphores), platform=platform)
    return primitive


dispatch_p = _primitive("dispatch", dispatch_shapes)
combine_p = _primitive("combine", _combine_shapes)
redispatch_p = _primitive("redispatch", _redispatch_shapes)
all_to_all_p = _primitive("all_to_all", _all_to_all_shapes)
ragged_all_to_all_p = _primitive("ragged_all_to_all", _ragged_shapes)


# -- all_to_all is linear: jvp, transpose and vmap as jax.lax has them ------------------------------------------------


def _all_to_all_transpose(cotangents: Any, x: Any, **params: Any) -> list[Any]:
    (cotangent,) = cotangents
    if type(cotangent) is ad.Zero:
        return [ad.Zero(x.aval)]
    swapped = {**params, "split_axis": params["concat_axis"], "concat_axis": params["split_axis"]}
    return all_to_all_p.bind(cotangent, **swapped)


def _all_to_all_batcher(operands: Any, dims: Any, *, split_axis: int, concat_axis: int, **params: Any) -> Any:
    (x,), (dim,) = operands, dims
    x = jnp.moveaxis(x, dim, 0)
    return all_to_all_p.bind(x, split_axis=split_axis + 1, concat_axis=concat_axis + 1, **params), [0]


ad.deflinear2(all_to_all_p, _all_to_all_transpose)
batching.primitive_batchers[all_to_all_p] = _all_to_all_batcher


# -- ragged_all_to_all is linear in operand and output ----------------------------------------------------------------


def _ragged_jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    out = ragged_all_to_all_p.bind(*primals, **params)
    operand_dot, output_dot, *_ = tangents
    if type(operand_dot) is ad.Zero and type(output_dot) is ad.Zero:
        return out, [ad.Zero(jax.typeof(out[0]).to_tangent_aval())]
    moved = [ad.instantiate_zeros(operand_dot), ad.instantiate_zeros(output_dot), *primals[2:]]
    return out, ragged_all_to_all_p.bind(*moved, **params)


def _ragged_transpose(cotangents: Any, operand: Any, output: Any, *offsets: Any, **params: Any) -> list[Any]:
    (cotangent,) = cotangents
    if type(cotangent) is ad.Zero:
        zeros = [ad.Zero(v.aval) if ad.is_undefined_primal(v) else None for v in (operand, output)]
        return [*zeros, None, None, None, None]
    shape = operand.aval.shape if ad.is_undefined_primal(operand) else operand.shape
    bind = functools.partial(ragged_all_to_all_p.bind, **params)
    exchange = functools.partial(
        all_to_all_p.bind,
        split_axis=0,
        concat_axis=0,
        tiled=True,
        **{k: params[k] for k in ("axis_name", "axis_sizes", "axis_index_groups", "config")},
    )
    operand_ct, output_ct = _ragged_gradient.transpose(
        cotangent,
        shape,
        *offsets,
        ragged=lambda *a: bind(*a)[0],
        exchange=lambda a: exchange(a)[0],
        axis_name=params["axis_name"],
    )
    wanted = [ad.is_undefined_primal(operand), ad.is_undefined_primal(output)]
    return [operand_ct if wanted[0] else None, output_ct if wanted[1] else None, None, None, None, None]


ad.primitive_jvps[ragged_all_to_all_p] = _ragged_jvp
ad.primitive_transposes[ragged_all_to_all_p] = _ragged_transpose


# -- mesh questions ---------------------------------------------------------------------------------------------------


def manual_axes() -> tuple[str, ...]:
    """Mesh axes that the code being traced is manual over: not empty inside `jax.shard_map`."""
    return tuple(jax.sharding.get_abstract_mesh().manual_axes)


def axis_size(name: str) -> int:
    return jax.sharding.get_abstract_mesh().shape[name]


def vary_over(operands: Sequence[Any], axis_name: tuple[str, ...]) -> list[Any]:
    """Operands that all vary over `axis_name` and over whatever any of them varies over."""
    known: list[frozenset[str]] = [jax.typeof(x).manual_axis_type.varying for x in operands]
    wanted = frozenset(axis_name).union(*known)
    if not _vma_is_checked(axis_name[0]):
        return list(operands)
    return [
        jax.lax.pcast(x, tuple(sorted(wanted - vma)), to="varying") if wanted - vma else x
        for x, vma in zip(operands, known, strict=True)
    ]


def _vma_is_checked(axis: str) -> bool:
    """Whether `check_vma=True`: only then does an axis index vary over its axis."""
    index = jax.eval_shape(lambda: jax.lax.axis_index(axis))
    return index.manual_axis_type is not None and axis in index.manual_axis_type.varying
