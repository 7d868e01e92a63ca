"""Repository rules that describe what this machine already has: a Python with jax, and nvcc. They download nothing."""

# Run by the chosen interpreter; its last five lines are read below.
_PROBE = """
import importlib.metadata, os, sysconfig
import jax, nanobind
lines = sorted("%s==%s" % (d.metadata["Name"], d.version) for d in importlib.metadata.distributions())
with open("packages.txt", "w") as file:
    file.write("\\n".join(lines) + "\\n")
print(sysconfig.get_path("include"))
print(jax.ffi.include_dir())
print(os.path.dirname(nanobind.include_dir()))
"""

def _find_python(repository_ctx):
    """XEN_MOE_PYTHON, else the active virtual environment, else .venv of this workspace, else python3 on PATH."""
    environ = repository_ctx.os.environ
    if environ.get("XEN_MOE_PYTHON"):
        return environ["XEN_MOE_PYTHON"]
    if environ.get("VIRTUAL_ENV"):
        return environ["VIRTUAL_ENV"] + "/bin/python3"
    workspace = repository_ctx.path(Label("//:BUILD.bazel")).dirname
    if workspace.get_child(".venv").get_child("bin").get_child("python3").exists:
        # As a string: a resolved path would leave the virtual environment.
        return str(workspace) + "/.venv/bin/python3"
    return str(repository_ctx.which("python3"))

def _python_configure_impl(repository_ctx):
    python = _find_python(repository_ctx)
    probe = repository_ctx.execute([python, "-c", _PROBE], environment = {"JAX_PLATFORMS": "cpu"})
    if probe.return_code != 0:
        fail("%s cannot import jax and nanobind: run `make setup`, or set XEN_MOE_PYTHON.\n%s" % (python, probe.stderr))
    python_include, xla_include, nanobind = probe.stdout.strip().split("\n")[-3:]
    repository_ctx.symlink(python_include, "python_include")
    repository_ctx.symlink(xla_include, "xla_include")
    repository_ctx.symlink(nanobind, "nanobind")
    repository_ctx.template("BUILD.bazel", Label("//bazel:local_python.BUILD.tpl"), {"%{PYTHON}": python})

python_configure = repository_rule(
    implementation = _python_configure_impl,
    configure = True,  # `bazel sync --configure` looks again
    environ = ["PATH", "VIRTUAL_ENV", "XEN_MOE_PYTHON"],
    local = True,
)

def _find_cuda(repository_ctx):
    """Root of a CUDA toolkit that has nvcc: CUDA_HOME, CUDA_PATH, nvcc on PATH, /usr/local/cuda; else an empty string."""
    for name in ["CUDA_HOME", "CUDA_PATH"]:
        root = repository_ctx.os.environ.get(name, "")
        if root and repository_ctx.path(root).get_child("bin").get_child("nvcc").exists:
            return root
    nvcc = repository_ctx.which("nvcc")
    if nvcc:
        return str(nvcc.dirname.dirname)
    if repository_ctx.path("/usr/local/cuda/bin/nvcc").exists:
        return "/usr/local/cuda"
    return ""

def _cuda_configure_impl(repository_ctx):
    root = _find_cuda(repository_ctx)
    state = "found" if root else "missing"
    repository_ctx.template("BUILD.bazel", Label("//bazel:local_cuda.BUILD.tpl"), {"%{STATE}": state})
    repository_ctx.file("defs.bzl", "CUDA_HOME = %r\n" % root)

cuda_configure = repository_rule(
    implementation = _cuda_configure_impl,
    configure = True,
    environ = ["CUDA_HOME", "CUDA_PATH", "PATH"],
    local = True,
)
