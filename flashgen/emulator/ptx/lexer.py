"""Splits PTX text into tokens."""

from __future__ import annotations

import re
import struct
from typing import NamedTuple

from flashgen.emulator.errors import PtxSyntaxError
from flashgen.emulator.ptx.syntax import Imm

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
        if found[0] == '"':
            return found
        return re.sub(r"[^\n]", " ", found)

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
        raise PtxSyntaxError(
            "a character that is not part of PTX",
            where=f"line {line} of the PTX",
            numbers=repr(rest[:40]),
            way_out="pass the text of one PTX module, from NVRTC or Triton",
        )
    return Tokens([*kinds, "end"], [*texts, ""], [*positions, len(text)])


def number(text: str) -> Imm:
    """The value of a numeric token."""
    head = text[:2].lower()
    if head == "0f":
        return Imm(int(text[2:], 16), 32)
    if head == "0d":
        return Imm(int(text[2:], 16), 64)
    text = text.rstrip("U")
    if head == "0x":
        return Imm(int(text, 16))
    if head == "0b":
        return Imm(int(text, 2))
    if text.isdigit():
        return Imm(int(text, 8) if len(text) > 1 and text[0] == "0" else int(text))
    return Imm(struct.unpack("<Q", struct.pack("<d", float(text)))[0], 64)
