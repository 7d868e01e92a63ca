"""`shared_jit`: one compilation for equal calls, as long as JAX's functions are its own.

The cache of a `jax.jit` knows functions, shapes and JAX's settings. It does not know that a library has put another
function in the place of `jax.lax.ragged_dot` or `jax.lax.dot_general`, as qwix does while a quantized model is traced:
a layer traced before would keep its old program, and a layer traced afterwards would get the quantized one. The
functions that a layer may call are therefore compared with those of the import. While one of them is another, every
call is traced again and leaves nothing behind.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Primitive

WATCHED = (
    "jax.lax",
    "jax.numpy",
    "jax.nn",
    "jax.random",
    "tokamax",
    "xen_moe_jax",
    "xen_moe_jax.experts.grouped_matmul",
)
"""Modules whose functions a layer calls by name."""

_found: dict[str, list[tuple[str, Any, Any]]] = {}
"""Watched functions: for each module the name, the function and the code that it had when it was first seen."""
_BIND = Primitive.bind.__code__


def _code(function: Any) -> Any:
    """Returns the code object of a Python function, or of the function that `jax.jit` wraps; None for anything else."""
    return getattr(getattr(function, "__wrapped__", function), "__code__", None)


def _look(module: str) -> list[tuple[str, Any, Any]]:
    public = vars(sys.modules[module]).copy()
    return [(name, value, _code(value)) for name, value in public.items() if callable(value)]


def swapped() -> str | None:
    """Returns the name of a function that was replaced since the import, such as "jax.lax.ragged_dot"; None if there is
    none."""
    for module in WATCHED:
        if module not in sys.modules:
            continue
        if module not in _found:
            _found[module] = _look(module)
        public = vars(sys.modules[module])
        for name, function, code in _found[module]:
            if public.get(name) is not function or _code(function) is not code:
                return f"{module}.{name}"
    return None if Primitive.bind.__code__ is _BIND else "jax.extend.core.Primitive.bind"


def shared_jit(function: Callable[..., Any], num_static: int) -> Callable[..., Any]:
    """Returns `function` under `jax.jit`, its first `num_static` arguments static and hashable."""
    shared = jax.jit(function, static_argnums=tuple(range(num_static)))

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        other = swapped()
        if other is None:
            return shared(*arguments)

        @functools.wraps(function)
        def alone(*dynamic: Any) -> Any:
            return function(*arguments[:num_static], *dynamic)

        try:
            return jax.jit(alone)(*arguments[num_static:])
        except Exception as error:
            if type(error).__module__.partition(".")[0] != "flax":
                raise
            raise NotImplementedError(
                f"{other} was replaced by a function that makes or changes variables of the module, which the MoE "
                "layer's own shard_map does not allow. qwix does so for PTQ and LoRA: they do not support this layer; "
                "leave it out of their rules (module_path=...). qwix's QT works, without static scales"
            ) from error

    return call


for _module in WATCHED:  # now, before anything is swapped
    if _module in sys.modules:
        _found[_module] = _look(_module)
