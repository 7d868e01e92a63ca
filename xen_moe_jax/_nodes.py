"""Division of the ranks of an axis into nodes: by the mesh's slow axis, or by `KernelConfig.ranks_per_node`.

Ranks are numbered node by node. A combine adds inside each node first, and then over the nodes.
"""

from __future__ import annotations

from xen_moe_jax._config import KernelConfig
from xen_moe_jax._spec import Spec


def ranks_per_node(spec: Spec, config: KernelConfig) -> int:
    """Ranks whose rows are added before those of other nodes; all of them where there is one node."""
    if config.ranks_per_node is not None:
        return config.ranks_per_node
    return spec.num_ranks if len(spec.axis_sizes) == 1 else spec.num_ranks // spec.axis_sizes[0]


def several(num_ranks: int, config: KernelConfig) -> bool:
    """Returns True if `config` says that the ranks do not all share a fast link: kernels then treat nodes apart."""
    return config.ranks_per_node is not None and config.ranks_per_node < num_ranks


def divide_a_group(groups: tuple[tuple[int, ...], ...], config: KernelConfig) -> bool:
    """Returns True if `config` says that one of these groups of ranks has ranks of several nodes."""
    per_node = config.ranks_per_node
    return per_node is not None and any(len({rank // per_node for rank in group}) > 1 for group in groups)


def check(spec: Spec, config: KernelConfig, caller: str) -> None:
    """Raises ValueError if `config.ranks_per_node` does not divide these ranks into nodes."""
    given = config.ranks_per_node
    if given is None:
        return
    if len(spec.axis_sizes) > 1:
        fast = spec.num_ranks // spec.axis_sizes[0]
        if given != fast:
            raise ValueError(
                f"{caller}: KernelConfig.ranks_per_node={given} on axes {spec.axis_name} of size {spec.axis_sizes}: "
                f"must be {fast}, the ranks of one node, or None"
            )
    elif spec.num_ranks % given:
        raise ValueError(
            f"{caller}: KernelConfig.ranks_per_node={given}: must divide the {spec.num_ranks} ranks of axis "
            f"{spec.axis_name[0]!r}"
        )


def check_backend(spec: Spec, config: KernelConfig, backend: str) -> None:
    """Raises ValueError if `config` divides a single axis, for a backend that knows of nodes by the mesh alone."""
    if several(spec.num_ranks, config) and len(spec.axis_sizes) == 1:
        raise ValueError(
            f"KernelConfig.ranks_per_node={config.ranks_per_node} on one axis {spec.axis_name[0]!r}: the {backend} "
            "backend takes nodes from the mesh: pass axis_name=(slow axis, fast axis), or None and no nodes"
        )
