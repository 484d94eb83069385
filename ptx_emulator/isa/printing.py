"""printf: a call of vprintf, which takes the addresses of the format and of its arguments.

The arguments lie one after the other, each aligned to its size: integers of 4 bytes, or of 8 with
l, ll, j, z and t, pointers of 8, and floats as float64. The text goes to the standard output of the
process, of one lane after the other.

Source: CUDA C++ Programming Guide, "Formatted Output", and the calls that NVRTC writes.
"""

from __future__ import annotations

import re
import sys
from typing import Any

import numpy as np

from ptx_emulator.errors import OutOfBounds, UnknownInstruction
from ptx_emulator.isa.generator import Generator, instruction
from ptx_emulator.isa.memory import load_generic, written_generic
from ptx_emulator.ptx.syntax import Instruction
from ptx_emulator.state.memory import Array
from ptx_emulator.state.wave import Execution, Site, Wave

_FIELD = re.compile(r"%([-+ #0]*)(\*|\d*)(\.\*|\.\d*)?(hh|h|ll|l|j|z|t|)([diouxXcseEfFgGp%])")
_BYTES = {"hh": 1, "h": 2, "": 4}  # of an integer; 8 with another length
_SIGNED, _UNSIGNED, _FLOATS = "di", "uoxXc", "eEfFgG"


def print_formatted(execution: Execution, form: Any, arguments: Any) -> Array:
    """Prints for each active lane; returns how many arguments each has printed."""
    active, addresses = execution.active, execution.spread(form)
    counts = np.zeros(active.shape, np.int32)
    texts: dict[tuple[int, int], str] = {}
    for address in np.unique(addresses[active]).tolist():
        part = execution._replace(lanes=active & (addresses == address))
        text = _string(execution.machine, part.first(), address)
        if "%" in _FIELD.sub("", text):
            what = "the emulator does not support a conversion of this printf"
            way_out = "convert by d, i, o, u, x, X, c, s, e, E, f, F, g, G or p"
            execution.machine.fail(UnknownInstruction, what, part.first(), repr(text), way_out)
        fields, reader = list(_FIELD.finditer(text)), _Arguments(part, execution.spread(arguments))
        values = [reader.take(field) for field in fields]
        for row, lane in np.argwhere(part.active).tolist():
            pieces, end = [], 0
            for field, operands in zip(fields, values, strict=True):
                site = execution.site(row, lane)
                shown = _formatted(execution.machine, site, field, [v[row, lane] for v in operands])
                pieces += [text[end : field.start()], shown]
                end = field.end()
            texts[row, lane] = "".join(pieces) + text[end:]
            counts[row, lane] = sum(map(len, values))
    sys.stdout.write("".join(texts[site] for site in sorted(texts)))
    return counts


class _Arguments:
    """Reads the arguments of a format one after the other, for all lanes at once."""

    def __init__(self, execution: Execution, addresses: Array) -> None:
        self.execution, self.addresses, self.offset = execution, addresses, 0

    def take(self, field: re.Match[str]) -> list[Array]:
        """The arguments (n, 32) of a conversion: width and precision, and then the value."""
        _, width, precision, length, kind = field.groups()
        stars = [self._next("i4") for word in (width, precision) if word and word[-1] == "*"]
        if kind in _FLOATS:
            return [*stars, self._next("f8")]
        if kind in "sp":
            return [*stars, self._next("i8" if kind == "s" else "u8")]
        if kind == "%":
            return stars
        size = _BYTES.get(length, 8)
        value = self._next(("i" if kind in _SIGNED else "u") + str(max(4, size)))
        return [*stars, value if size > 2 else value.astype(f"{value.dtype.kind}{size}")]

    def _next(self, dtype: str) -> Array:
        size = int(dtype[1:])
        offset = -(-self.offset // size) * size
        self.offset = offset + size
        if self.execution.machine.local_written is not None:
            (written,) = written_generic(self.execution, self.addresses + offset, size, 1)
            self.execution.machine.require_defined(self.execution, written)
        value = load_generic(self.execution, self.addresses + offset, size)
        return self.execution.spread(value.view(dtype))


def _formatted(machine: Wave, site: Site, field: re.Match[str], values: list[Any]) -> str:
    """The text of a conversion of C, made by Python's own."""
    flags, width, precision, _, kind = field.groups()
    stars = [int(star) for star in values[:-1]] if kind != "%" else []
    width = str(stars.pop(0)) if width == "*" else width
    precision = f".{max(0, stars[0])}" if precision == ".*" else precision or ""
    if width.startswith("-"):
        flags, width = flags + "-", width[1:]
    if kind == "%":
        return "%"
    value = values[-1]
    if kind in _FLOATS:
        return f"%{flags}{width}{precision}{kind}" % float(value)
    if kind == "s":
        return f"%{flags}{width}{precision}s" % _string(machine, site, int(value))
    if kind == "p":
        return f"%{flags}{width}s" % hex(int(value))
    if kind == "c":
        return f"%{flags}{width}s" % chr(int(value) & 0xFF)
    shown = f"%{flags}{width}{precision}{'d' if kind in 'iu' else kind}" % int(value)
    return shown.replace("0o", "0") if kind == "o" else shown


def _string(machine: Wave, site: Site, address: int) -> str:
    """The text, up to a zero byte, at an address in global memory."""
    memory = machine.memory
    allocation_index = memory.find(address)
    end = int(memory.ends[allocation_index]) if allocation_index >= 0 else 0
    text = memory.flat.bytes[address - memory.base : max(end, address) - memory.base].tobytes()
    if b"\0" not in text:
        what = "printf of a text that is not in global memory, or has no end"
        way_out = "pass a string literal, or an array of global memory that ends with a zero byte"
        machine.fail(OutOfBounds, what, site, memory.describe(address), way_out)
    return text[: text.index(b"\0")].decode(errors="replace")


@instruction("vprintf", unit="control")
def emit_print(g: Generator, ins: Instruction) -> None:
    """A call of vprintf: see `ptx.flatten`."""
    form, arguments = (g.read(operand, "i8") for operand in ins.operands[1:])
    g.write(ins.operands[0], f"print_formatted({g.checked_execution()}, {form}, {arguments})", "i4")
