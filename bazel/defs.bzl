"""Macros of the BUILD files: a pytest file as a test, a mode of the benchmarks as a test, a shared library built by nvcc."""

load("@local_cuda//:defs.bzl", "CUDA_HOME")
load("@rules_python//python:defs.bzl", "py_test")

CUDA_COMPATIBLE = ["@local_cuda//:toolkit_found"]

# What every Python program under Bazel reads beside its own files.
_ENVIRONMENT = [
    "//:pyproject.toml",
    "@local_python//:packages.txt",
]

def pytest_test(name, srcs, args = [], data = [], **kwargs):
    """A py_test that runs pytest on `srcs`; further `args` go to pytest."""
    py_test(
        name = name,
        srcs = srcs + ["//bazel:pytest_main.py", "//bazel:declared_files.py"],
        main = "//bazel:pytest_main.py",
        args = ["$(location %s)" % src for src in srcs] + args,
        data = data + srcs + _ENVIRONMENT,
        **kwargs
    )

def benchmark_test(mode, tags = [], data = [], **kwargs):
    """bench_<mode>: a py_test that runs a mode of `python -m benchmarks`; its table and its JSON are undeclared outputs.

    Args:
      mode: as the command has it.
      tags: beside "benchmark"; "external", by which every run measures and none is taken from the cache; and "no-sandbox", since
        GPUs and processes of the host are measured.
      data: files that the mode reads.
      **kwargs: of the py_test.
    """
    py_test(
        name = "bench_" + mode.replace("-", "_"),
        srcs = ["//bazel:benchmark_main.py", "//bazel:declared_files.py"],
        main = "//bazel:benchmark_main.py",
        args = [mode],
        data = data + _ENVIRONMENT,
        tags = tags + ["benchmark", "external", "no-sandbox"],
        **kwargs
    )

def nvcc_shared_library(name, script, srcs, architectures = [], **kwargs):
    """lib<name>.so from the CUDA sources that a script compiles; a target that is skipped where there is no nvcc.

    Args:
      name: of the target.
      script: the label of a script that puts objects into the folder of its first argument; further arguments are
        options of nvcc, and $NVCC is the compiler.
      srcs: all files that the script reads.
      architectures: values of nvcc's -gencode.
      **kwargs: of the genrule.
    """
    options = " ".join(["'-gencode=%s'" % architecture for architecture in architectures])
    nvcc = CUDA_HOME + "/bin/nvcc"
    native.genrule(
        name = name,
        srcs = srcs,
        outs = ["lib%s.so" % name],
        tools = [script],
        cmd = " && ".join([
            "NVCC=%s $(location %s) $(@D)/objects %s -Xcompiler=-fPIC" % (nvcc, script, options),
            # lib: where the toolkit that pip installs keeps libcudart_static
            "%s -shared %s -L%s/lib -o $@ $(@D)/objects/*.o" % (nvcc, options, CUDA_HOME),
        ]),
        target_compatible_with = CUDA_COMPATIBLE,
        **kwargs
    )
