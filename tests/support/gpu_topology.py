"""GPUs to compile for on a machine that has none: XLA's GPU compiler, out of the plugin of `jax[cuda13]`."""

from __future__ import annotations

import os
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental import topologies

H100 = """
gpu_device_info {
  name: "NVIDIA H100 80GB HBM3"
  device_vendor: "NVIDIA Corporation"
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  l2_cache_size: 52428800
  memory_bandwidth: 3352320000000
  device_memory_size: 84942979072
  device_address_bits: 64
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.12.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 12 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
"""Properties of a GPU that XLA asks for, as a `GpuTargetConfigProto`: NVIDIA's figures of an H100 SXM."""


def mesh(ranks: int, axis: str) -> jax.sharding.Mesh:
    """`ranks` H100s of one process, to compile for.

    Raises:
      RuntimeError: the compiler is missing.
    """
    try:
        description: Any = topologies.get_topology_desc("", "cuda", target_config=H100, topology=f"1x1x{ranks}")
    except (NotImplementedError, jax.errors.JaxRuntimeError) as error:
        packages = "jax-cuda13-plugin jax-cuda13-pjrt nvidia-cuda-nvcc nvidia-nvvm"
        raise RuntimeError(f"compiling for GPUs needs pip install --no-deps {packages}") from error
    return jax.sharding.Mesh(np.array(description.devices), (axis,))


def one_or_skip() -> jax.NamedSharding:
    """Returns the sharding of arrays on one H100; skips the test where the compiler is missing.

    Raises:
      AssertionError: it is missing, and XEN_MOE_EXPECT_CUDA says that it must be there.
    """
    try:
        return jax.NamedSharding(mesh(1, "ep"), jax.P())
    except RuntimeError as reason:
        assert not os.environ.get("XEN_MOE_EXPECT_CUDA"), reason
        pytest.skip(str(reason))
