"""Checks if `xen_moe_jax.transfer` can run on this machine: it needs UCX, and its compiled part."""

import importlib.util
import pathlib

import pytest

import xen_moe_jax


def missing() -> str | None:
    """Returns the reason to skip, or None."""
    if importlib.util.find_spec("libucx") is None:
        return "xen_moe_jax.transfer needs UCX: pip install 'xen-moe-jax[transfer]'"
    if not list(pathlib.Path(xen_moe_jax.__file__).with_name("transfer").glob("_native*.so")):
        return "xen_moe_jax.transfer needs its compiled part: make transfer"
    return None


def require() -> None:
    """Skips the test, or the module that calls it, where transfer cannot run."""
    if reason := missing():
        pytest.skip(reason, allow_module_level=True)
