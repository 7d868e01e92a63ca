"""Tuned configs that are looked up when a program is lowered: shipped profiles, and files that a user names.

A profile is a JSON file of entries. Each entry names the machine of its measurement (device, versions of this package,
jax and jaxlib), the workload, and the fastest config of each operation. An entry serves programs of the same device,
number of ranks, versions and shape, the number of tokens within a factor of two, and fills in only those fields of
`KernelConfig` that the caller left unset. Tuning never changes a result.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
import json
import math
import pathlib
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import jax

from xen_moe_jax._config import KernelConfig
from xen_moe_jax._spec import Spec

FORMAT = "xen_moe_jax tuned configs 2"
SHIPPED = pathlib.Path(__file__).parent / "profiles"
OPERATIONS = ("dispatch", "combine")
TUNED_FIELDS = ("mode", "num_sms", "chunk_tokens", "block_tokens")
"""Fields of `KernelConfig` that a profile holds; the caller sets all other fields."""
MACHINE_FIELDS = ("device", "xen-moe-jax", "jax", "jaxlib")
SHAPE_FIELDS = ("ranks", "tokens", "hidden", "experts", "top_k", "layout", "dtype", "wire", "combine_wire")
"""Fields of an entry's workload that decide which calls the entry fits; further fields may stand beside them."""
UNSET = KernelConfig()
TOKENS_FACTOR = 2.0
BLOCK_SCALED = ("float8_e4m3fn", "int8")


class ProfileError(ValueError):
    """A file of tuned configs is damaged, or holds nothing for this machine; says which file and why."""


class ProfileWarning(UserWarning):
    """A profile that is shipped cannot be used; defaults are used instead."""


def machine(device: str | None = None) -> dict[str, str]:
    """Conditions of a valid entry beside its workload. `device` is JAX's `device_kind`; None: the first device's."""
    return {
        "device": jax.devices()[0].device_kind if device is None else device,
        "xen-moe-jax": sys.modules[__package__].__version__,  # not imported: the package stands above its modules
        **_installed(),
    }


@functools.cache
def _installed() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")}


def differences(entry: dict[str, Any], here: dict[str, str]) -> str:
    """Describes the differences between the machine of `entry` and `here`; empty where there are none."""
    return ", ".join(
        f"{name} {entry['machine'][name]} where this is {here[name]}"
        for name in MACHINE_FIELDS
        if entry["machine"][name] != here[name]
    )


def read(path: str | pathlib.Path) -> list[dict[str, Any]]:
    """The entries of a profile: machine, workload, and per operation a config and its time.

    Raises:
      FileNotFoundError: there is no such file.
      ProfileError: it is something else, or damaged.
    """
    try:
        content = json.loads(pathlib.Path(path).read_text())
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']!r}, not {FORMAT!r}")
        for entry in content["entries"]:
            _check(entry)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ProfileError(
            f"{path}: not a file of tuned configs ({error}); make it with xen-moe-jax autotune"
        ) from error
    return content["entries"]


def _check(entry: dict[str, Any]) -> None:
    if not {"machine", "workload", "operations"} <= set(entry):
        raise ValueError(f"an entry has the fields {sorted(entry)}")
    missing = [f"machine.{name}" for name in MACHINE_FIELDS if not isinstance(entry["machine"].get(name), str)]
    missing += [f"workload.{name}" for name in SHAPE_FIELDS if name not in entry["workload"]]
    if missing:
        raise ValueError(f"an entry has no {', '.join(missing)}")
    for name in ("ranks", "tokens", "hidden", "experts", "top_k"):
        value = entry["workload"][name]
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"workload.{name} is {value!r}")
    for operation, saved in entry["operations"].items():
        if operation not in OPERATIONS or set(saved["config"]) != set(TUNED_FIELDS):
            raise ValueError(f"an entry for {operation!r} has the fields {sorted(saved['config'])}")
        KernelConfig(**saved["config"])


def shipped() -> list[pathlib.Path]:
    """The profiles that are part of the package, made by `xen-moe-jax autotune` on the machines that they name."""
    return sorted(SHIPPED.glob("*.json"))


_named: list[pathlib.Path] = []


def use(path: str | pathlib.Path) -> int:
    """Makes programs that are lowered from now on look into this profile first; call it in every process of a job.

    Returns:
      how many of its entries are for this machine.

    Raises:
      FileNotFoundError: there is no such file.
      ProfileError: it is damaged, or every entry was made on another device or with other versions.
    """
    entries = read(path)
    here = machine()
    reasons = [differences(entry, here) for entry in entries]
    if all(reasons):
        raise ProfileError(f"{path}: {reasons[0] if reasons else 'it has no entries'}; run xen-moe-jax autotune here")
    _named.insert(0, pathlib.Path(path))
    _entries.cache_clear()
    return reasons.count("")


def forget() -> None:
    """Takes back every `use`."""
    _named.clear()
    _entries.cache_clear()


_ignored = False


@contextlib.contextmanager
def ignored() -> Iterator[None]:
    """Programs that are lowered inside this context run with the defaults."""
    global _ignored
    before, _ignored = _ignored, True
    try:
        yield
    finally:
        _ignored = before


@functools.cache
def _entries() -> tuple[dict[str, Any], ...]:
    """Entries of all profiles, the user's first. A damaged one that is shipped is left out with a warning: a program
    that did not ask for it must not fail for it."""
    found: list[dict[str, Any]] = []
    for path in [*_named, *shipped()]:
        try:
            found += [entry | {"file": path.name} for entry in read(path)]
        except ProfileError as error:
            warnings.warn(f"xen_moe_jax: defaults instead of a profile: {error}", ProfileWarning, stacklevel=2)
    return tuple(found)


def device_kind(mesh: Any) -> str | None:
    """The kind of all devices of a mesh; None where the devices are not known, or are of several kinds."""
    kinds = {d.device_kind for d in mesh.devices.flat} if isinstance(mesh, jax.sharding.Mesh) else set()
    return kinds.pop() if len(kinds) == 1 else None


def resolve(
    config: KernelConfig, operation: str, spec: Spec, hidden: int, dtype: str, wire: str | None, mesh: Any
) -> KernelConfig:
    """`config` with its unset tuned fields from a profile, where one fits.

    Args:
      hidden, dtype: size and dtype of the operand: the tokens of a dispatch, the rows of a combine.
      wire: quantized wire of the operation.
      mesh: the mesh that the program is lowered for.
    """
    entry = find(operation, spec, hidden, dtype, wire, device_kind(mesh)) if operation in OPERATIONS else None
    if entry is None:
        return config
    tuned = entry["operations"][operation]["config"]
    unset = [name for name in TUNED_FIELDS if getattr(config, name) == getattr(UNSET, name)]
    return dataclasses.replace(config, **{name: tuned[name] for name in unset})


def find(
    operation: str, spec: Spec, hidden: int, dtype: str, wire: str | None, device: str | None
) -> dict[str, Any] | None:
    """The entry that fits, of nearest number of tokens."""
    if device is None or _ignored or not _entries():
        return None
    shape = {
        "ranks": spec.num_ranks,
        "hidden": hidden,
        "experts": spec.num_experts,
        "top_k": spec.top_k,
        "layout": spec.layout,
        "dtype": dtype,
        "wire": wire,
    }
    here = machine(device)
    fitting = [
        entry
        for entry in _entries()
        if operation in entry["operations"]
        and not differences(entry, here)
        and moved(operation, entry["workload"]).items() >= shape.items()
        and _octaves(entry, spec) <= math.log2(TOKENS_FACTOR)
    ]
    return min(fitting, key=lambda entry: _octaves(entry, spec), default=None)


def _octaves(entry: dict[str, Any], spec: Spec) -> float:
    return abs(math.log2(entry["workload"]["tokens"] / spec.num_tokens))


def moved(operation: str, workload: dict[str, Any]) -> dict[str, Any]:
    """The workload as one operation sees it: the dtype of its operand and the format on the wire. A combine moves
    expert outputs, which are never block scaled."""
    if operation == "dispatch":
        return workload
    dtype = "bfloat16" if workload["dtype"] in BLOCK_SCALED else workload["dtype"]
    return workload | {"dtype": dtype, "wire": workload["combine_wire"]}


def survey(device: str | None = None) -> Iterator[tuple[pathlib.Path, str, str]]:
    """For reports: every profile, its contents, and the reason why this machine does not use it ("" where it does)."""
    here = machine(device)
    for path in [*_named, *shipped()]:
        try:
            entries = read(path)
        except ProfileError as error:
            yield path, "", str(error)
            continue
        works = [entry["workload"] for entry in entries]
        holds = "; ".join(
            f"{work['tokens']} tokens of {work['hidden']}, {work['dtype']}, {work['layout']}, {work['ranks']} ranks"
            for work in works
        )
        reasons = [differences(entry, here) for entry in entries]
        yield path, holds, "" if not all(reasons) or not reasons else reasons[0]
