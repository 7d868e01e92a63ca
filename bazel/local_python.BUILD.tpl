load("@rules_cc//cc:defs.bzl", "cc_library")
load("@rules_python//python:defs.bzl", "py_runtime", "py_runtime_pair")

package(default_visibility = ["//visibility:public"])

# Names and versions of the installed packages: as data of a test, it makes the test run again after an upgrade.
exports_files(["packages.txt"])

py_runtime(
    name = "py3_runtime",
    interpreter_path = "%{PYTHON}",
    python_version = "PY3",
    stub_shebang = "#!%{PYTHON}",
)

py_runtime_pair(
    name = "runtime_pair",
    py3_runtime = ":py3_runtime",
)

toolchain(
    name = "toolchain",
    toolchain = ":runtime_pair",
    toolchain_type = "@rules_python//python:toolchain_type",
)

cc_library(
    name = "python_headers",
    hdrs = glob(["python_include/**/*.h"]),
    includes = ["python_include"],
)

cc_library(
    name = "xla_ffi_headers",
    hdrs = glob(["xla_include/xla/ffi/api/**/*.h"]),
    includes = ["xla_include"],
)

cc_library(
    name = "nanobind",
    srcs = ["nanobind/src/nb_combined.cpp"],
    hdrs = glob([
        "nanobind/ext/robin_map/include/**/*.h",
        "nanobind/include/**/*.h",
    ]),
    copts = [
        "-fno-strict-aliasing",
        "-fvisibility=hidden",
        "-w",
    ],
    includes = [
        "nanobind/ext/robin_map/include",
        "nanobind/include",
    ],
    textual_hdrs = glob(
        [
            "nanobind/src/*.cpp",
            "nanobind/src/*.h",
        ],
        exclude = ["nanobind/src/nb_combined.cpp"],
    ),
    deps = [":python_headers"],
)
