"""WORKSPACE only: the rule sets that BUILD files load, as re-exports of the rules built into Bazel, so that no download is needed."""

def _stub_repository_impl(repository_ctx):
    repository_ctx.file("WORKSPACE", "")
    for path, content in repository_ctx.attr.files.items():
        repository_ctx.file(path, content, executable = path.endswith(".sh"))

_stub_repository = repository_rule(
    implementation = _stub_repository_impl,
    attrs = {"files": attr.string_dict()},
)

def _native_rules(names):
    return "".join(["%s = native.%s\n" % (name, name) for name in names])

_PYTHON_BUILD = """
alias(
    name = "toolchain_type",
    actual = "@bazel_tools//tools/python:toolchain_type",
    visibility = ["//visibility:public"],
)
"""

_PYTHON_DEFS = """
load("@bazel_tools//tools/python:toolchain.bzl", _pair = "py_runtime_pair")
py_runtime_pair = _pair
""" + _native_rules(["py_binary", "py_library", "py_runtime", "py_test"])

_CC_DEFS = _native_rules([
    "cc_binary",
    "cc_import",
    "cc_library",
    "cc_proto_library",
    "cc_test",
    "cc_toolchain",
    "cc_toolchain_suite",
    "objc_library",
])

_JAVA_DEFS = _native_rules([
    "java_binary",
    "java_import",
    "java_library",
    "java_proto_library",
    "java_runtime",
    "java_test",
    "java_toolchain",
])

_COVERAGE_BUILD = """
[
    sh_binary(
        name = tool,
        srcs = ["none.sh"],
        visibility = ["//visibility:public"],
    )
    for tool in ["coverage_report_generator", "lcov_merger"]
]
"""

def builtin_rules_repositories():
    """Declares rules_python, and where Bazel would download them, rules_cc, rules_java and remote_coverage_tools."""
    _stub_repository(
        name = "rules_python",
        files = {
            "python/BUILD.bazel": _PYTHON_BUILD,
            "python/defs.bzl": _PYTHON_DEFS,
        },
    )

    # Debian's bazel-bootstrap is the only Bazel without a version. Its @bazel_tools loads these three from the network.
    if not native.bazel_version:
        _stub_repository(
            name = "rules_cc",
            files = {"cc/BUILD.bazel": "", "cc/defs.bzl": _CC_DEFS},
        )
        _stub_repository(
            name = "rules_java",
            files = {"java/BUILD.bazel": "", "java/defs.bzl": _JAVA_DEFS},
        )
        _stub_repository(
            name = "remote_coverage_tools",
            files = {
                "BUILD.bazel": _COVERAGE_BUILD,
                "none.sh": "#!/bin/sh\necho 'no coverage tools offline' >&2\nexit 1\n",
            },
        )
