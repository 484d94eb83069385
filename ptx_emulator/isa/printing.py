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


def print_formatted(here: Execution, form: Any, arguments: Any) -> Array:
    """Prints for each active lane; returns how many arguments each has printed."""
    active, addresses = here.active, here.spread(form)
    counts = np.zeros(active.shape, np.int32)
    texts: dict[tuple[int, int], str] = {}
    for at in np.unique(addresses[active]).tolist():
        part = here._replace(lanes=active & (addresses == at))
        text = _string(here.machine, part.first(), at)
        if "%" in _FIELD.sub("", text):
            what = "the emulator does not support a conversion of this printf"
            way_out = "convert by d, i, o, u, x, X, c, s, e, E, f, F, g, G or p"
            here.machine.fail(UnknownInstruction, what, part.first(), repr(text), way_out)
        fields, values = list(_FIELD.finditer(text)), _Arguments(part, here.spread(arguments))
        given = [values.of_field(field) for field in fields]
        for row, lane in np.argwhere(part.active).tolist():
            pieces, end = [], 0
            for field, each in zip(fields, given, strict=True):
                site = here.site(row, lane)
                shown = _formatted(here.machine, site, field, [v[row, lane] for v in each])
                pieces += [text[end : field.start()], shown]
                end = field.end()
            texts[row, lane] = "".join(pieces) + text[end:]
            counts[row, lane] = sum(map(len, given))
    sys.stdout.write("".join(texts[site] for site in sorted(texts)))
    return counts


class _Arguments:
    """Reads the arguments of a format one after the other, for all lanes at once."""

    def __init__(self, here: Execution, addresses: Array) -> None:
        self.here, self.addresses, self.offset = here, addresses, 0

    def of_field(self, field: re.Match[str]) -> list[Array]:
        """The arguments (n, 32) of a conversion: width and precision, and then the value."""
        _, width, precision, length, kind = field.groups()
        found = [self._next("i4") for given in (width, precision) if given and given[-1] == "*"]
        if kind in _FLOATS:
            return [*found, self._next("f8")]
        if kind in "sp":
            return [*found, self._next("i8" if kind == "s" else "u8")]
        if kind == "%":
            return found
        size = _BYTES.get(length, 8)
        value = self._next(("i" if kind in _SIGNED else "u") + str(max(4, size)))
        return [*found, value if size > 2 else value.astype(f"{value.dtype.kind}{size}")]

    def _next(self, dtype: str) -> Array:
        size = int(dtype[1:])
        at = -(-self.offset // size) * size
        self.offset = at + size
        if self.here.machine.local_written is not None:
            (written,) = written_generic(self.here, self.addresses + at, size, 1)
            self.here.machine.require_defined(self.here, written)
        value = load_generic(self.here, self.addresses + at, size)
        return self.here.spread(value.view(dtype))


def _formatted(machine: Wave, site: Site, field: re.Match[str], values: list[Any]) -> str:
    """The text of a conversion, of C's rules by Python's."""
    flags, width, precision, _, kind = field.groups()
    stars = [int(one) for one in values[:-1]] if kind != "%" else []
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
    place = memory.find(address)
    end = int(memory.ends[place]) if place >= 0 else 0
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
    g.write(ins.operands[0], f"print_formatted({g.here()}, {form}, {arguments})", "i4")
