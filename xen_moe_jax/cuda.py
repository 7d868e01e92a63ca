"""Symmetric memory of the CUDA backend: its workspaces, the processes that are alive, and reset after a failure."""

from xen_moe_jax.backends.cuda.memory import alive, reset, workspaces

__all__ = ["alive", "reset", "workspaces"]
