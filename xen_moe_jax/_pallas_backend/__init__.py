"""Policy of the TPU backend: tables for the kernels, block sizes, budgets. The kernels are in
`xen_moe_jax.pallas_kernels`.
"""
