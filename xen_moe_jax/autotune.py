"""Finding the fastest `KernelConfig` for given shapes by measuring it: the names that users import.

problem = autotune.make_problem(autotune.Workload(tokens=4096, hidden=7168, experts=256, top_k=8, ranks=8))
tuned = autotune.autotune(problem)
"""

from xen_moe_jax.benchmark.problem import Problem, make_problem
from xen_moe_jax.benchmark.tuning import (
    OPERATIONS,
    TUNED_FIELDS,
    Measured,
    Tuned,
    autotune,
    candidates,
    load,
    save,
)
from xen_moe_jax.benchmark.workload import Workload

__all__ = [
    "OPERATIONS",
    "TUNED_FIELDS",
    "Measured",
    "Problem",
    "Tuned",
    "Workload",
    "autotune",
    "candidates",
    "load",
    "make_problem",
    "save",
]
