"""The benchmark command that every backend uses: `xen-moe-jax benchmark --help`. It is part of what is installed.

`workload` says what is measured and `problem` places it on a mesh; `programs` and `peers` are how it is computed,
`verify` that it is right, `timing` how long it takes (the only timing loop there is), `accounting` how many bytes leave
a rank, `tuning` which config is fastest, `report` what is printed and written; `options` and `command` are the command
line. The folder `benchmarks/` of the repository is another thing: tables of runs of this command, native measurements,
and their results.
"""
