"""`xen-moe-jax doctor` reports this machine's parts, the backend that each platform would use, and the parts missing.

It reads and imports; it changes nothing, launches no kernel, and needs no accelerator.
"""

from __future__ import annotations

import dataclasses
import glob
import importlib
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import platform
import re
import sys
import tomllib
from collections.abc import Sequence

from xen_moe_jax import _profiles, _tested_jax
from xen_moe_jax import backends as backend_choice
from xen_moe_jax._command_line import Parser
from xen_moe_jax.backends.base import BackendUnavailable
from xen_moe_jax.backends.cuda import nccl, nvshmem
from xen_moe_jax.experts import grouped_matmul

PACKAGES = (
    "xen-moe-jax",
    "jax",
    "jaxlib",
    "numpy",
    "ml_dtypes",
    "flax",
    "optax",
    "orbax-checkpoint",
    "tokamax",
    "libtpu",
    "jax-cuda13-plugin",
    "jax-cuda13-pjrt",
    "nvidia-nvshmem-cu13",
    "nvidia-nccl-cu13",
)
OLDEST_PYTHON = (3, 12)
NATIVE_MODULES = {
    "_cuda": "CUDA kernels over NVLink",
    "_nvshmem": "NVSHMEM: one process per GPU of a host",
}
"""Compiled parts of the package, by module name."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
      name: the part that was checked.
      ok: True is in order, False is a fault, None is absent and only needed for some uses.
      detail: the findings, or the reason why the part is absent.
      remedy: the user's next step; empty where none is needed.
    """

    name: str
    ok: bool | None
    detail: str
    remedy: str = ""


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".strip().replace("\n", " ")[:600]


def installed_version(package: str) -> str | None:
    """Version of a distribution, None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions() -> list[Finding]:
    """Python, and the packages that matter here."""
    old = sys.version_info < OLDEST_PYTHON
    found = [
        Finding(
            "python",
            not old,
            f"{platform.python_version()} ({sys.executable})",
            "use Python 3.12 or later" if old else "",
        )
    ]
    for package in PACKAGES:
        version = installed_version(package)
        if package == "xen-moe-jax" and version is None:
            found.append(Finding(package, True, "imported from a checkout, not installed"))
        else:
            found.append(Finding(package, True if version else None, version or "not installed"))
    return [*found, _jax_is_tested()]


def tested_jax() -> tuple[str | None, str]:
    """The oldest jax that is supported and the newest that the whole suite has run on.

    The oldest is the requirement of the checkout that is imported, or of the installed package; None where there is
    neither.
    """
    project = pathlib.Path(__file__).resolve().parents[1] / "pyproject.toml"
    requirements: list[str] = []
    if project.exists():
        requirements = tomllib.loads(project.read_text())["project"]["dependencies"]
    elif installed_version("xen-moe-jax") is not None:
        requirements = importlib.metadata.requires("xen-moe-jax") or []
    found = [re.match(r"jax\s*>=\s*([\d.]+)", requirement) for requirement in requirements]
    return next((match[1] for match in found if match), None), _tested_jax.NEWEST_JAX


def _jax_is_tested() -> Finding:
    import jax

    oldest, newest = tested_jax()
    if oldest is not None and jax.__version_info__ < _tested_jax.numbers(oldest):
        return Finding("jax version", False, f"{jax.__version__}, need >= {oldest}", f"pip install 'jax>={oldest}'")
    if newer := _tested_jax.newer():
        return Finding("jax version", None, newer, f"pip install 'jax<={newest}' if something fails")
    since = f"from {oldest} to {newest}" if oldest else f"up to {newest}; the oldest is not known: not installed"
    return Finding("jax version", True, f"{jax.__version__}, tested {since}")


def devices() -> list[Finding]:
    """JAX's devices by platform; a platform that fails to start is a fault with JAX's own words."""
    import jax

    try:
        local = jax.devices()
    except Exception as error:  # the report goes on after any exception of a plugin
        asked = os.environ.get("JAX_PLATFORMS")
        remedy = "repair JAX's installation for this accelerator"
        if asked:
            remedy = f"JAX_PLATFORMS={asked} is set: name a platform that is here, or unset it; or {remedy}"
        return [Finding("jax.devices()", False, _reason(error) if str(error) else "JAX found no device", remedy)]
    kinds: dict[tuple[str, str], int] = {}
    for device in local:
        key = (device.platform, device.device_kind)
        kinds[key] = kinds.get(key, 0) + 1
    return [
        Finding(f"platform {name}", True, f"{count} x {kind}, process {jax.process_index()} of {jax.process_count()}")
        for (name, kind), count in kinds.items()
    ]


def _device_files(platform: str) -> list[str]:
    patterns = {"cuda": ("/dev/nvidia[0-9]*",), "tpu": ("/dev/accel[0-9]*", "/dev/vfio/[0-9]*")}[platform]
    return sorted(path for pattern in patterns for path in glob.glob(pattern))


def accelerators() -> list[Finding]:
    """Accelerators that the operating system shows, whether JAX uses them or not."""
    gpus, chips = _device_files("cuda"), _device_files("tpu")
    has_cuda_jax = installed_version("jax-cuda13-plugin") is not None
    return [
        Finding(
            "NVIDIA GPUs",
            True if gpus else None,
            f"{len(gpus)} device files" if gpus else "no /dev/nvidia*",
            "pip install 'xen-moe-jax[cuda13]'" if gpus and not has_cuda_jax else "",
        ),
        Finding(
            "TPU chips",
            True if chips else None,
            f"{len(chips)} device files" if chips else "no /dev/accel*, no /dev/vfio/*",
            "pip install 'xen-moe-jax[tpu]'" if chips and installed_version("libtpu") is None else "",
        ),
    ]


def native_modules() -> list[Finding]:
    """The compiled parts of this installation: present, and loadable here (NVSHMEM: loaded on first use only)."""
    found = []
    for name, purpose in NATIVE_MODULES.items():
        if importlib.util.find_spec(f"xen_moe_jax.{name}") is None:
            remedy = "XEN_MOE_CUDA=ON pip install '.[cuda13]' in a checkout builds it; a CPU or a TPU needs none"
            found.append(Finding(f"xen_moe_jax.{name}", None, f"not built ({purpose})", remedy))
            continue
        try:
            if name != "_nvshmem":
                importlib.import_module(f"xen_moe_jax.{name}")
        except ImportError as error:
            found.append(Finding(f"xen_moe_jax.{name}", False, _reason(error), "reinstall xen-moe-jax on this machine"))
        else:
            found.append(Finding(f"xen_moe_jax.{name}", True, f"built ({purpose})"))
    return found


def nvshmem_library() -> Finding:
    """The NVSHMEM host library that `xen_moe_jax._nvshmem` loads when it is first used."""
    if (library := nvshmem.find()) is not None:
        return Finding("libnvshmem_host", True, str(library))
    return Finding(
        "libnvshmem_host",
        None,
        "not found (only needed for one process per GPU)",
        "pip install 'xen-moe-jax[cuda13]', or set NVSHMEM_HOME",
    )


def nccl_library() -> Finding:
    """The NCCL that gives memory between processes where NVSHMEM does not; JAX's collectives may use another."""
    try:
        path, version = nccl.usable()
    except BackendUnavailable as error:
        detail = str(error).removesuffix(f": {nccl.REMEDY}")
        return Finding("libnccl", None, f"{detail} (needed only with XEN_MOE_MEMORY=nccl)", nccl.REMEDY)
    return Finding("libnccl", True, f"{'.'.join(map(str, version))} ({path})")


def nccl_puts() -> Finding:
    """Checks if that NCCL can put from a kernel to other nodes, as far as its version and the environment tell."""
    name, since = "NCCL between nodes", ".".join(map(str, nccl.PUTS_SINCE))
    try:
        version = nccl.usable()[1]
    except BackendUnavailable:
        return Finding(name, None, "no NCCL that could put from a kernel")
    if version[:2] < nccl.PUTS_SINCE:
        remedy = f"pip install 'nvidia-nccl-cu13>={since}', or set NCCL_HOME to such a one"
        return Finding(name, None, f"puts from a kernel need NCCL {since}", remedy)
    if found := nccl.hindrances():
        return Finding(name, False, f"{', '.join(found)} in the environment", "unset it")
    return Finding(name, True, f"puts from a kernel (NCCL {since} or later); which network there is shows at start")


def nccl_kernels() -> Finding:
    """Checks if the compiled module has the kernels between processes of several nodes, and names the NCCL of its
    headers."""
    name = "kernels between nodes"
    try:
        headers = getattr(importlib.import_module("xen_moe_jax._cuda"), "nccl_headers", 0)
    except ImportError:
        return Finding(name, None, "no xen_moe_jax._cuda")
    if not headers:
        return Finding(name, None, "xen_moe_jax._cuda was built without NCCL's headers", nccl.BUILD)
    return Finding(name, True, f"between processes, of NCCL {'.'.join(map(str, nccl.parts(headers)))}")


JAX_RUNS_ON = {"tpu": ("libtpu", "tpu"), "cuda": ("jax-cuda13-plugin", "cuda13")}
"""Platform -> the package that JAX needs for it, and the extra that installs it."""

REMEDIES = {
    "pallas": "pip install 'xen-moe-jax[tpu]'",
    "cuda": "XEN_MOE_CUDA=ON pip install '.[cuda13]' in a checkout, on a machine with NVIDIA GPUs",
}


def backends() -> list[Finding]:
    """For every platform, the backend that an operation would use, or why it falls back to plain JAX."""
    found = []
    for name, backend in {"cpu": "reference", **backend_choice.BY_PLATFORM}.items():
        try:
            backend_choice.load(backend)
        except BackendUnavailable as reason:
            detail = f"{backend} is unavailable: {str(reason).strip()}; plain JAX (reference) runs instead"
            found.append(Finding(f"on {name}", None, detail, REMEDIES.get(backend, "")))
        except Exception as error:  # a broken backend must not hide the rest of the report
            detail = f"{backend} cannot be imported: {_reason(error)}"
            found.append(Finding(f"on {name}", False, detail, "reinstall xen-moe-jax, or report this"))
        else:
            found.append(_ready(name, backend))
    return found


def _ready(name: str, backend: str) -> Finding:
    """Returns the finding for a backend that imports. If JAX lacks a package to start the platform, the finding names
    it, and it is no fault of the backend."""
    package, extra = JAX_RUNS_ON.get(name, (None, None))
    if package is None:
        return Finding(f"on {name}", True, backend)
    if installed_version(package) is not None:
        here = _device_files(name)
        seen = "" if here else f"; this machine shows no {name} device, so programs can be compiled for one, not run"
        return Finding(f"on {name}", True if here else None, backend + seen)
    detail = f"{backend}; but JAX has no {name} without {package}, which is not installed"
    return Finding(f"on {name}", None, detail, f"pip install 'xen-moe-jax[{extra}]'")


def grouped_matmul_of(name: str) -> Finding:
    """Names the grouped matmul of the Flax layers on a platform."""
    try:
        found = grouped_matmul.describe(name)
    except (RuntimeError, AssertionError):  # said under "Devices that JAX uses"; JAX asserts that there is a backend
        return Finding(f"on {name}", None, "not looked into: JAX has no device here")
    return Finding(f"on {name}", None if found["remedy"] else True, found["choice"], found["remedy"])


def experts_on_hopper(hidden: int, width: int, dtype: str) -> Finding:
    """Says whether experts of these sizes have a Hopper GPU's full speed; no GPU is needed."""
    answer = grouped_matmul.on_hopper(hidden, width, dtype)
    return Finding("on a Hopper GPU", True if answer.fast else None, answer.detail)


def profiles() -> list[Finding]:
    """Profiles of tuned configs that the package holds, and which of them serve this machine's first device."""
    import jax

    try:
        device = jax.devices()[0].device_kind
    except Exception:  # said under "Devices that JAX uses"
        return [Finding("profiles", None, "not compared with this machine: JAX has no device here")]
    found = []
    for path, holds, reason in _profiles.survey(device):
        damaged = not holds
        remedy = "reinstall xen-moe-jax, or report this" if damaged else "xen-moe-jax autotune --output FILE makes one"
        detail = reason if damaged else f"not used: {reason}" if reason else f"in use: {holds}"
        found.append(
            Finding(path.name, False if damaged else None if reason else True, detail, remedy if reason else "")
        )
    return found or [Finding("profiles", None, "none: operations run with their defaults")]


def examine() -> dict[str, list[Finding]]:
    """The whole report, by section."""
    return {
        "Versions": versions(),
        "Devices that JAX uses": devices(),
        "Accelerators of this machine": accelerators(),
        "Compiled modules": [*native_modules(), nvshmem_library(), nccl_library(), nccl_puts(), nccl_kernels()],
        "Backend by platform": backends(),
        "Tuning profiles": profiles(),
        "Experts' grouped matmul": [grouped_matmul_of(name) for name in ("cpu", *backend_choice.BY_PLATFORM)],
    }


def render(report: dict[str, list[Finding]]) -> str:
    """The report as text: `ok`, `--` (absent, needed for some uses only) or `!!` (a fault) before each line."""
    marks = {True: "ok", None: "--", False: "!!"}
    lines = []
    for section, findings in report.items():
        width = max(len(finding.name) for finding in findings)
        lines += ["", section]
        for finding in findings:
            lines.append(f"  {marks[finding.ok]} {finding.name:<{width}}  {finding.detail}")
            if finding.remedy:
                lines.append(f"     {'':<{width}}  -> {finding.remedy}")
    faults = [finding.name for findings in report.values() for finding in findings if finding.ok is False]
    lines += ["", f"faults: {', '.join(faults)}" if faults else "no fault found"]
    return "\n".join(lines[1:])


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the report; 1 where a fault was found, else 0."""
    parser = Parser(prog="xen-moe-jax doctor", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    experts = parser.add_argument_group(
        "experts", "whether experts of these sizes take this library's kernels on a Hopper GPU; no GPU is needed"
    )
    experts.add_argument("--hidden", type=int, help="elements of a token")
    experts.add_argument("--width", type=int, help="features inside an expert")
    experts.add_argument(
        "--dtype",
        default="bfloat16",
        choices=("bfloat16", "float16", "float32"),
        help="of tokens and weights (%(default)s)",
    )
    options = parser.parse_args(arguments)
    sizes = {name: getattr(options, name) for name in ("hidden", "width") if getattr(options, name) is not None}
    for name, size in sizes.items():
        if size < 1:
            parser.error(f"--{name} {size}: must be at least 1")
    if len(sizes) == 1:
        parser.error("--hidden and --width must be given together")
    report = examine()
    if sizes:
        report["Experts' grouped matmul"].append(experts_on_hopper(**sizes, dtype=options.dtype))
    if options.json:
        print(json.dumps({name: [dataclasses.asdict(f) for f in found] for name, found in report.items()}, indent=2))
    else:
        print(render(report))
    return int(any(finding.ok is False for found in report.values() for finding in found))


if __name__ == "__main__":
    sys.exit(main())
