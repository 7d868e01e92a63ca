"""Runs PTX in NumPy, as far as `pallas_kernels.hopper.float8_tile` writes it: 128 threads run each instruction
together, without branches."""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np

THREADS = 128
E4M3 = ml_dtypes.float8_e4m3fn


class Machine:
    """128 threads with their memory.

    Attributes:
      operands: the values of `$0`, `$1`, ...: addresses, which are places in the arrays below, and numbers.
      shared: uint8 `[...]`, bytes of shared memory.
      memory: uint8 `[...]`, bytes of the GPU's memory.
      registers: by name, a number for each thread: bits as uint32 or uint64, and predicates as bool.
    """

    def __init__(self, operands, shared, memory):
        self.operands, self.shared, self.memory = operands, shared, memory
        self.registers = dict.fromkeys(("tid", "%tid.x"), np.arange(THREADS, dtype=np.uint32))

    def run(self, lines):
        for statement in " ".join(lines).split(";"):
            statement = re.sub(r"^[{}\s]*(?=[@.a-z])", "", statement.strip())
            if statement and statement != "}" and not statement.startswith(".reg"):
                self._step(statement)

    def _step(self, statement):
        active = np.ones(THREADS, bool)
        if statement.startswith("@"):
            guard, statement = statement[1:].split(maxsplit=1)
            active = self.registers[guard]
        opcode, rest = statement.split(maxsplit=1)
        arguments = [a.strip() for a in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*", rest)]
        name, *suffixes = opcode.split(".")
        with np.errstate(all="ignore"):
            getattr(self, f"_{name}")(suffixes, arguments, active)

    def _get(self, operand, kind=np.uint32):
        if operand in self.registers:
            bits = self.registers[operand]
        elif operand.startswith("$"):
            bits = np.full(THREADS, self.operands[int(operand[1:])], np.uint64).astype(np.uint32)
        elif operand.startswith("0f"):
            bits = np.full(THREADS, int(operand[2:], 16), np.uint32)
        else:
            bits = np.full(THREADS, int(operand, 0) & 0xFFFFFFFF, np.uint32)
        if kind in (np.uint16, np.float16, ml_dtypes.bfloat16):
            return bits.astype(np.uint16).view(kind)
        return bits.view(kind) if kind is not np.uint64 else bits.astype(np.uint64)

    def _set(self, name, value):
        value = np.asarray(value)
        if value.dtype == bool or value.dtype == np.uint64:
            self.registers[name] = value
        else:
            self.registers[name] = value.view(f"u{value.itemsize}").astype(np.uint32)

    def _place(self, operand):
        register, _, offset = operand[1:-1].partition("+")
        return self._get(register, np.uint64 if self.registers[register].dtype == np.uint64 else np.uint32).astype(
            np.int64
        ) + int(offset or 0)

    @staticmethod
    def _names(operand):
        return [name.strip() for name in operand.strip("{}").split(",")]

    def _mov(self, _, arguments, active):
        out, value = arguments
        if out.startswith("{"):
            low, high = self._names(out)
            self._set(low, self._get(value).astype(np.uint16))
            self._set(high, (self._get(value) >> 16).astype(np.uint16))
        elif value.startswith("{"):
            low, high = (self._get(name) & 0xFFFF for name in self._names(value))
            self._set(out, low | high << 16)
        else:
            self._set(out, self._get(value))

    def _ld(self, suffixes, arguments, active):
        names, place = self._names(arguments[0]), self._place(arguments[1])
        size = int(suffixes[-1][1:]) // 8
        assert suffixes[0] == "shared" and (place % (size * len(names)) == 0).all()
        for number, name in enumerate(names):
            at = place[:, None] + number * size + np.arange(size)
            self._set(name, np.ascontiguousarray(self.shared[at]).view(f"u{size}")[:, 0])

    def _st(self, suffixes, arguments, active):
        place, names = self._place(arguments[0]), self._names(arguments[1])
        memory = self.shared if suffixes[0] == "shared" else self.memory
        assert (place[active] % (4 * len(names)) == 0).all()
        for number, name in enumerate(names):
            at = place[active, None] + number * 4 + np.arange(4)
            memory[at] = self._get(name)[active].view(np.uint8).reshape(-1, 4)

    def _binary(self, arguments, function, kind=np.uint32):
        self._set(arguments[0], function(*(self._get(a, kind) for a in arguments[1:])).astype(kind))

    def _and(self, _, arguments, active):
        self._binary(arguments, np.bitwise_and)

    def _xor(self, _, arguments, active):
        self._binary(arguments, np.bitwise_xor)

    def _shl(self, _, arguments, active):
        self._binary(arguments, np.left_shift)

    def _shr(self, _, arguments, active):
        self._binary(arguments, np.right_shift)

    def _add(self, _, arguments, active):
        self._binary(arguments, np.add)

    def _mad(self, suffixes, arguments, active):
        out, a, b, c = arguments
        if suffixes[0] == "wide":
            base = np.full(THREADS, self.operands[int(c[1:])], np.uint64)
            self._set(out, self._get(a, np.uint64) * self._get(b, np.uint64) + base)
        else:
            self._set(out, self._get(a) * self._get(b) + self._get(c))

    def _max(self, suffixes, arguments, active):
        if suffixes == ["u16x2"]:
            out, *pair = arguments
            a, b = (self._get(name).view(np.uint16) for name in pair)
            self._set(out, np.maximum(a, b).view(np.uint32))
        else:
            self._binary(arguments, np.maximum if "NaN" in suffixes else np.fmax, np.float32)

    def _abs(self, _, arguments, active):
        self._set(arguments[0], np.abs(self._get(arguments[1], np.float32)))

    def _mul(self, _, arguments, active):
        self._binary(arguments, np.multiply, np.float32)

    def _div(self, _, arguments, active):
        self._binary(arguments, np.divide, np.float32)

    def _prmt(self, _, arguments, active):
        out, a, b, selector = arguments
        pool = np.stack([self._get(a), self._get(b)], 1).view(np.uint8)
        picks = [int(selector, 16) >> 4 * n & 7 for n in range(4)]
        self._set(out, np.ascontiguousarray(pool[:, picks]).view(np.uint32)[:, 0])

    def _setp(self, suffixes, arguments, active):
        out, a, b = arguments
        kind = {"f32": np.float32, "s32": np.int32, "u32": np.uint32}[suffixes[1]]
        a, b = self._get(a, kind), self._get(b, kind)
        self._set(out, {"lt": a < b, "ge": a >= b, "eq": a == b, "neu": a != b}[suffixes[0]])

    def _selp(self, _, arguments, active):
        out, a, b, where = arguments
        self._set(out, np.where(self.registers[where], self._get(a), self._get(b)))

    def _shfl(self, suffixes, arguments, active):
        out, value, other, *_ = arguments
        lane, warp = np.arange(THREADS) % 32, np.arange(THREADS) // 32 * 32
        other = self._get(other).astype(np.int64)
        source = lane ^ other if suffixes[1] == "bfly" else other
        self._set(out, self._get(value)[warp + source])

    def _bar(self, suffixes, arguments, active):
        """A barrier does nothing, since all threads run each instruction together."""

    def _cvt(self, suffixes, arguments, active):
        kinds = suffixes[-2:]
        if kinds == ["e4m3x2", "f32"]:
            out, high, low = arguments
            high, low = (
                np.clip(self._get(name, np.float32), -448, 448).astype(E4M3).view(np.uint8).astype(np.uint16)
                for name in (high, low)
            )
            self._set(out, high << 8 | low)
        elif kinds == ["f16x2", "e4m3x2"]:
            codes = self._get(arguments[1]).astype(np.uint16).view(np.uint8)
            self._set(arguments[0], codes.view(E4M3).astype(np.float16).view(np.uint32))
        else:
            assert kinds == ["f32", "f16"]
            self._set(arguments[0], self._get(arguments[1], np.float16).astype(np.float32))
