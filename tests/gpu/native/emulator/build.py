"""Builds the harness of the kernels over the emulator: python tests/gpu/native/emulator/build.py [FOLDER]

Needs a C++17 compiler ($CXX, c++ by default) and nothing of CUDA. FOLDER is build/emulator by default; the program is
FOLDER/harness, with the options of tests/gpu/native/harness.cu.
"""

from __future__ import annotations

import concurrent.futures
import os
import pathlib
import shlex
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[3]
sys.path.insert(0, str(ROOT))
from tests.gpu.native.emulator.translate import Untranslated, translate  # noqa: E402

FOLDERS = ("cuda_kernels", "tests/gpu/native")
FLAGS = "-std=c++17 -O1 -g1 -ffp-contract=off -U_FORTIFY_SOURCE -Wno-ignored-attributes -pthread"


def sources() -> list[pathlib.Path]:
    """All that the harness is made of, as tools/gpu_native_check.sh builds it."""
    found = [p for folder in FOLDERS for p in sorted((ROOT / folder).glob("*.c[cu]"))]
    return [p for p in found if p.name != "reference_test.cc"]


def write(folder: pathlib.Path, faults: dict[str, tuple[str, str]]) -> list[pathlib.Path]:
    """Translates every file into `folder`, with `faults` put in; returns those to compile."""
    wanted = []
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
            raise SystemExit(f"{source}: tests/gpu/native/emulator/translate.py does not know: {error}") from None
        if not target.exists() or target.read_text() != text:
            target.write_text(text)
        if source in sources():
            wanted.append(target)
    return sorted(wanted, key=lambda p: -p.stat().st_size)


def build(folder: pathlib.Path, faults: dict[str, tuple[str, str]] | None = None) -> pathlib.Path:
    """Compiles what is out of date. Returns the program.

    Args:
      faults: `.cu` file to (text, what to put there instead), to see that the tests find it. Only those files are
        compiled, into a folder beside the one of the whole program.
    """
    compiler = [
        *shlex.split(os.environ.get("CXX", "c++")),
        *FLAGS.split(),
        *shlex.split(os.environ.get("CXXFLAGS", "")),
    ]
    headers = [*(HERE / "include").iterdir(), *(ROOT / "cuda_kernels").glob("*.*h"), *(ROOT / FOLDERS[1]).glob("*.h")]
    newest = max(p.stat().st_mtime for p in [*headers, *HERE.glob("*.py")])
    include = ["-I", str(HERE / "include"), "-I", str(folder / "source"), "-include", "cuda_runtime.h"]

    def compile_one(source: pathlib.Path, original: pathlib.Path) -> pathlib.Path:
        target = folder / f"{source.name}.o"
        if not target.exists() or target.stat().st_mtime < max(newest, original.stat().st_mtime):
            subprocess.run([*compiler, *include, "-x", "c++", "-c", str(source), "-o", str(target)], check=True)
        return target

    translated = write(folder / "source", faults or {})
    work = [(p, ROOT / p.relative_to(folder / "source")) for p in translated]
    work.append((HERE / "runtime.cc", HERE / "runtime.cc"))
    if faults:
        ready = [folder.parent / f"{p.name}.o" for p, original in work if str(original.relative_to(ROOT)) not in faults]
        work = [w for w in work if str(w[1].relative_to(ROOT)) in faults]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = [*pool.map(lambda w: compile_one(*w), work), *(ready if faults else ())]
    program = folder / "harness"
    subprocess.run([*compiler, *map(str, objects), "-o", str(program)], check=True)
    return program


if __name__ == "__main__":
    wanted = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "emulator"
    print(build(wanted.resolve()))
