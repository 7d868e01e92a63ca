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
from typing import NamedTuple

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[2]
sys.path.insert(0, str(ROOT))
from tests.native.emulator.translate import Untranslated, translate  # noqa: E402

WITHOUT = ("experts",)
"""Folders of cuda_kernels whose kernels multiply with tensor cores, which host threads have no other form of."""
FOLDERS = (p.name for p in (ROOT / "cuda_kernels").iterdir() if p.is_dir() and p.name not in WITHOUT)
FOLDERS = (*(f"cuda_kernels/{name}" for name in FOLDERS), "cuda_kernels")
FOLDERS += ("tests/native", "tests/native/nodes")
PROGRAMS = {
    "harness": ("harness.cu", "scenarios.cu", "alone.cu", "balance.cu", "members.cu", "rings.cu", "wide.cu"),
    "network_test": ("nodes/network_test.cu", "nodes/network.cc"),
    "nodes": ("nodes/nodes.cu", "nodes/network.cc"),
    "nodes_ranks256": ("nodes/nodes.cu", "nodes/network.cc"),
    "paced": ("nodes/paced.cu",),
}
"""Program to its own files of tests/native; world.cu and the kernels are part of every one."""
DEFINES = {"nodes_ranks256": ("XEN_MOE_MAX_RANKS=256",)}
"""Program to the defines that its own files are compiled with."""
FLAGS = (
    "-std=c++17 -O1 -g1 -ffp-contract=off -fno-strict-aliasing -U_FORTIFY_SOURCE -Wno-ignored-attributes -pthread "
    "-DXEN_MOE_BLOCK_LANES=4"
)
"""Kernels take the same registers for words and for numbers, which a C++ compiler need not allow from -O2 on."""


class Unit(NamedTuple):
    """A translation unit: the name of its object, its file, and the defines that it is compiled with."""

    name: str
    source: pathlib.Path
    defines: tuple[str, ...] = ()


BLOCK = Unit("block.cc", HERE / "block.cc")
RUNTIME = (BLOCK, Unit("runtime.cc", HERE / "runtime.cc"))


def units_of(program: str) -> list[Unit]:
    """Returns the translation units of a program.

    The kernels are the lines of cuda_kernels/variants.txt, without those `WITHOUT` a form here, and without those that
    launch kernels across nodes for the host: nodes.cu launches its own choice of these kernels, and they take minutes
    to compile.
    """
    lines = (ROOT / "cuda_kernels" / "variants.txt").read_text().splitlines()
    chosen = [line.split() for line in lines if not re.match(r"#|\S*(peer|nccl)", line)]
    chosen = [line for line in chosen if pathlib.Path(line[1]).parent.name not in WITHOUT]
    kernels = [Unit(name, ROOT / "cuda_kernels" / source, tuple(defines)) for name, source, *defines in chosen]
    folder, defines = ROOT / "tests" / "native", DEFINES.get(program, ())
    prefix = f"{program}." if defines else ""
    own = [Unit(prefix + pathlib.Path(name).name, folder / name, defines) for name in PROGRAMS[program]]
    return [*kernels, *own, Unit("world.cu", folder / "world.cu")]


def write(folder: pathlib.Path, faults: dict[str, tuple[str, str]]) -> None:
    """Translates every file into `folder`, with `faults` put in."""
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
    """The command, without the files, that compiles the sources that `write` has put into `folder`."""
    chosen = [os.environ.get("CXX", "c++"), FLAGS, os.environ.get("CXXFLAGS", "")]
    places = ["-I", str(HERE / "include"), "-I", str(folder / "source"), "-include", "cuda_runtime.h"]
    return [*(word for words in chosen for word in shlex.split(words)), *places]


def build(
    folder: pathlib.Path,
    faults: dict[str, tuple[str, str]] | None = None,
    program: str = "harness",
    units: str = "",
) -> pathlib.Path:
    """Compiles the units that are older than their sources. Returns the program.

    Args:
      faults: file to (text, replacement), to see that the tests find the fault. Only the units that include these files
        are compiled; `folder` lies in the folder of the whole program then, and takes the other objects from there.
      units: the beginning of the names of the units that get the faults, each name with a dot behind it; the other
        units stay right. "ranks256." is a variant, "ranks16.dispatch." one unit.
    """
    command = compiler(folder)
    headers = [*(HERE / "include").iterdir(), *(p for part in FOLDERS for p in (ROOT / part).glob("*.*h"))]
    newest = max(p.stat().st_mtime for p in [*headers, *HERE.glob("*.py")])
    source_folder = folder / "source"
    write(source_folder, faults or {})

    def compile_one(unit: Unit) -> pathlib.Path:
        target = folder / f"{unit.name}.o"
        translated = source_folder / unit.source.relative_to(ROOT) if unit not in RUNTIME else unit.source
        changed = max(newest, *(p.stat().st_mtime for p in includes(unit.source)))
        if not target.exists() or target.stat().st_mtime < changed:
            defines = [f"-D{define}" for define in unit.defines]
            most = ["-O2"] * (unit == BLOCK)  # its switches from thread to thread are most of a program's time
            subprocess.run([*command, *most, *defines, "-x", "c++", "-c", translated, "-o", target], check=True)
        return target

    work = [*units_of(program), *RUNTIME]
    ready: list[pathlib.Path] = []
    if faults:
        spoilt = {ROOT / name for name in faults}
        wrong = [u for u in work if f"{u.name}.".startswith(units) and includes(u.source) & spoilt]
        ready = [folder.parent / f"{u.name}.o" for u in work if u not in wrong]
        work = wrong
    work.sort(key=lambda unit: -unit.source.stat().st_size)
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = [*pool.map(compile_one, work), *ready]
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
