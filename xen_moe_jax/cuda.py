"""The CUDA backend's symmetric memory, for those who look after it themselves."""

from xen_moe_jax.backends.cuda.memory import reset, workspaces

__all__ = ["reset", "workspaces"]
