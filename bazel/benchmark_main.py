"""Entry point of the benchmarks under Bazel.

`bazel run //benchmarks:benchmark -- MODE ARGUMENTS` is `python -m benchmarks MODE ARGUMENTS` in the caller's folder.

`bazel test //benchmarks:bench_MODE` runs the mode with its arguments in `benchmarks/presets.py`, or with those that
`--test_arg` gives in their place. What the mode prints goes to the test's log and to MODE.txt, its figures go to
MODE.json, both in the test's undeclared outputs.
"""

import contextlib
import os
import pathlib
import shlex
import sys
from typing import TextIO

import declared_files


class Both:
    """A text stream that writes everything to two."""

    def __init__(self, first: TextIO, second: TextIO):
        self._streams = first, second

    def write(self, text: str) -> int:
        for stream in self._streams:
            stream.write(text)
        return len(text)

    def flush(self) -> None:
        for stream in self._streams:
            stream.flush()


def prepare(platform: str) -> None:
    """Gives the CPU eight virtual devices and little compiling, before JAX is imported."""
    if platform == "cpu":
        os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
        os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")


def test(mode: str, given: list[str], outputs: pathlib.Path) -> int:
    """Runs a mode as a test and returns its exit status; a mode that leaves no figures behind has failed."""
    from benchmarks import presets
    from benchmarks.__main__ import main

    platform = os.environ.get("JAX_PLATFORMS", "cpu")
    preset = presets.PRESETS[mode]
    if not given:
        words = preset.cpu if platform == "cpu" else preset.gpu
        if words is None:
            print(f"{mode} has no arguments for JAX_PLATFORMS={platform} in benchmarks/presets.py; give --test_arg")
            return 1
        given = shlex.split(words)
        prepare(platform)
    figures = outputs / f"{mode}.json"
    if preset.writes:
        given = [*given, "--json", str(figures)]
    print(f"python -m benchmarks {shlex.join([mode, *given])}", flush=True)
    with (outputs / f"{mode}.txt").open("w") as text, contextlib.redirect_stdout(Both(sys.stdout, text)):
        try:
            status = main([mode, *given])
        except SystemExit as ended:  # a mode of absl's ends its process
            status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    if not status and preset.writes and not figures.exists():
        print(f"{mode} ended well and wrote no figures")
        return 1
    if preset.writes and not (outputs / f"{mode}.txt").stat().st_size and figures.exists():
        print(figures.read_text())  # a mode without a table
    return status


def start() -> int:
    declared_files.import_them()
    if "TEST_UNDECLARED_OUTPUTS_DIR" in os.environ:
        return test(sys.argv[1], sys.argv[2:], pathlib.Path(os.environ["TEST_UNDECLARED_OUTPUTS_DIR"]))
    os.chdir(os.environ.get("BUILD_WORKING_DIRECTORY", "."))
    from benchmarks.__main__ import main

    return main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(start())
