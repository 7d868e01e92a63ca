"""A group that outlives its ranks: processes with a JAX runtime each, one rank a process, which come and go.

`jax.distributed` fixes the processes of a job when it starts. Here no process knows of another's runtime: each compiles
and runs programs on its own device, and `dispatch` and `combine` over the group's axis exchange rows through shared
memory of one host. Which ranks are members is data. docs/user/failures.md is the operator's page,
docs/design/elastic.md says how it works, and examples/serve_elastic.py is a server.
"""

from xen_moe_jax.elastic._group import Change, Group
from xen_moe_jax.elastic._membership import Evicted

__all__ = ["Change", "Evicted", "Group"]
