"""The benchmark command that every backend uses: `python -m xen_moe_jax.benchmark --help`.

`workload` says what is measured, `programs` and `peers` how it is computed, `verify` that it is right, `timing` how
long it takes, `accounting` how many bytes leave a rank, `report` what is printed and written.
"""
