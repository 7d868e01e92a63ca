"""Which backend runs an operation: by platform, unless `KernelConfig.backend` insists.

A backend is a package with a function for each operation (`dispatch`, `combine`, `redispatch`, `all_to_all`,
`ragged_all_to_all`). It may also have
  check_available()                raises `BackendUnavailable` where it cannot run
  supports_async(spec, config)          whether start and done of an operation can be two programs: then it has
                                   `dispatch_start`, `dispatch_done`, `combine_start`, `combine_done`, and
                                   `dispatch_pending`, `combine_pending` give what travels between them
  received_by_xla(spec)             places in what travels between them of arrays that a collective of XLA brings:
                                   `overlap` leaves them out of its order, or XLA would finish that first
  operand_avals(operation, avals, params)
                                   avals under which an operation is traced, where they are not its operands' own
  TAKES_ACTIVE = True              its operations take `active` as an operand, and wait for no rank that is out; the
                                   others get operands in which what does not move is masked
  TAKES_NODES = True               it adds by nodes where `KernelConfig.ranks_per_node` cuts a single axis; the others
                                   know nodes by the mesh's axes alone
  weights_to_rows, weights_from_rows
                                   numbers of a token's slots to its rows, and back; elsewhere an all-to-all of all
                                   slots for all ranks
  open_buffer, buffer_size_hint    symmetric memory
  ranks_per_node(num_ranks)        consecutive ranks of an axis that share a fast link, where not all do
  failure()                        why an operation of this process gave up; "" when none did
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import sys
import warnings
from types import ModuleType

import jax

from xen_moe_jax import _jax_internals
from xen_moe_jax._config import KernelConfig
from xen_moe_jax._spec import Spec
from xen_moe_jax.backends.availability import BackendUnavailable

BY_PLATFORM = {"tpu": "pallas", "cuda": "cuda"}


def for_lowering(platform: str | None, config: KernelConfig) -> ModuleType:
    """The backend that runs an operation lowered for `platform` (None: any other platform).

    Raises:
      ValueError: `config.backend` names a backend that does not run on `platform`.
      BackendUnavailable: it was asked for by name and cannot be loaded.
    """
    name = config.backend or for_platform(platform)
    if config.backend is not None:
        _check_platform(name, platform, config)
        return load(name)
    try:
        return load(name)
    except BackendUnavailable as reason:
        warnings.warn(f"xen_moe_jax: plain JAX instead of the {name} backend: {reason}", stacklevel=2)
        return load("reference")


def for_async(platform: str | None, spec: Spec, config: KernelConfig) -> ModuleType | None:
    """The backend that runs start and done of an operation traced for `platform` as two programs, if it can."""
    backend = _module(config.backend or for_platform(platform))
    supports_async = getattr(backend, "supports_async", None)
    return backend if supports_async is not None and supports_async(spec, config) else None


def for_platform(platform: str | None) -> str:
    """The backend that a platform ("cpu", "tpu", "cuda", ...) uses unless `KernelConfig.backend` insists."""
    return BY_PLATFORM.get(platform or "", "reference")


def load(name: str) -> ModuleType:
    """A backend's module.

    Raises:
      ValueError: there is none of that name. BackendUnavailable: it says that it cannot run.
    """
    module = _module(name)
    check = getattr(module, "check_available", None)
    if check is not None:
        check()
    return module


def with_nodes(spec: Spec, config: KernelConfig) -> KernelConfig:
    """`config` with the nodes that the backend has found where its user has named none."""
    if config.ranks_per_node is not None:
        return config
    found = ranks_per_node(spec.axis_sizes, config.backend)
    return config if found is None else dataclasses.replace(config, ranks_per_node=found)


def ranks_per_node(axis_sizes: tuple[int, ...], backend: str | None) -> int | None:
    """Consecutive ranks of these axes (one, or slow and fast) that share a fast link where not all do: as the backend
    of this job has found between its processes, and on two axes the fast one. None where all do."""
    if backend not in (None, "cuda") or _jax_internals.key_value_client() is None:
        return None  # processes that do not know of each other have no axis in common
    if backend is None and jax.default_backend() != "gpu":
        return None
    found = _module("cuda").ranks_per_node(math.prod(axis_sizes))
    return found if found is None or len(axis_sizes) == 1 else math.prod(axis_sizes[1:])


def failure() -> str:
    """Why an operation of this process gave up; "" when none did. Backends that were never used are not loaded."""
    used = sys.modules.get(f"{__name__}.cuda")
    return used.failure() if used is not None else ""


def register_ahead() -> None:
    """Has the CUDA backend's FFI handlers registered as soon as JAX has found its CUDA plugin, so that a program that
    another process compiled or exported finds them. Imports nothing before that, nor without the compiled module."""
    _jax_internals.when_plugins_are_found(_register)


def _register(platforms: frozenset[str]) -> None:
    if "cuda" not in platforms or importlib.util.find_spec("xen_moe_jax._cuda") is None:
        return
    try:
        _module("cuda").register()
    except Exception as error:  # JAX would have no devices; the first operation raises it again
        warnings.warn(f"xen_moe_jax: no CUDA programs can be loaded: {error}", stacklevel=1)


def _module(name: str) -> ModuleType:
    if name == "pallas":
        from xen_moe_jax.backends import pallas

        return pallas
    if name == "cuda":
        from xen_moe_jax.backends import cuda

        return cuda
    if name == "reference":
        from xen_moe_jax.backends import reference

        return reference
    raise ValueError(f"backend {name!r}: must be 'reference', 'pallas' or 'cuda'")


def _check_platform(name: str, platform: str | None, config: KernelConfig) -> None:
    if name == "cuda" and platform != "cuda":
        raise ValueError(f"KernelConfig.backend='cuda' on platform {platform!r}: use None or 'reference' here")
    if name == "pallas" and platform != "tpu" and not config.interpret:
        raise ValueError(
            f"KernelConfig.backend='pallas' on platform {platform!r}: use None or 'reference' here, or set "
            "interpret=True to run the TPU kernels in interpret mode (tests only: it is slow)"
        )
