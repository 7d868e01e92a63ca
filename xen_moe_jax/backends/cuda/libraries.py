"""Finds NVIDIA's libraries of this installation."""

from __future__ import annotations

import importlib.util
import pathlib
from collections.abc import Iterable


def folders(*packages: str) -> list[pathlib.Path]:
    """Returns where these packages of `nvidia` would lie."""
    spec = importlib.util.find_spec("nvidia")
    roots = spec.submodule_search_locations or [] if spec else []
    return [pathlib.Path(root) / package for root in roots for package in packages]


def library(name: str, places: Iterable[pathlib.Path]) -> pathlib.Path | None:
    """Returns the first library of this name in the `lib` folder of one of the places; None if there is none."""
    return next((path for place in places if (path := place / "lib" / name).exists()), None)
