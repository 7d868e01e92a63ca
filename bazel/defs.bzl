"""Macros of the BUILD files: a pytest file as a test, a shared library built by nvcc."""

load("@local_cuda//:defs.bzl", "CUDA_HOME")
load("@rules_python//python:defs.bzl", "py_test")

CUDA_COMPATIBLE = ["@local_cuda//:toolkit_found"]

def pytest_test(name, srcs, args = [], data = [], **kwargs):
    """A py_test that runs pytest on `srcs`; further `args` go to pytest."""
    py_test(
        name = name,
        srcs = srcs + ["//bazel:pytest_main.py"],
        main = "//bazel:pytest_main.py",
        args = ["$(location %s)" % src for src in srcs] + args,
        data = data + srcs + [
            "//:pyproject.toml",
            "@local_python//:packages.txt",
        ],
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
