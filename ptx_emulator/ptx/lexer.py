"""Splits PTX text into tokens, and reads tokens, constants and variable declarations."""

from __future__ import annotations

import re
import struct
from typing import NamedTuple

from ptx_emulator.errors import PtxSyntaxError
from ptx_emulator.ptx.syntax import TYPE_BYTES, Imm, Variable

_COMMENT = re.compile(r'"[^"\n]*"|//[^\n]*|/\*.*?\*/', re.S)
_TOKEN = re.compile(
    r"""\s*(?:(?P<loc>\.loc\b[^\n;]*)
      | (?P<line>\.(?:file|version|target|address_size)\b[^\n;]*)
      | (?P<string>"[^"\n]*")
      | (?P<number>0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}|0[xX][0-9a-fA-F]+U?|0[bB][01]+U?
                  |\d+\.\d*(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+|\d+U?)
      | (?P<name>[A-Za-z_$%.][\w$.]*(?:::[\w$.]+)*)
      | (?P<mark>[{}()\[\],;:|@!+\-<>=*]))
    """,
    re.X,
)


class Tokens(NamedTuple):
    """Kind, text and position of each token: lists of plain values, which take little memory."""

    kinds: list[str]
    texts: list[str]
    positions: list[int]


def strip_comments(text: str) -> str:
    """Replaces comments by blanks; positions and line numbers stay the same."""

    def blank(match: re.Match[str]) -> str:
        found = match.group()
        return found if found[0] == '"' else re.sub(r"[^\n]", " ", found)

    return _COMMENT.sub(blank, text)


def tokenize(text: str) -> Tokens:
    """All tokens of comment-free PTX, and one of kind "end" and without text at its end.

    ``.loc`` and other line directives are one token each.
    """
    scanner = _TOKEN.scanner(text)  # type: ignore[attr-defined]
    kinds: list[str] = []
    texts: list[str] = []
    positions: list[int] = []
    end = 0
    for match in iter(scanner.match, None):
        kind = match.lastgroup
        found, end = match[kind], match.end()
        kinds.append(kind)
        texts.append(found)
        positions.append(end - len(found))
    rest = text[end:].lstrip()
    if rest:
        line = text.count("\n", 0, len(text) - len(rest)) + 1
        what = "a character that is not part of PTX"
        where = f"line {line} of the PTX"
        way_out = "pass the text of one PTX module, from NVRTC or Triton"
        raise PtxSyntaxError(what, where=where, numbers=repr(rest[:40]), way_out=way_out)
    return Tokens([*kinds, "end"], [*texts, ""], [*positions, len(text)])


# By how a number begins: its base, and the bits of a float.
_BASES = {"0f": (16, 32), "0d": (16, 64), "0x": (16, 0), "0b": (2, 0)}


def number(text: str) -> Imm:
    """The value of a numeric token."""
    head = text[:2].lower()
    if head in _BASES:
        base, float_bits = _BASES[head]
        return Imm(int(text[2:].rstrip("U"), base), float_bits)
    text = text.rstrip("U")
    if text.isdigit():
        return Imm(int(text, 8) if len(text) > 1 and text[0] == "0" else int(text))
    return Imm(struct.unpack("<Q", struct.pack("<d", float(text)))[0], 64)


class Cursor:
    """Reads tokens, constants and variable declarations, none of which depend on scopes."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.clean = strip_comments(text)
        self.kinds, self.texts, self.positions = tokenize(self.clean)
        self.at = 0
        self.line = (0, 0)
        self.outer = (0, 0)

    def fail(self, what: str) -> PtxSyntaxError:
        position = self.positions[self.at]
        line = self.text.count("\n", 0, position) + 1
        shown = self.text[position : position + 60].split("\n")[0]
        where = f"line {line} of the PTX, .loc line {self.line[1]}"
        numbers = f"found {shown!r}"
        way_out = "check that the text is complete PTX of one module"
        return PtxSyntaxError(what, where=where, numbers=numbers, way_out=way_out)

    def take(self, expected: str = "") -> str:
        text = self.texts[self.at]
        if expected and text != expected:
            raise self.fail(f"expected {expected!r}")
        self.at += 1
        return text

    def accept(self, text: str) -> bool:
        if self.texts[self.at] == text:
            self.at += 1
            return True
        return False

    def peek(self) -> str:
        return self.texts[self.at]

    def immediate(self) -> Imm:
        negative = False
        while self.peek() in ("-", "+"):
            negative ^= self.take() == "-"
        if self.kinds[self.at] != "number":
            raise self.fail("expected an operand")
        value = number(self.take())
        if not negative:
            return value
        if value.float_bits:
            return Imm(value.value ^ (1 << (value.float_bits - 1)), value.float_bits)
        return Imm(-value.value)

    # ---- variables

    def variable_declaration(self, parameter: bool = False) -> list[Variable]:
        space = self.take()[1:]
        align, kind, vector = 0, "", 1
        while self.peek().startswith("."):
            word = self.take()[1:]
            if word == "align":
                align = int(self.take())
            elif word in ("v2", "v4", "v8"):
                vector = int(word[1])
            elif word in TYPE_BYTES:
                kind = word
            elif word == "ptr":
                while self.peek() in (".global", ".const", ".shared", ".local", ".align"):
                    if self.take() == ".align":
                        self.take()
            elif word != "attribute":
                raise self.fail(f"unknown type .{word} of a variable")
        found = []
        while True:
            name = self.take()
            count = vector
            if self.accept("<"):
                raise self.fail("a range of variables outside .reg")
            while self.accept("["):
                count *= 0 if self.peek() == "]" else number(self.take()).value
                self.take("]")
            variable = Variable(name, space, kind, count, align or TYPE_BYTES[kind] * vector)
            if self.accept("="):
                self.initialiser(variable)
            found.append(variable)
            if parameter:
                return found
            if not self.accept(","):
                break
        self.take(";")
        return found

    def initialiser(self, variable: Variable) -> None:
        """Collects the bytes of ``= {1, 2, symbol+8, ...}``."""
        size = TYPE_BYTES[variable.type]
        data = bytearray()
        depth = 0
        while (text := self.peek()) != ";" and (depth or text != ","):
            if text in ("{", "}", ","):
                depth += (text == "{") - (text == "}")
                self.at += 1
            else:
                data += self.initial_value(variable, size, len(data))
        variable.init = bytes(data.ljust(variable.size, b"\0"))

    def initial_value(self, variable: Variable, size: int, offset: int) -> bytes:
        if self.kinds[self.at] == "number" or self.peek() == "-":
            value = self.immediate()
            single = value.float_bits == 64 and size == 4
            bits = double_to_single(value.value) if single else value.value
            return (bits & ((1 << 8 * size) - 1)).to_bytes(size, "little")
        name = self.take()
        if name == "generic":
            self.take("(")
            name = self.take()
            self.take(")")
        extra = number(self.take()).value if self.accept("+") else 0
        variable.relocations.append((offset, name))
        return extra.to_bytes(size, "little")


def double_to_single(bits: int) -> int:
    """The bits of a double as those of a float."""
    value = struct.unpack("<d", struct.pack("<Q", bits))[0]
    return int(struct.unpack("<I", struct.pack("<f", value))[0])
