"""Policy of the CUDA backend: devices and processes, schedules, attributes.

The kernels are in `cuda_kernels/`, compiled into `xen_moe_jax._cuda`.
"""
