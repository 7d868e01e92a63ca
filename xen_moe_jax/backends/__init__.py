"""Chooses the backend that runs an operation: by platform, unless `KernelConfig.backend` insists.

A backend is a package with an instance `BACKEND` of `base.Backend`, which is imported when it is first used.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import sys
import warnings

import jax

from xen_moe_jax import _jax_internals, _mesh
from xen_moe_jax._config import KernelConfig
from xen_moe_jax._spec import Spec
from xen_moe_jax.backends.base import Backend, BackendUnavailable

BY_PLATFORM = {"tpu": "pallas", "cuda": "cuda"}
CUDA_PACKAGE = f"{__name__}.cuda"

IN_GROUPS = ("cpu", "cuda")
"""Platforms on which a program may call the host, which is how the ranks of an `elastic.Group` exchange."""


def for_lowering(platform: str | None, config: KernelConfig, axis_name: tuple[str, ...]) -> Backend:
    """The backend that runs an operation over `axis_name` lowered for `platform` (None: any other platform).

    Raises:
      ValueError: `config.backend` names a backend that does not run on `platform`.
      BackendUnavailable: it was asked for by name and cannot be loaded.
    """
    if _mesh.group_of(axis_name) is not None:
        by_kernels = config.backend == "cuda" and platform == "cuda"
        if not by_kernels and (config.backend not in (None, "reference") or platform not in IN_GROUPS):
            raise ValueError(
                f"KernelConfig.backend={config.backend!r} on platform {platform!r} over the axis {axis_name} of an "
                f"elastic.Group: its ranks exchange through the host, by plain JAX, on {', '.join(IN_GROUPS)}; use "
                "backend=None, or 'cuda' on GPUs"
            )
        return load("cuda" if by_kernels else "reference")
    name = config.backend or for_platform(platform)
    if config.backend is not None:
        _check_platform(name, platform, config)
        return load(name)
    try:
        return load(name)
    except BackendUnavailable as reason:
        warnings.warn(f"xen_moe_jax: plain JAX instead of the {name} backend: {reason}", stacklevel=2)
        return load("reference")


def for_async(platform: str | None, spec: Spec, config: KernelConfig) -> Backend | None:
    """The backend that runs start and done of an operation traced for `platform` as two programs; None if it cannot."""
    backend = _backend(config.backend or for_platform(platform))
    return backend if backend.supports_async(spec, config) else None


def for_platform(platform: str | None) -> str:
    """The backend that a platform ("cpu", "tpu", "cuda", ...) uses unless `KernelConfig.backend` insists."""
    return BY_PLATFORM.get(platform or "", "reference")


def load(name: str) -> Backend:
    """The backend of that name.

    Raises:
      ValueError: there is no backend of that name. BackendUnavailable: it cannot run here.
    """
    backend = _backend(name)
    backend.check_available()
    return backend


def with_nodes(axis_sizes: tuple[int, ...], config: KernelConfig, *, slow_axis: bool = True) -> KernelConfig:
    """Returns `config`; where its `ranks_per_node` is None, with the number that the backend finds (`ranks_per_node`).

    Args:
      axis_sizes: sizes of the mesh axes of the operation. More than two count as one axis of all ranks.
      slow_axis: False for an operation that knows no slow and fast axis: two count as one axis, too.
    """
    if config.ranks_per_node is not None:
        return config
    if len(axis_sizes) > 2 or not slow_axis:
        axis_sizes = (math.prod(axis_sizes),)
    found = ranks_per_node(axis_sizes, config.backend)
    return config if found is None else dataclasses.replace(config, ranks_per_node=found)


def ranks_per_node(axis_sizes: tuple[int, ...], backend: str | None) -> int | None:
    """Number of consecutive ranks of these axes (one, or slow and fast) that share a fast link; None if all of them do.

    The backend of this job finds it out between its processes. On two axes it is the size of the fast one.
    """
    if backend not in (None, "cuda") or _jax_internals.key_value_client() is None:
        return None  # without a coordination service no axis spans processes
    if backend is None and jax.default_backend() != "gpu":
        return None
    found = _backend("cuda").ranks_per_node(math.prod(axis_sizes))
    return found if found is None or len(axis_sizes) == 1 else math.prod(axis_sizes[1:])


def failure() -> str:
    """Returns why an operation of this process gave up, or "". A backend that was never used is not imported for it."""
    used = sys.modules.get(CUDA_PACKAGE)
    return _mesh.group_failure() or (used.BACKEND.failure() if used is not None else "")


def register_ahead() -> None:
    """Has the CUDA backend's FFI handlers registered as soon as JAX has found its CUDA plugin, so that a program that
    another process compiled or exported finds them. Imports nothing before that, nor without the compiled module."""
    _jax_internals.when_plugins_are_found(_register)


def _register(platforms: frozenset[str]) -> None:
    if "cuda" not in platforms or importlib.util.find_spec("xen_moe_jax._cuda") is None:
        return
    try:
        _backend("cuda").register()
    except Exception as error:  # JAX would have no devices; the first operation raises it again
        warnings.warn(f"xen_moe_jax: no CUDA programs can be loaded: {error}", stacklevel=1)


def _backend(name: str) -> Backend:
    if name == "pallas":
        from xen_moe_jax.backends import pallas

        return pallas.BACKEND
    if name == "cuda":
        from xen_moe_jax.backends import cuda

        return cuda.BACKEND
    if name == "reference":
        from xen_moe_jax.backends import reference

        return reference.BACKEND
    raise ValueError(f"backend {name!r}: must be 'reference', 'pallas' or 'cuda'")


def _check_platform(name: str, platform: str | None, config: KernelConfig) -> None:
    if name == "cuda" and platform != "cuda":
        raise ValueError(f"KernelConfig.backend='cuda' on platform {platform!r}: use None or 'reference' here")
    if name == "pallas" and platform != "tpu" and not config.interpret:
        raise ValueError(
            f"KernelConfig.backend='pallas' on platform {platform!r}: use None or 'reference' here, or set "
            "interpret=True to run the TPU kernels in interpret mode (tests only: it is slow)"
        )
