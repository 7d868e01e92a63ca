"""Which backend runs an operation: by platform, unless `KernelConfig.backend` insists."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable

from xen_moe_jax._config import KernelConfig

MODULES = {"reference": "xen_moe_jax.reference", "pallas": "xen_moe_jax.pallas", "cuda": "xen_moe_jax.cuda"}
BY_PLATFORM = {"tpu": "pallas", "cuda": "cuda"}


class BackendUnavailable(RuntimeError):
    """A backend cannot run here; the message says why and what to install."""


def implementation(operation: str, platform: str | None, config: KernelConfig) -> Callable:
    """The function that runs `operation` when lowered for `platform` (None: any other platform).

    Raises:
      ValueError: `config.backend` names a backend that does not run on `platform`.
      BackendUnavailable: it was asked for by name and cannot be loaded.
    """
    name = config.backend or for_platform(platform)
    if config.backend is not None:
        _check_platform(name, platform, config)
    try:
        return getattr(load(name), operation)
    except BackendUnavailable as reason:
        if config.backend is not None:
            raise
        warnings.warn(f"xen_moe_jax: plain JAX instead of the {name} backend: {reason}", stacklevel=2)
        return getattr(load("reference"), operation)


def for_platform(platform: str | None) -> str:
    """The backend that a platform ("cpu", "tpu", "cuda", ...) uses unless `KernelConfig.backend` insists."""
    return BY_PLATFORM.get(platform or "", "reference")


def load(name: str):
    """Imports a backend's module; `BackendUnavailable` if it says that it cannot run."""
    module = importlib.import_module(MODULES[name])
    check = getattr(module, "check_available", None)
    if check is not None:
        check()
    return module


def _check_platform(name: str, platform: str | None, config: KernelConfig) -> None:
    if name == "cuda" and platform != "cuda":
        raise ValueError(f"KernelConfig.backend='cuda' on platform {platform!r}: use None or 'reference' here")
    if name == "pallas" and platform != "tpu" and not config.interpret:
        raise ValueError(
            f"KernelConfig.backend='pallas' on platform {platform!r}: use None or 'reference' here, or set "
            "interpret=True to run the TPU kernels in interpret mode (tests only: it is slow)"
        )
