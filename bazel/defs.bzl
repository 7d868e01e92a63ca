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

def nvcc_shared_library(name, srcs, hdrs = [], architectures = [], copts = [], **kwargs):
    """lib<name>.so from CUDA sources; a target that is skipped where there is no nvcc.

    Args:
      name: of the target.
      srcs: .cu and .cc files.
      hdrs: files that they include, from the workspace's root.
      architectures: values of nvcc's -gencode.
      copts: further options of nvcc.
      **kwargs: of the genrule.
    """
    options = ["-std=c++17", "-O3", "-shared", "-Xcompiler=-fPIC", "--threads=2", "-I."]
    options += ["'-gencode=%s'" % architecture for architecture in architectures] + copts
    options.append("-L%s/lib" % CUDA_HOME)  # where the toolkit that pip installs keeps libcudart_static
    sources = ["$(location %s)" % src for src in srcs]
    native.genrule(
        name = name,
        srcs = srcs + hdrs,
        outs = ["lib%s.so" % name],
        cmd = " ".join([CUDA_HOME + "/bin/nvcc"] + options + ["-o", "$@"] + sources),
        target_compatible_with = CUDA_COMPATIBLE,
        **kwargs
    )
