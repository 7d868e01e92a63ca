"""Builds the programs of the kernels over the emulator: python tests/native/emulator/build.py [FOLDER]

Needs a C++17 compiler ($CXX, c++ by default) and nothing of CUDA. FOLDER is build/emulator by default; the programs are
FOLDER/harness, with the options of tests/native/harness.cu, and those of tests/native/nodes (`PROGRAMS`).
"""

from __future__ import annotations

import concurrent.futures
import os
import pathlib
import re
import shlex
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[2]
sys.path.insert(0, str(ROOT))
from tests.native.emulator.translate import Untranslated, translate  # noqa: E402

FOLDERS = ("cuda_kernels", "tests/native", "tests/native/nodes")
PROGRAMS = {
    "harness": ("harness.cu", "scenarios.cu", "members.cu", "rings.cu", "wide.cu"),
    "network_test": ("nodes/network_test.cu", "nodes/network.cc"),
    "nodes": ("nodes/nodes.cu", "nodes/network.cc"),
    "nodes_wide": ("nodes/nodes_wide.cu", "nodes/network.cc"),
    "paced": ("nodes/paced.cu",),
}
"""Program to its own files of tests/native; world.cu and the kernels are part of every one."""
FLAGS = "-std=c++17 -O1 -g1 -ffp-contract=off -fno-strict-aliasing -U_FORTIFY_SOURCE -Wno-ignored-attributes -pthread"
"""Kernels take the same registers for words and for numbers, which a C++ compiler need not allow from -O2 on."""


def sources(program: str) -> list[pathlib.Path]:
    """All that a program is made of; the harness as tools/gpu_native_check.sh builds it. What launches kernels across
    nodes for the host (peer_*.cu, nccl_*.cu, and both for many ranks) is left out: nodes.cu launches its own choice of
    them, and they take minutes."""
    links = ("peer_", "nccl_", "wide_peer_", "wide_nccl_")
    kernels = sorted(p for p in (ROOT / "cuda_kernels").glob("*.c[cu]") if not p.name.startswith(links))
    return kernels + [ROOT / "tests/native" / name for name in ("world.cu", *PROGRAMS[program])]


def write(folder: pathlib.Path, faults: dict[str, tuple[str, str]], program: str) -> list[pathlib.Path]:
    """Translates every file into `folder`, with `faults` put in; returns those to compile."""
    wanted, needed = [], sources(program)
    for source in (p for part in FOLDERS for p in (ROOT / part).iterdir() if p.suffix in (".cc", ".cu", ".cuh", ".h")):
        target = folder / source.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        text = source.read_text()
        if fault := faults.get(str(source.relative_to(ROOT))):
            if text.count(fault[0]) != 1:
                raise SystemExit(f"{source}: {fault[0]!r} is there {text.count(fault[0])} times, not once")
            text = text.replace(*fault)
        try:
            text = f'#line 1 "{source}"\n' + translate(text)
        except Untranslated as error:
            raise SystemExit(f"{source}: tests/native/emulator/translate.py does not know: {error}") from None
        if not target.exists() or target.read_text() != text:
            target.write_text(text)
        if source in needed:
            wanted.append(target)
    return sorted(wanted, key=lambda p: -p.stat().st_size)


def includes(source: pathlib.Path) -> set[pathlib.Path]:
    """A file, and all files beside it or under the root that it includes, directly or not."""
    found, open_ = {source}, [source]
    while open_:
        file = open_.pop()
        for name in re.findall(r'^#include "([^"]+)"', file.read_text(), re.MULTILINE):
            header = file.parent / name if "/" not in name else ROOT / name
            if header.exists() and header not in found:
                found.add(header)
                open_.append(header)
    return found


def compiler(folder: pathlib.Path) -> list[str]:
    """The command that compiles what `write` has put into `folder`, before its files."""
    chosen = [os.environ.get("CXX", "c++"), FLAGS, os.environ.get("CXXFLAGS", "")]
    places = ["-I", str(HERE / "include"), "-I", str(folder / "source"), "-include", "cuda_runtime.h"]
    return [*(word for words in chosen for word in shlex.split(words)), *places]


def build(
    folder: pathlib.Path,
    faults: dict[str, tuple[str, str]] | None = None,
    program: str = "harness",
    units: str = "",
) -> pathlib.Path:
    """Compiles what is out of date. Returns the program.

    Args:
      faults: file to (text, what to put there instead), to see that the tests find it. Only what includes these files
        is compiled; `folder` lies in the one of the whole program then, and takes the rest from there.
      units: how the names of the files begin that get them; the others stay right.
    """
    command = compiler(folder)
    headers = [*(HERE / "include").iterdir(), *(p for part in FOLDERS for p in (ROOT / part).glob("*.*h"))]
    newest = max(p.stat().st_mtime for p in [*headers, *HERE.glob("*.py")])

    def compile_one(source: pathlib.Path, original: pathlib.Path) -> pathlib.Path:
        target = folder / f"{source.name}.o"
        changed = max(newest, *(p.stat().st_mtime for p in includes(original)))
        if not target.exists() or target.stat().st_mtime < changed:
            subprocess.run([*command, "-x", "c++", "-c", str(source), "-o", str(target)], check=True)
        return target

    translated = write(folder / "source", faults or {}, program)
    work = [(p, ROOT / p.relative_to(folder / "source")) for p in translated]
    work.append((HERE / "runtime.cc", HERE / "runtime.cc"))
    if faults:
        spoilt = {ROOT / name for name in faults}
        wrong = [(p, original) for p, original in work if p.name.startswith(units) and includes(original) & spoilt]
        ready = [folder.parent / f"{p.name}.o" for p, original in work if (p, original) not in wrong]
        work = wrong
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = [*pool.map(lambda w: compile_one(*w), work), *(ready if faults else ())]
    linked = folder / program
    if faults or not linked.exists() or linked.stat().st_mtime < max(o.stat().st_mtime for o in objects):
        new = linked.with_suffix(".new")  # a program that other tests run is not written over
        subprocess.run([*command, *map(str, objects), "-o", str(new)], check=True)
        new.replace(linked)
    return linked


if __name__ == "__main__":
    wanted = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "emulator"
    for name in PROGRAMS:
        print(build(wanted.resolve(), program=name))
