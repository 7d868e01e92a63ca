"""A folder of safetensors files: which tensors there are, and parts of them as NumPy arrays."""

from __future__ import annotations

import contextlib
import json
import math
import pathlib
import re
from typing import Any

import ml_dtypes
import numpy as np

FLOAT8 = {
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
}
"""Types that safetensors' NumPy interface cannot make an array of: they are mapped from the file here."""
INDEX = "model.safetensors.index.json"
"""Says in `weight_map` which file has a tensor."""

Index = tuple[slice, ...]


def _json_object(file: pathlib.Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text())
    except ValueError as error:  # UnicodeDecodeError too
        raise ValueError(f"{file}: not JSON ({error}); fetch it again") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file}: holds a {type(found).__name__} and must hold an object; fetch it again")
    return found


def _of_the_text(config: dict[str, Any]) -> dict[str, Any]:
    """Returns the config of the language model: that of a model of text and images is in "text_config"."""
    text = config.get("text_config")
    return config | text if isinstance(text, dict) and "num_hidden_layers" in text else config


class Checkpoint:
    """Tensors of all `*.safetensors` files of a folder by name, and its `config.json`. A context manager.

    Raises:
      FileNotFoundError: no such folder, no config.json or no safetensors file in it.
      ValueError: one of the files does not have the format of its name.
      ModuleNotFoundError: safetensors is not installed.
    """

    def __init__(self, folder: str | pathlib.Path) -> None:
        self.folder = pathlib.Path(folder)
        try:
            from safetensors import SafetensorError, safe_open
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "load_hugging_face needs safetensors: pip install 'xen-moe-jax[hugging-face]'", name="safetensors"
            ) from error
        files = sorted(file for file in self.folder.glob("*.safetensors") if not file.is_dir())
        for what, there in (("config.json", (self.folder / "config.json").is_file()), ("*.safetensors", bool(files))):
            if not there:
                raise FileNotFoundError(f"folder={str(folder)!r}: has no {what}; give the folder of a checkpoint")
        self.config = _of_the_text(_json_object(self.folder / "config.json"))
        self._files_of: dict[str, list[tuple[pathlib.Path, Any]]] = {}
        self._asked: set[str] = set()
        index = self.folder / INDEX
        belongs = _json_object(index).get("weight_map") if index.exists() else {}
        self._belongs: dict[str, str] = belongs if isinstance(belongs, dict) else {}
        with contextlib.ExitStack() as stack:
            for file in files:
                try:
                    opened = stack.enter_context(safe_open(file, framework="np"))
                except SafetensorError as error:
                    raise ValueError(
                        f"{file}: not a whole safetensors file ({error}), of {file.stat().st_size} bytes; fetch it "
                        "again (a hundred bytes or so are a pointer of git-lfs: run git lfs pull)"
                    ) from error
                for name in opened.keys():
                    self._files_of.setdefault(name, []).append((file, opened))
            self._close = stack.pop_all()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self._close.close()

    def prefix(self, layer: int) -> str:
        """Returns the prefix of the names of a decoder layer's tensors; models of text and images have a longer one."""
        ends = f"layers.{layer}."
        for start in ("model.", "model.language_model.", "language_model.model.", "language_model."):
            if any(name.startswith(start + ends) for name in self._files_of):
                return start + ends.removesuffix(".")
        return "model." + ends.removesuffix(".")

    def __contains__(self, name: str) -> bool:
        return name in self._files_of

    def shape(self, name: str, ndim: int | None = None) -> tuple[int, ...]:
        """Raises KeyError, with names that are like it, if there is no such tensor, and ValueError if it does not have
        `ndim` dimensions."""
        shape = tuple(self._slice(name).get_shape())
        if ndim not in (None, len(shape)):
            raise ValueError(f"{self.folder}: {name} has shape {list(shape)}: must have {ndim} dimensions")
        return shape

    def described(self, name: str) -> str:
        """Returns the type of a tensor, as safetensors names it, and its shape."""
        return f"{self._slice(name).get_dtype()}{list(self.shape(name))}"

    def read(self, name: str, index: Index = ()) -> np.ndarray:
        """The part `index` of a tensor, in the type of the file; nothing else of it is read. Raises ValueError if the
        tensor has no such part."""
        part, shape = self._slice(name), self.shape(name)
        index = (*index, *[slice(None)] * (len(shape) - len(index)))
        if len(index) > len(shape) or any(
            (s.start or 0) >= size or (s.stop or 0) > size for s, size in zip(index, shape, strict=True)
        ):
            wanted = ", ".join(f"{s.start or 0}:{'' if s.stop is None else s.stop}" for s in index)
            raise ValueError(
                f"{self.folder}: {name} has shape {list(shape)}, and by config.json it has a part [{wanted}]; one of "
                "both is of another model"
            )
        if part.get_dtype() in FLOAT8:
            return self._mapped(name, FLOAT8[part.get_dtype()])[index]
        try:
            return part[index]
        except AttributeError:  # NumPy has no such type
            raise ValueError(
                f"{self.folder}: {name} is in {part.get_dtype()}, which is not known here; load a checkpoint in "
                "bfloat16"
            ) from None

    def _slice(self, name: str) -> Any:
        self._asked.add(name)
        return self._found(name)[1].get_slice(name)

    def _found(self, name: str) -> tuple[pathlib.Path, Any]:
        """Returns the file that has a tensor: where several have it, the one that the index names."""
        files, belongs = self._files_of.get(name, []), self._belongs.get(name)
        if not files:
            like = [other for other in self._files_of if other.split(".")[:3] == name.split(".")[:3]][:8]
            absent = "" if belongs is None else f" (by its index {belongs} has it: fetch that file)"
            raise KeyError(
                f"{self.folder}: no tensor {name!r} in its safetensors files{absent}; it has {like or 'no such layer'}"
            )
        if len(files) > 1:
            among = [file.name for file, _ in files]
            files = [found for found in files if found[0].name == belongs]
            if not files:
                raise ValueError(
                    f"{self.folder}: {name} is in {among}, and no {INDEX} says which one counts; move the others away"
                )
        return files[0]

    def unread(self, prefix: str) -> list[str]:
        """Returns the tensors that no reader asked for, in those modules of a layer from which readers read others.

        Names that differ by a number alone, the experts', count as one: a process reads its own experts.
        """

        def numberless(name: str) -> str:
            return re.sub(r"\.\d+(?=\.|$)", ".{}", name.removeprefix(prefix))

        asked = {numberless(name) for name in self._asked if name.startswith(f"{prefix}.")}
        modules = tuple(f".{name.split('.')[1]}." for name in asked)
        here = [name for name in self._files_of if name.removeprefix(prefix).startswith(modules)]
        return sorted({name for name in here if numberless(name) not in asked})

    def _mapped(self, name: str, dtype: Any) -> np.ndarray:
        """Maps a tensor by the file's header: 8 bytes of length, JSON with offsets, data."""
        file, _ = self._found(name)
        with file.open("rb") as data:
            length = int.from_bytes(data.read(8), "little")
            entry = json.loads(data.read(length))[name]
        begin, end = entry["data_offsets"]
        assert end - begin == math.prod(entry["shape"])
        return np.memmap(file, dtype, "r", 8 + length + begin, tuple(entry["shape"]))
