"""Measuring on the machine at hand: `xen_moe_jax.autotune`, `xen-moe-jax autotune` and `xen-moe-jax benchmark`.

`workload` describes the shapes and routings, and `problem` places them on a mesh; `timing` is the loop that times the
programs of `programs` and `peer`; `search` finds the fastest config; `arguments`, `command` and `quick` are the command
lines. The folder `benchmarks/` of the repository, which is not installed, measures everything else.
"""
