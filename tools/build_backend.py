"""PEP 517 backend: scikit-build-core, plus the CUDA build requirements where a CUDA module is to be built.

`XEN_MOE_CUDA=OFF` asks for none of them, so that a CPU-only install downloads no compiler. `pip install
--no-build-isolation` ignores build requirements altogether and uses the nvcc of the machine.
"""

from __future__ import annotations

import os
import sys

from scikit_build_core import build as _scikit_build
from scikit_build_core.build import *  # noqa: F403

# One complete nvcc: these extras pin nvcc, nvvm, crt, cudart and cccl to one release of each other.
CUDA_COMPILER = "cuda-toolkit[nvcc,cccl]==13.0.*"
# The oldest NVSHMEM supported at run time: the host library must be of the same minor version.
NVSHMEM = "nvidia-nvshmem-cu13==3.4.5"
# Headers of the XLA FFI. The oldest supported: a jaxlib rejects handlers that were built against newer ones.
XLA_FFI_HEADERS = "jaxlib==0.11.2"


def _switched_off(name: str) -> bool:
    return os.environ.get(name, "AUTO").lower() in ("off", "0", "false", "no")


def _native_requirements() -> list[str]:
    if _switched_off("XEN_MOE_CUDA"):
        return []
    requirements = [XLA_FFI_HEADERS]
    if sys.platform == "linux":
        requirements.append(CUDA_COMPILER)
        if not _switched_off("XEN_MOE_NVSHMEM"):
            requirements.append(NVSHMEM)
    return requirements


def get_requires_for_build_wheel(config_settings=None):
    return [*_scikit_build.get_requires_for_build_wheel(config_settings), *_native_requirements()]


def get_requires_for_build_editable(config_settings=None):
    return [*_scikit_build.get_requires_for_build_editable(config_settings), *_native_requirements()]
