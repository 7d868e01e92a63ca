"""The CUDA backend's symmetric memory, for those who look after it themselves, and its restart after a failure."""

from xen_moe_jax.backends.cuda.memory import alive, reset, workspaces

__all__ = ["alive", "reset", "workspaces"]
