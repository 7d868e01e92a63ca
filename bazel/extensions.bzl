"""Module extension (Bazel 7 and later, untested) over the repository rules that WORKSPACE uses."""

load(":local_repositories.bzl", "cuda_configure", "python_configure")

def _local_environment_impl(_module_ctx):
    python_configure(name = "local_python")
    cuda_configure(name = "local_cuda")

local_environment = module_extension(implementation = _local_environment_impl)
