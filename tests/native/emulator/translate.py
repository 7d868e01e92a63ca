"""CUDA C++ into the C++ that the emulator compiles: launches, dynamic shared memory, inline PTX.

Everything else of CUDA is macros and functions of `include/`. An instruction of inline PTX that is not in the tables
below is an error: a kernel that uses another one needs another line here.
"""

from __future__ import annotations

import re

THREADS = 96
"""Threads of a block, where the kernels have 512: three warps are enough to tell their roles apart."""
POLLS = 4
"""Polls of a wait before it looks for a failure, where the kernels poll 64 or 256 times. A rank shows that it waits
when it looks. Each poll is a turn of a host thread, and on a busy machine 256 of them took half a second."""

TYPES = {
    "u8": "uint8_t",
    "b8": "uint8_t",
    "u16": "uint16_t",
    "b16": "uint16_t",
    "u32": "uint32_t",
    "b32": "uint32_t",
    "s32": "uint32_t",
    "f32": "uint32_t",
    "u64": "uint64_t",
    "b64": "uint64_t",
    "s64": "uint64_t",
}
LEFT_OUT = ("", "weak", "volatile", "relaxed", "gpu", "sys", "cta", "global", "shared", "mmio")
"""Qualifiers that the translation drops: on the emulator all scopes are equal."""


class Untranslated(Exception):
    pass


def _end(text: str, at: int, opening: str, closing: str) -> int:
    """Returns the place behind the bracket that closes the one at `at`. Brackets in strings are skipped."""
    depth, i = 0, at
    while i < len(text):
        if text[i] == '"':
            i = text.index('"', i + 1)
        elif text.startswith(opening, i):
            depth += 1
        elif text.startswith(closing, i):
            depth -= 1
            if depth == 0:
                return i + len(closing)
        i += 1
    raise Untranslated(f"no {closing} for: {text[at : at + 60]}")


def _split(text: str, separator: str) -> list[str]:
    """At separators outside brackets and strings. `::` is no separator."""
    parts, depth, start, i = [], 0, 0, 0
    while i < len(text):
        c = text[i]
        if c == '"':
            i = text.index('"', i + 1)
        elif c in "([{<":
            depth += 1
        elif c in ")]}>" and text[i - 1 : i + 1] != "->":
            depth -= 1
        elif text.startswith(separator, i) and depth == 0:
            parts.append(text[start:i])
            start = i + len(separator)
        i += 1
    return [*parts, text[start:]]


# -- inline PTX --------------------------------------------------------------------------------------------------------


def _kind(words: list[str]) -> tuple[str, int]:
    """The C++ type and the number of elements of a load, store or atomic instruction."""
    kinds = [w for w in words if w in TYPES]
    vector = [w for w in words if re.fullmatch(r"v\d", w)]
    known = (*LEFT_OUT, "acquire", "release", "acq_rel", "nc", "L1::no_allocate", "L2::128B", "L2::256B", "shared::cta")
    if len(kinds) != 1 or any(w not in known and w not in kinds and w not in vector for w in words):
        raise Untranslated(".".join(words))
    return TYPES[kinds[0]], int(vector[0][1]) if vector else 1


def _instruction(text: str, operand) -> str:
    name, _, rest = text.partition(" ")
    words = name.split(".")
    arguments = [a.strip() for a in _split(rest, ",")] if rest.strip() else []

    def value(argument: str) -> str:
        return operand(argument) if argument.startswith("%") else argument

    def address(argument: str) -> str:
        base, _, offset = argument.strip("[] ").partition("+")
        return f"({operand(base.strip())})" + (f" + {offset}" if offset else "")

    def elements(argument: str) -> list[str]:
        return [value(a.strip()) for a in argument.strip("{} ").split(",")]

    match words:
        case ["ld", "relaxed", "sys", "global", "v4", "u32"]:  # part of a line: cuda_kernels/low_latency/ll128.cuh
            part = f"::emulator::LoadLinePart(::emulator::At<const uint4>({address(arguments[1])}))"
            names = zip(elements(arguments[0]), "xyzw", strict=True)
            return f"const uint4 part = {part}; " + " ".join(f"{t} = part.{c};" for t, c in names)
        case ["st", "relaxed", "sys", "global", "v4", "u32"]:
            part = f"make_uint4({', '.join(elements(arguments[1]))})"
            return f"::emulator::StoreLinePart(::emulator::At<uint4>({address(arguments[0])}), {part});"
        case ["ld", *kind] if "v4" in kind and "u32" in kind and "gpu" in kind:  # one transaction
            part = f"::emulator::LoadVector(::emulator::At<const uint4>({address(arguments[1])}))"
            names = zip(elements(arguments[0]), "xyzw", strict=True)
            return f"const uint4 part = {part}; " + " ".join(f"{t} = part.{c};" for t, c in names)
        case ["ld", *kind]:
            order = "__ATOMIC_ACQUIRE" if "acquire" in kind else "__ATOMIC_RELAXED"
            cpp, count = _kind(kind)
            targets = elements(arguments[0])
            if len(targets) != count:
                raise Untranslated(text)
            at = f"::emulator::At<const {cpp}>({address(arguments[1])})"
            return " ".join(
                f"::emulator::Set({t}, ::emulator::Load({at} + {i}, {order}));" for i, t in enumerate(targets)
            )
        case ["st", *kind]:
            order = "__ATOMIC_RELEASE" if "release" in kind else "__ATOMIC_RELAXED"
            cpp, count = _kind(kind)
            sources = elements(arguments[1])
            if len(sources) != count:
                raise Untranslated(text)
            at = f"::emulator::At<{cpp}>({address(arguments[0])})"
            return " ".join(f"::emulator::Store({at} + {i}, {s}, {order});" for i, s in enumerate(sources))
        case ["atom", *kind] if "cas" in kind:
            cpp, _ = _kind([w for w in kind if w != "cas"])
            at = f"::emulator::At<{cpp}>({address(arguments[1])})"
            swap = f"::emulator::CompareAndSwap<{cpp}>({at}, {value(arguments[2])}, {value(arguments[3])})"
            return f"::emulator::Set({operand(arguments[0])}, {swap});"
        case ["atom" | "red", *kind] if {"add", "or", "and", "exch", "max", "min"} & set(kind):
            (how,) = {"add", "or", "and", "exch", "max", "min"} & set(kind)
            cpp, _ = _kind([w for w in kind if w != how])
            function = f"::atomic{how.capitalize()}<{cpp}>"
            to, *others = arguments if words[0] == "atom" else ["", *arguments]
            done = f"{function}(::emulator::At<{cpp}>({address(others[0])}), {value(others[1])})"
            return f"::emulator::Set({operand(to)}, {done});" if to else f"{done};"
        case ["fence" | "membar", *_]:
            return "::emulator::Fence();"
        case ["griddepcontrol", "wait"]:  # a kernel starts when the one before it has ended
            return ""
        case ["griddepcontrol", "launch_dependents"]:
            raise Untranslated("no kernel lets the next one in before it ends: cuda_kernels/core/launch.cuh says why")
        case ["bar" | "barrier", *kind] if "sync" in kind:
            count = value(arguments[1]) if len(arguments) > 1 else "0"
            return f"::emulator::Barrier({value(arguments[0])}, {count});"
        case ["mov", _] if arguments[1] in ("%globaltimer", "%%globaltimer"):
            return f"{operand(arguments[0])} = ::emulator::NowNs(); ::emulator::Poll();"
        case ["nanosleep", "u32"]:
            return f"::emulator::Pause({value(arguments[0])});"
        case ["cp", "async", "cg" | "ca", "shared" | "shared::cta", "global"]:
            taken = value(arguments[3]) if len(arguments) > 3 else arguments[2]
            to, source = address(arguments[0]), address(arguments[1])
            return f"::emulator::CopyLater(::emulator::At<char>({to}), {source}, {arguments[2]}, {taken});"
        case ["cp", "async", "commit_group"]:
            return "::emulator::CommitCopies();"
        case ["cp", "async", "wait_group"]:
            return f"::emulator::AwaitCopies({value(arguments[0])});"
        case ["cp", "async", "wait_all"]:
            return "::emulator::CommitCopies(); ::emulator::AwaitCopies(0);"
        case ["cp", "async", "bulk", "shared::cluster", "global", "mbarrier::complete_tx::bytes"]:
            to, source, size, arrived = (
                address(arguments[0]),
                address(arguments[1]),
                arguments[2],
                address(arguments[3]),
            )
            copy = f"std::memcpy(::emulator::At<char>({to}), ::emulator::At<const char>({source}), {value(size)});"
            return f"{copy} ++*::emulator::At<uint64_t>({arrived});"  # arrives at once, and ends the barrier's phase
        case ["cp", "async", "bulk", "global", "shared::cta", "bulk_group"]:
            to, source, size = address(arguments[0]), address(arguments[1]), value(arguments[2])
            places = f"::emulator::At<char>({to}), ::emulator::At<const char>({source})"
            return f"::emulator::CopyLater({places}, {size}, {size});"
        case ["cp", "async", "bulk", "commit_group"]:
            return "::emulator::CommitCopies();"
        case ["cp", "async", "bulk", "wait_group"] | ["cp", "async", "bulk", "wait_group", "read"]:
            return f"::emulator::AwaitCopies({value(arguments[0])});"
        case ["mbarrier", "init", "shared::cta", "b64"]:
            return f"*::emulator::At<uint64_t>({address(arguments[0])}) = 0;"  # phases that have ended
        case ["mbarrier", "arrive", "expect_tx", "shared::cta", "b64"]:
            return ""
        case ["mbarrier", "try_wait", "parity", "shared::cta", "b64"]:
            ended = f"(*::emulator::At<uint64_t>({address(arguments[1])}) & 1) != {value(arguments[2])}"
            return f"predicate = {ended}; if (!predicate) ::emulator::Poll();"
        case ["{"]:  # { .reg .pred p
            return "bool predicate = false;"
        case ["selp", "u32"]:
            return f"::emulator::Set({operand(arguments[0])}, predicate ? 1u : 0u);"
        case ["}"]:
            return ""
    raise Untranslated(text)


def _assembly(statement: str) -> str:
    """The inside of `asm volatile(...)`."""
    parts = _split(statement.replace("::", ": :"), ":")
    template = (
        "".join(re.findall(r'"((?:[^"\\]|\\.)*)"', parts[0]))
        .replace("\\n", " ")
        .replace("\\t", " ")
        .replace(": :", "::")
    )
    operands = []
    for part in parts[1:3]:
        operands += (
            re.findall(r'"[^"]*"\s*\((.*)\)\s*$', "")
            if not part.strip()
            else [re.fullmatch(r'\s*"[^"]*"\s*\((.*)\)\s*', o, re.S).group(1) for o in _split(part, ",")]
        )

    def operand(name: str) -> str:
        return operands[int(name.lstrip("%"))].replace(": :", "::")

    instructions = [i.strip() for i in template.split(";") if i.strip()]
    return "do { " + " ".join(_instruction(re.sub(r"\s+", " ", i), operand) for i in instructions) + " } while (0)"


# -- a file ------------------------------------------------------------------------------------------------------------


def _launches(text: str) -> str:
    while (at := text.find("<<<")) >= 0:
        begin = at
        while True:  # back over a name, with template arguments
            if text[begin - 1] == ">":
                depth = 0
                while True:
                    begin -= 1
                    depth += {">": 1, "<": -1}.get(text[begin], 0)
                    if depth == 0:
                        break
            elif re.match(r"[\w:]", text[begin - 1]):
                begin -= 1
            else:
                break
        close = text.index(">>>", at)
        shape = [a.strip() for a in _split(text[at + 3 : close], ",")]
        shape += ["0", "nullptr"][len(shape) - 2 :]
        end = _end(text, close + 3, "(", ")")
        kernel, inside = text[begin:at], text[text.index("(", close) + 1 : end - 1]
        bound = f"::emulator::Bound({kernel}{', ' if inside.strip() else ''}{inside})"
        text = f"{text[:begin]}::emulator::Launch({', '.join(shape)}, ::emulator::Key({kernel}), {bound}){text[end:]}"
    return text


def translate(text: str) -> str:
    """A source file of the kernels or of their harness.

    Raises:
      Untranslated: with the PTX that the tables do not know.
    """
    text = re.sub(r"\bkThreads = 512\b", f"kThreads = {THREADS}", text)
    text = re.sub(r"\bkBulkChunk = \d+\b", "kBulkChunk = 256", text)  # rows of many chunks, though they are short
    for polls, most in (("kPolls", 64), ("kLinePolls", 256)):  # a poll takes a host thread's turn, not nanoseconds
        text = re.sub(rf"\bint {polls} = {most}\b", f"int {polls} = {POLLS}", text)
    text = re.sub(
        r"extern __shared__ (?:__align__\(\d+\) |alignas\(\d+\) )?([\w:]+) (\w+)\[\];",
        r"\1* const \2 = static_cast<\1*>(::emulator::DynamicShared());",
        text,
    )
    out, at = [], 0
    for found in re.finditer(r"\basm\s*(?:volatile\s*)?\(", text):
        end = _end(text, found.end() - 1, "(", ")")
        out += [text[at : found.start()], _assembly(text[found.end() : end - 1])]
        at = end
    return _launches("".join([*out, text[at:]]))
