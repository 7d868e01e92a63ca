"""Finding the fastest `KernelConfig` for given shapes by measuring it: the names that users import.

problem = autotune.make_problem(autotune.Workload(tokens=4096, hidden=7168, experts=256, top_k=8, ranks=8))
tuned = autotune.autotune(problem)
autotune.save("tuned.json", problem.work, tuned)
autotune.use("tuned.json")  # programs lowered from now on look it up
"""

from xen_moe_jax._profiles import OPERATIONS, TUNED_FIELDS, ProfileError, ProfileWarning, forget, use
from xen_moe_jax.tuning.problem import Problem, make_problem
from xen_moe_jax.tuning.search import Measured, Tuned, autotune, candidates, load, save
from xen_moe_jax.tuning.workload import Workload

__all__ = [
    "OPERATIONS",
    "TUNED_FIELDS",
    "Measured",
    "Problem",
    "ProfileError",
    "ProfileWarning",
    "Tuned",
    "Workload",
    "autotune",
    "candidates",
    "forget",
    "load",
    "make_problem",
    "save",
    "use",
]
