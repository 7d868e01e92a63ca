"""The compiled module: whether it is there, and its FFI targets."""

from __future__ import annotations

import functools
import importlib
import types

import jax

from xen_moe_jax.backends.base import BackendUnavailable
from xen_moe_jax.backends.cuda import job, libraries, processes

INSTALL = "build it: XEN_MOE_CUDA=ON pip install '.[cuda13]' in a checkout"


@functools.cache
def compiled() -> types.ModuleType:
    """`xen_moe_jax._cuda`.

    Raises:
      BackendUnavailable: it is not part of this installation, or cannot be loaded.
    """
    try:
        return importlib.import_module("xen_moe_jax._cuda")
    except ImportError as error:
        raise BackendUnavailable(
            f"the CUDA module xen_moe_jax._cuda cannot be imported ({error}): {INSTALL}"
        ) from error


def _cublas(version: int) -> str:
    """Path of the cuBLAS that JAX's CUDA plugin depends on; "" where it is no Python package."""
    return str(libraries.library(f"libcublas.so.{version}", libraries.folders(f"cu{version}", "cublas")) or "")


_loaded: types.ModuleType | None = None


def loaded() -> types.ModuleType | None:
    """The module if this process has used it."""
    return _loaded


@functools.cache
def registered() -> types.ModuleType:
    """Returns the module, with its FFI types and targets registered.

    Needs no devices: JAX keeps registrations for CUDA until its CUDA plugin is there. The handlers learn about
    this process's job from `job` when a program first needs it.
    """
    global _loaded
    module = compiled()
    module.set_cublas(_cublas(module.cudart_version // 1000))
    module.set_up_job(lambda: job.describe(module), lambda: processes.start(module))
    for name, registration in module.types().items():
        jax.ffi.register_ffi_type(name, registration, platform="CUDA")
    for name, target in module.targets().items():
        jax.ffi.register_ffi_target(name, target, platform="CUDA")
    _loaded = module
    return module
