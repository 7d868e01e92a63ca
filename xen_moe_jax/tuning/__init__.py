"""Measuring on the machine at hand: `xen_moe_jax.autotune`, `xen-moe-jax autotune` and `xen-moe-jax benchmark`.

`workload` says what is measured and `problem` places it on a mesh; `programs` and `peer` are what is timed and
`timing` is the loop that times it; `search` finds the fastest config; `arguments`, `command` and `quick` are the
command lines. The folder `benchmarks/` of the repository, which is not installed, measures everything else.
"""
