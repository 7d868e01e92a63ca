"""The library that tests load in NCCL's place, which `make memory-test` builds into build/memory, and its knobs."""

from __future__ import annotations

import ctypes
import pathlib

import pytest

from tests.support import memory_module

BUILT = memory_module.FOLDER / "libfake_nccl.so"
NAME = "libnccl.so.2"


def home(folder: pathlib.Path, library: pathlib.Path | None = None) -> pathlib.Path:
    """A folder for NCCL_HOME, with the fake library in it or another file. Skips the test where none has been built."""
    if not BUILT.exists():
        pytest.skip(f"{BUILT} is not built: make memory-test")
    (folder / "lib").mkdir(parents=True)
    (folder / "lib" / NAME).symlink_to(library or BUILT)
    return folder


class Knobs:
    """The fake that this process has loaded."""

    def __init__(self, folder: str) -> None:
        self._library = ctypes.CDLL(str(pathlib.Path(folder) / "lib" / NAME))
        self._library.fake_nccl_get.restype = self._library.fake_nccl_owns.restype = ctypes.c_long

    def owns(self, address: int) -> bool:
        """True if this process has allocated the block, as opposed to mapped it."""
        return bool(self._library.fake_nccl_owns(ctypes.c_void_p(address)))

    def put(self, window: int, process: int, offset: int, word: int) -> None:
        """Puts a 32-bit word into the memory that `process` has behind the window, as a kernel puts to another node."""
        value = ctypes.c_uint32(word)
        place = ctypes.c_size_t(offset), ctypes.byref(value), ctypes.c_size_t(4)
        self._library.fake_nccl_put(ctypes.c_void_p(window), ctypes.c_int(process), *place)

    def set(self, name: str, value: int) -> None:
        self._library.fake_nccl_set(name.encode(), ctypes.c_long(value))

    def get(self, name: str) -> int:
        return self._library.fake_nccl_get(name.encode())
