"""A group that outlives its ranks: processes with a JAX runtime each, one rank a process, which come and go.

`jax.distributed` fixes the processes of a job when the job starts. In a group no JAX runtime knows of another one: each
process compiles and runs programs on its own device, and `dispatch` and `combine` over the group's axis exchange rows
through shared memory of one host. Which ranks are members is an operand of the programs, so that none is compiled again
when a rank goes or comes. docs/user/failures.md is the operator's page, docs/design/elastic.md says how a group works,
and examples/serve_elastic.py is a server.
"""

from xen_moe_jax.elastic._group import Change, Group
from xen_moe_jax.elastic._membership import Evicted

__all__ = ["Change", "Evicted", "Group"]
