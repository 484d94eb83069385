"""Reads the attributes of kernels from a cubin, an ELF file, with the standard library only.

A cubin is a 64-bit little-endian ELF file. Per kernel NAME it has the sections ``.text.NAME``
(code), ``.nv.shared.NAME`` (static shared memory, absent if there is none) and ``.nv.info.NAME``
(attributes); ``.nv.info`` holds the attributes that are keyed by symbol. The attribute numbers
below are those that ``cuobjdump --dump-elf`` prints by name; the values were checked against the
compiler's own report for every architecture that flashgen compiles for.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from flashgen.shared.errors import CompileError

MAX_THREADS = 0x05  # EIATTR_MAX_THREADS: three 32-bit numbers, from __launch_bounds__
MIN_STACK_SIZE = 0x12  # EIATTR_MIN_STACK_SIZE: bytes of stack of a function and its callees
PARAM = 0x17  # EIATTR_KPARAM_INFO: number, place and size of one parameter
REGISTERS = 0x2F  # EIATTR_REGCOUNT

_HEADER_BYTES = 64
_SIZED = 4  # attribute format: a 16-bit size and as many bytes follow
_THREADS_OF_A_BLOCK = 1024  # the limit of the hardware, without __launch_bounds__
# From sm_90 on the first KiB of a block's shared memory belongs to the system. The section of a
# kernel includes it, the compiler's report does not; this section marks files that have it.
_RESERVED_SECTION = ".nv.shared.reserved.0"
_RESERVED_BYTES = 1024


@dataclass(frozen=True)
class KernelFacts:
    """The attributes of one kernel in the cubin; sizes in bytes."""

    registers: int  # per thread
    stack_bytes: int  # stack of the kernel and the functions it calls, per thread
    static_smem_bytes: int  # shared memory declared in the kernel, per block
    code_bytes: int
    max_threads: int  # per block, from __launch_bounds__, else the limit of the hardware
    param_bytes: int  # of all parameters together


@dataclass(frozen=True)
class _Section:
    name: str
    kind: int
    offset: int
    size: int


_NO_DATA = 8  # SHT_NOBITS: the section has no contents in the file


def kernels(cubin: bytes) -> tuple[str, ...]:
    """Names of the kernels in a cubin, in the order of their sections.

    Raises:
        CompileError: this is not a cubin, or it is cut short.
    """
    prefix = ".nv.info."
    return tuple(
        section.name[len(prefix) :]
        for section in _sections(cubin)
        if section.name.startswith(prefix) and not section.name.startswith(".nv.info.$")
    )


def kernel_facts(cubin: bytes, kernel: str) -> KernelFacts:
    """The attributes of one kernel in the cubin.

    Raises:
        CompileError: this is not a cubin, it is cut short, or it has no such kernel.
    """
    sections = {section.name: section for section in _sections(cubin)}
    if f".text.{kernel}" not in sections:
        raise CompileError(
            f"the compiled file has no kernel named {kernel}",
            where=f"cubin, section .text.{kernel}",
            numbers=f"kernels in the file: {', '.join(kernels(cubin)) or 'none'}",
            way_out='declare it as extern "C" __global__ void, with the expected name',
        )
    try:
        index = _symbols(cubin, sections).index(kernel)
        keyed: dict[int, int] = {}
        for attribute, payload in _attributes(cubin, sections[".nv.info"]):
            if len(payload) == 8 and struct.unpack_from("<I", payload)[0] == index:
                keyed[attribute] = struct.unpack_from("<I", payload, 4)[0]
        kernel_attributes = dict(_attributes(cubin, sections[f".nv.info.{kernel}"]))
        threads = _THREADS_OF_A_BLOCK
        if MAX_THREADS in kernel_attributes:
            x, y, z = struct.unpack("<III", kernel_attributes[MAX_THREADS])
            threads = x * y * z
        param_bytes = _param_bytes(_attributes(cubin, sections[f".nv.info.{kernel}"]))
        registers, stack = keyed[REGISTERS], keyed[MIN_STACK_SIZE]
    except (KeyError, ValueError, struct.error) as error:
        raise _unreadable(f"{type(error).__name__}: {error}") from error
    shared = sections.get(f".nv.shared.{kernel}")
    reserved = _RESERVED_BYTES if _RESERVED_SECTION in sections else 0
    return KernelFacts(
        registers=registers,
        stack_bytes=stack,
        static_smem_bytes=max(0, shared.size - reserved) if shared else 0,
        code_bytes=sections[f".text.{kernel}"].size,
        max_threads=threads,
        param_bytes=param_bytes,
    )


def _unreadable(detail: str) -> CompileError:
    return CompileError(
        "the compiled file cannot be read as a cubin",
        where="cubin, ELF structure",
        numbers=detail,
        way_out="empty the cache with `flashgen cache clear` and build again",
    )


def _string(table: bytes, offset: int) -> str:
    return table[offset : table.index(b"\0", offset)].decode()


def _sections(cubin: bytes) -> list[_Section]:
    if len(cubin) < _HEADER_BYTES or cubin[:6] != b"\x7fELF\x02\x01":
        raise _unreadable(f"{len(cubin):,} bytes that do not begin as a 64-bit ELF file does")
    try:
        segments, table = struct.unpack_from("<QQ", cubin, 0x20)
        width, parts, stride, count, names_at = struct.unpack_from("<HHHHH", cubin, 0x36)
        end = max(segments + parts * width, table + count * stride)
        if end > len(cubin):
            raise _unreadable(f"{len(cubin):,} bytes; its tables should end at {end:,}")
        raw = [struct.unpack_from("<IIQQQQ", cubin, table + i * stride) for i in range(count)]
        *_, offset, size = raw[names_at]
        names = cubin[offset : offset + size]
        sections = [_Section(_string(names, r[0]), r[1], r[4], r[5]) for r in raw]
    except (struct.error, ValueError, IndexError, UnicodeDecodeError) as error:
        raise _unreadable(f"{len(cubin):,} bytes; {error}") from error
    for section in sections:
        if section.kind != _NO_DATA and section.offset + section.size > len(cubin):
            end = section.offset + section.size
            raise _unreadable(f"{len(cubin):,} bytes; {section.name} should end at {end:,}")
    return sections


def _symbols(cubin: bytes, sections: dict[str, _Section]) -> list[str]:
    table, names = sections[".symtab"], sections[".strtab"]
    strings = cubin[names.offset : names.offset + names.size]
    return [
        _string(strings, struct.unpack_from("<I", cubin, offset)[0])
        for offset in range(table.offset, table.offset + table.size, 24)
    ]


def _param_bytes(attributes: Iterable[tuple[int, bytes]]) -> int:
    """Bytes from the first to the end of the last parameter.

    EIATTR_CBANK_PARAM_SIZE would include the bytes before the first parameter. A tensor map has
    some before it, because it is aligned to 128 bytes.
    """
    params = [
        struct.unpack("<IHHI", value) for attribute, value in attributes if attribute == PARAM
    ]
    ends = [(offset, offset + (packed >> 18)) for _, _, offset, packed in params]
    return max((end for _, end in ends), default=0) - min((start for start, _ in ends), default=0)


def _attributes(cubin: bytes, section: _Section) -> Iterator[tuple[int, bytes]]:
    """Attributes of a ``.nv.info`` section: one byte of format, one of number, then the value."""
    offset, end = section.offset, section.offset + section.size
    while offset < end:
        form, attribute, value = struct.unpack_from("<BBH", cubin, offset)
        offset += 4
        if form == _SIZED:
            yield attribute, cubin[offset : offset + value]
            offset += value
        else:
            yield attribute, struct.pack("<H", value)
