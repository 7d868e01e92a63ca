"""`xen-moe-jax check OUT`: proves the library on what this machine has, and leaves one file to send back.

On TPUs it runs `tools/tpu_check.py`, on GPUs `tools/gpu_check.py`. On a CPU it runs the former as a rehearsal: plain
JAX against the NumPy oracle, then the TPU kernels in Pallas's interpreter. Everything behind OUT goes to that program,
whose own `--help` says more. The tests, oracle and counters are part of a checkout, not of the installed package.
"""

from __future__ import annotations

import argparse
import pathlib
import subprocess
import sys
from collections.abc import Sequence

from xen_moe_jax._command_line import Parser

ROOT = pathlib.Path(__file__).resolve().parents[1]
PROGRAMS = {
    "tpu": ("tpu_check.py", ()),
    "gpu": ("gpu_check.py", ()),
    "cpu": ("tpu_check.py", ("--rehearse",)),
}
"""JAX's platform -> the program in `tools/`, and its first arguments."""
START_SECONDS = 300
"""In which JAX must find its devices."""


def find_platform() -> str:
    """The platform that JAX chooses, asked of a process of its own: a TPU is open in one process at a time.

    Raises:
      ValueError: JAX does not start, or not within `START_SECONDS`.
    """
    command = [sys.executable, "-c", "import jax; print(jax.default_backend())"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=START_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise ValueError(
            f"JAX found no devices in {START_SECONDS} s: another process may hold the TPU; name --platform"
        ) from None
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise ValueError(f"JAX does not start here ({reason}); `xen-moe-jax doctor` shows what this machine has")
    return done.stdout.split()[-1]


def command_for(platform: str, arguments: Sequence[str]) -> list[str]:
    """The command that checks a platform.

    Raises:
      ValueError: there is none for it, or the package is not a checkout.
    """
    if platform not in PROGRAMS:
        raise ValueError(f"platform {platform!r}: must be one of {', '.join(PROGRAMS)}")
    name, first = PROGRAMS[platform]
    program = ROOT / "tools" / name
    if not program.exists():
        raise ValueError(
            f"check: its tests are in the repository and not in the installed package ({ROOT}); clone the repository, "
            "pip install -e '.[tpu,flax]' pytest hypothesis, and run the command there"
        )
    return [sys.executable, str(program), *arguments, *first]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the check; returns its exit status, the number of its steps that did not pass."""
    parser = Parser(
        prog="xen-moe-jax check",
        description=__doc__,
        usage="xen-moe-jax check OUT [--platform {tpu,gpu,cpu}] [ARGUMENT ...]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("out", metavar="OUT", help="folder for the report")
    parser.add_argument("--platform", choices=PROGRAMS, help="default: JAX's own choice")
    options, rest = parser.parse_known_args(arguments)
    try:
        command = command_for(options.platform or find_platform(), [options.out, *rest])
    except ValueError as error:
        parser.error(str(error))
    print(" ".join(command), flush=True)
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
