"""Splits PTX text into tokens, and reads tokens, constants and variable declarations."""

from __future__ import annotations

import math
import operator
import re
import struct
from collections.abc import Callable
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
      | (?P<name>\.[\w$]+(?:::[\w$]+)*|(?:[A-Za-z_$]|%(?=[\w$]))[\w$.]*(?:::[\w$.]+)*)
      | (?P<mark><<|>>|[<>=!]=|&&|\|\||[{}()\[\],;:|@!+\-<>=*/%&^~?]))
    """,
    re.X,
)


# Types of variables that only instructions use which are not supported.
_OPAQUE = ("texref", "samplerref", "surfref")
WARP_SIZE = "WARP_SZ"  # the name of a constant


class Tokens(NamedTuple):
    """Kind, text and position of each token: lists of plain values, which take little memory."""

    kinds: list[str]
    texts: list[str]
    positions: list[int]


def strip_comments(text: str) -> str:
    """Replaces comments by blanks; positions and line numbers stay the same."""

    def blank(match: re.Match[str]) -> str:
        matched = match.group()
        return matched if matched[0] == '"' else re.sub(r"[^\n]", " ", matched)

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
        token, end = match[kind], match.end()
        kinds.append(kind)
        texts.append(token)
        positions.append(end - len(token))
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


def _is_unsigned(text: str, value: int) -> bool:
    """Whether an integer literal is of type .u64: it has the suffix, or does not fit into .s64."""
    return text.endswith("U") or value >= 1 << 63


def number(text: str) -> Imm:
    """The value of a numeric token."""
    head = text[:2].lower()
    if head in _BASES:
        base, float_bits = _BASES[head]
        value = int(text[2:].rstrip("U"), base)
        return Imm(value, float_bits, not float_bits and _is_unsigned(text, value))
    digits = text.rstrip("U")
    if digits.isdigit():
        value = int(digits, 8) if len(digits) > 1 and digits[0] == "0" else int(digits)
        return Imm(value, 0, _is_unsigned(text, value))
    return Imm(struct.unpack("<Q", struct.pack("<d", float(text)))[0], 64)


def _signed(value: int) -> int:
    """The low 64 bits as a signed number."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def _typed(value: int, unsigned: bool) -> Imm:
    """A constant of type .u64 or .s64 with the low 64 bits of a number."""
    return Imm(value % (1 << 64) if unsigned else _signed(value), 0, unsigned)


def _quotient(a: int, b: int) -> int:
    """Integer division towards zero."""
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


# The binary operators of constant expressions, those that bind least first.
_LEVELS: tuple[dict[str, Callable[[int, int], int]], ...] = (
    {"||": lambda a, b: int(bool(a or b))},
    {"&&": lambda a, b: int(bool(a and b))},
    {"|": operator.or_},
    {"^": operator.xor},
    {"&": operator.and_},
    {"==": operator.eq, "!=": operator.ne},
    {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge},
    {"<<": lambda a, b: a << (b & 63), ">>": lambda a, b: a >> (b & 63)},
    {"+": operator.add, "-": operator.sub},
    {"*": operator.mul, "/": _quotient, "%": lambda a, b: a - _quotient(a, b) * b},
)
_ENDS = frozenset(",;]}")  # after an operand
_TRUTHS = {sign for level in (0, 1, 5, 6) for sign in _LEVELS[level]}  # 0 or 1, of .s64
_PRODUCTS = len(_LEVELS) - 1
_UNARY: dict[str, Callable[[int], int]] = {
    "-": operator.neg,
    "+": operator.pos,
    "~": operator.invert,
    "!": operator.not_,
}


class Cursor:
    """Reads tokens, constants and variable declarations, none of which depend on scopes."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.clean = strip_comments(text)
        self.kinds, self.texts, self.positions = tokenize(self.clean)
        self.index = 0
        self.line = (0, 0)
        self.outer = (0, 0)

    def fail(self, what: str) -> PtxSyntaxError:
        position = self.positions[self.index]
        line = self.text.count("\n", 0, position) + 1
        shown = self.text[position : position + 60].split("\n")[0]
        where = f"line {line} of the PTX, .loc line {self.line[1]}"
        numbers = f"found {shown!r}"
        way_out = "check that the text is complete PTX of one module"
        return PtxSyntaxError(what, where=where, numbers=numbers, way_out=way_out)

    def take(self, expected: str = "") -> str:
        text = self.texts[self.index]
        if expected and text != expected:
            raise self.fail(f"expected {expected!r}")
        if self.kinds[self.index] == "end":
            raise self.fail("the text ends here, before a statement does")
        self.index += 1
        return text

    def whole(self) -> int:
        """A whole number that is no expression."""
        if self.kinds[self.index] != "number":
            raise self.fail("expected a number")
        return number(self.take()).value

    def accept(self, text: str) -> bool:
        if self.texts[self.index] == text:
            self.index += 1
            return True
        return False

    def peek(self) -> str:
        return self.texts[self.index]

    # ---- constants

    def immediate(self) -> Imm:
        """A constant expression: of integers with all operators, of a float with a sign."""
        # Most of them are one number.
        if self.kinds[self.index] == "number" and self.texts[self.index + 1] in _ENDS:
            self.index += 1
            return number(self.texts[self.index - 1])
        test = self._binary(0)
        if not self.accept("?"):
            return test
        if_true = self.immediate()
        self.take(":")
        if_false = self.immediate()
        return if_true if test.value else if_false

    def integer(self) -> int:
        """The value of a constant expression of integers."""
        value = self.immediate()
        if value.float_bits:
            raise self.fail("expected an integer")
        return value.value

    def offset(self) -> int:
        """The constant that is added to an address."""
        total = 0
        while self.peek() in ("+", "-"):
            sign = -1 if self.take() == "-" else 1
            term = self._binary(_PRODUCTS)
            if term.float_bits:
                raise self.fail("expected an integer")
            total += sign * term.value
        return total

    def _binary(self, level: int) -> Imm:
        if level == len(_LEVELS):
            return self._unary()
        left = self._binary(level + 1)
        while self.peek() in _LEVELS[level] and self.kinds[self.index] == "mark":
            sign = self.take()
            right = self._binary(level + 1)
            if left.float_bits or right.float_bits:
                raise self.fail("an operator between floats, which is not supported, before this")
            # A shift has the type of what it shifts; other operands are .u64 if one of them is,
            # and those of % always.
            shifts = sign in ("<<", ">>")
            unsigned = left.unsigned or (right.unsigned and not shifts) or sign == "%"
            first, second = (_typed(v.value, unsigned).value for v in (left, right))
            try:
                value = int(_LEVELS[level][sign](first, second))
                left = _typed(value, unsigned and sign not in _TRUTHS)
            except ZeroDivisionError:
                raise self.fail("a division by zero before this") from None
        return left

    def _unary(self) -> Imm:
        word = self.peek()
        if self.kinds[self.index] == "number":
            return number(self.take())
        if self.accept(WARP_SIZE):
            return Imm(32)
        if word == "(":
            self.take()
            cast = self.take() if self.peek() in (".s64", ".u64") else ""
            if cast:
                self.take(")")
            value = self._unary() if cast else self.immediate()
            if not cast:
                self.take(")")
                return value
            return _typed(value.value, cast == ".u64")
        if word not in _UNARY or self.kinds[self.index] != "mark":
            raise self.fail("expected an operand")
        self.take()
        value = self._unary()
        if not value.float_bits:
            result = int(_UNARY[word](value.value))
            return _typed(result, word == "~" or (value.unsigned and word != "!"))
        if word not in "+-":
            raise self.fail("an operator of integers before a float, before this")
        sign = (word == "-") << (value.float_bits - 1)
        return Imm(value.value ^ sign, value.float_bits)

    # ---- variables

    def variable_declaration(self, parameter: bool = False) -> list[Variable]:
        space = self.take()[1:]
        align, kind, vector = 0, "", 1
        while self.peek().startswith("."):
            word = self.take()[1:]
            if word == "align":
                align = self.whole()
            elif word in ("v2", "v4", "v8"):
                vector = int(word[1])
            elif word in TYPE_BYTES:
                kind = word
            elif word in _OPAQUE:
                kind = "b64"
            elif word == "ptr":
                while self.peek() in (".global", ".const", ".shared", ".local", ".align"):
                    if self.take() == ".align":
                        self.whole()
            elif word == "attribute":
                self.skip_attribute()
            else:
                raise self.fail(f"unknown type .{word} of a variable")
        if not kind:
            raise self.fail("expected the type of a variable")
        variables = []
        while True:
            name = self.take()
            sizes = []
            if self.accept("<"):
                raise self.fail("a range of variables outside .reg")
            while self.accept("["):
                sizes.append(0 if self.peek() == "]" else self.integer())
                self.take("]")
            sizes += [vector] if vector > 1 else []
            bytes_each, count = TYPE_BYTES[kind], math.prod(sizes)
            variable = Variable(name, space, kind, count, align or bytes_each * vector)
            if self.accept("="):
                self.initialiser(variable, sizes)
            variables.append(variable)
            if parameter:
                return variables
            if not self.accept(","):
                break
        self.take(";")
        return variables

    def skip_attribute(self) -> None:
        """Skips ``(...)`` after ``.attribute``: it says where memory is, not what it holds."""
        self.take("(")
        while not self.accept(")"):
            if self.peek() == "(":
                self.skip_attribute()
            else:
                self.take()

    def initialiser(self, variable: Variable, sizes: list[int]) -> None:
        """Collects the bytes of ``= {{1, 2}, {symbol+8}}``; what is left out is zero.

        Args:
            sizes: the number of elements of each dimension.
        """
        element_bytes = TYPE_BYTES[variable.type]
        data = bytearray()
        begins: list[int] = []
        while (text := self.peek()) != ";" and (begins or text != ","):
            if text not in ("{", "}", ","):
                data += self.initial_value(variable, element_bytes, len(data))
                continue
            if text == "{":
                begins.append(len(data))
                if len(begins) > max(len(sizes), 1):
                    raise self.fail("more braces than dimensions")
            elif text == "}":
                begin = begins.pop()
                if begins:  # one element of an array of arrays
                    missing = begin + element_bytes * math.prod(sizes[len(begins) :]) - len(data)
                    if missing < 0:
                        raise self.fail("more initial values than elements before this")
                    data += bytes(missing)
            self.index += 1
        if variable.count == 0:
            variable.count = len(data) // element_bytes
        if len(data) > variable.size:
            raise self.fail("more initial values than elements before this")
        variable.init = bytes(data.ljust(variable.size, b"\0"))

    def initial_value(self, variable: Variable, size: int, offset: int) -> bytes:
        if self.kinds[self.index] == "number" or self.peek() in ("-", "+", "~", "!", "("):
            value = self.immediate()
            bits = value.value
            if variable.type in ("f32", "f64") and not value.float_bits:
                bits = number(f"{bits}.0" if bits >= 0 else f"{-bits}.0").value ^ (bits < 0) << 63
                value = Imm(bits, 64)
            if value.float_bits == 64 and size == 4:
                bits = double_to_single(bits)
            return (bits & ((1 << 8 * size) - 1)).to_bytes(size, "little")
        if self.kinds[self.index] != "name":
            raise self.fail("expected an initial value")
        name = self.take()
        if name == "generic":
            self.take("(")
            name = self.take()
            self.take(")")
        extra = self.offset()
        variable.relocations.append((offset, name))
        return (extra % (1 << 8 * size)).to_bytes(size, "little")


def double_to_single(bits: int) -> int:
    """The bits of a double as those of a float."""
    value = struct.unpack("<d", struct.pack("<Q", bits))[0]
    return int(struct.unpack("<I", struct.pack("<f", value))[0])
