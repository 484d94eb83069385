"""cp.async, cp.async.bulk and cp.reduce.async.bulk, with tensor maps and without; tensormap."""

from __future__ import annotations

from ptx_emulator.isa.barriers import place_of
from ptx_emulator.isa.generator import Generator, instruction
from ptx_emulator.isa.memory import address, space_of, take_hints
from ptx_emulator.ptx.instructions import Width, as_immediate
from ptx_emulator.ptx.syntax import Instruction, Mem, Operand, Reg, Sym
from ptx_emulator.state.memory import PARAM_WINDOW

# Of each field of tensormap.replace: its offset, the bytes of one entry, and how many there are.
FIELDS = {
    "rank": (4, 4, 1),
    "elemtype": (8, 4, 1),
    "interleave_layout": (12, 4, 1),
    "swizzle_mode": (16, 4, 1),
    "fill_mode": (20, 4, 1),
    "global_address": (24, 8, 1),
    "global_stride": (32, 8, 4),
    "global_dim": (64, 4, 5),
    "box_dim": (84, 4, 5),
}


_REDUCTIONS = ("add", "min", "max", "inc", "dec", "and", "or", "xor")
_TYPES = ("f16", "bf16", "f32", "f64", "u32", "s32", "u64", "s64", "b32", "b64")


def _copied_bytes(ins: Instruction) -> tuple[int, int]:
    """Bytes of the writes to shared memory, and of the smallest read of global memory."""
    if "bulk" in ins.mods or len(ins.operands) < 3:
        return 16, 16  # bulk copies move chunks of 16 bytes
    size = as_immediate(ins.operands[2]) or 16
    if len(ins.operands) == 3:
        return size, size
    # A run-time source size is 0 or the whole size in practice; others are copied byte by byte.
    source = as_immediate(ins.operands[3])
    return size, size if source in (None, 0, size) else 1


@instruction(
    "cp",
    unit="memory",
    result=False,
    accesses=_copied_bytes,
    asynchronous=lambda ins: not {"bulk", "mbarrier"}.isdisjoint(ins.mods),
)
def emit_copy(g: Generator, ins: Instruction) -> None:
    mods = g.mods
    if not mods.take("async"):
        raise g.unknown()
    if mods.take("mbarrier"):
        _arrive(g, ins)
        return
    if mods.take("bulk"):
        bulk(g, ins)
        return
    if mods.take("wait_all"):
        g.emit(f"E.copies.commit(C, {g.lanes()})")
        g.emit(f"E.copies.wait(C, None, {g.lanes()})")
        return
    if _group(g, ins, "copies"):
        return
    small = mods.take("ca", "cg")
    if not small or not mods.take("shared", "shared::cta") or not mods.take("global"):
        raise g.unknown()
    operands = _without_policy(g, ins)
    size = as_immediate(operands[2])
    if size is None or size not in ((16,) if small == "cg" else (4, 8, 16)):
        raise g.unknown("this copy size")
    to = address(g, operands[0], "shared")
    source = address(g, operands[1], "global")
    read = _source_bytes(g, operands[3], size) if len(operands) > 3 else size
    g.require_defined()
    g.emit(f"E.copies.issue(C, {to}, {source}, {g.lanes()}, {size}, {read}, {g.pc})")


def _arrive(g: Generator, ins: Instruction) -> None:
    """cp.async.mbarrier.arrive: an arrival when the earlier copies of the thread are complete."""
    if not g.mods.take("arrive"):
        raise g.unknown()
    counted = bool(g.mods.take("noinc"))
    where = place_of(g, ins.operands[0])
    if not g.mods.take("b64"):
        raise g.unknown()
    g.require_defined()
    g.emit(f"E.copies.arrive(C, {where}, {counted}, {g.lanes()}, {g.pc})")


def _group(g: Generator, ins: Instruction, of: str) -> bool:
    """Emits commit_group or wait_group of the copies ``E.copies`` or ``E.bulk``, if it is one."""
    if g.mods.take("commit_group"):
        g.emit(f"E.{of}.commit(C, {g.lanes()})")
        return True
    if g.mods.take("wait_group"):
        reads = of == "bulk" and g.mods.take("read")
        left = as_immediate(ins.operands[0])
        if left is None:
            raise g.unknown("a computed number of groups")
        g.emit(f"E.{of}.wait(C, {left}, {g.lanes()}{', True' if reads else ''})")
        return True
    return False


def _without_policy(g: Generator, ins: Instruction) -> list[Operand]:
    """Removes cache hints; returns the operands other than the cache policy."""
    return ins.operands[:-1] if take_hints(g) else ins.operands


def _source_bytes(g: Generator, operand: Operand, size: int) -> str:
    """The source size operand, or the predicate that ignores the source."""
    if isinstance(operand, Reg) and g.program.dtype[operand.index] == "b1":
        return f"where({g.read(operand, 'b1')}, 0, {size})"
    number = as_immediate(operand)
    return str(number) if number is not None else f"{g.read(operand, 'u4')}.astype(i8)"


def bulk(g: Generator, ins: Instruction) -> None:
    """Emits cp.async.bulk in all forms; the modifiers async and bulk are already consumed."""
    mods = g.mods
    if _group(g, ins, "bulk"):
        return
    if mods.take("prefetch"):
        mods.left.clear()
        return
    operation = mods.take(*_REDUCTIONS) if mods.take("reduce") else ""
    operands = _without_policy(g, ins)
    mask = "None"
    if mods.take("multicast::cluster"):
        mask = f"{g.read(operands[-1], 'u2')}.astype(i8)"
        operands = operands[:-1]
    into = bool(mods.take("mbarrier::complete_tx::bytes"))
    if not into and not mods.take("bulk_group"):
        raise g.unknown("a bulk copy without mbarrier or group")
    spaces = [m for m in mods.left if m.split("::")[0] in ("shared", "global")]
    for space in spaces:
        mods.take(space)
    wanted = (("shared::cluster", "global"), ("shared::cta", "global"))
    if tuple(spaces) not in (wanted if into else (("global", "shared::cta"),)):
        raise g.unknown("a bulk copy between these state spaces")
    if mods.take("tensor"):
        _tensor(g, operands, into, operation, mask)
    else:
        _plain(g, operands, into, operation, mask)


def _tensor(g: Generator, operands: list[Operand], into: bool, operation: str, mask: str) -> None:
    mods = g.mods
    rank = mods.take("1d", "2d", "3d", "4d", "5d")
    mods.take("tile")
    if len(operands) != (3 if into else 2):
        raise g.unknown("im2col copies, or masks of blocks")
    tensor, shared = (operands[1], operands[0]) if into else (operands[0], operands[1])
    if not isinstance(tensor, Mem) or len(tensor.coordinates) != int(rank[:1] or 0):
        raise g.unknown("a number of coordinates that differs from its dimension")
    at = address(g, shared, "shared")
    tensor_map = address(g, tensor, "")
    if isinstance(tensor.base, Sym):
        tensor_map = f"({tensor_map} + {PARAM_WINDOW})"
    barrier = address(g, operands[2], "shared") if into else "None"
    coordinates = "".join(g.read(c, "i4") + ", " for c in tensor.coordinates)
    g.require_defined()
    g.emit(
        f"E.bulk.tensor(C, {g.lanes()}, {g.pc}, {at}, {tensor_map}, ({coordinates}), {barrier}, "
        f"({operation or None!r}, {mask}))"
    )


@instruction(
    "tensormap",
    unit="move",
    result=False,
    width=lambda ins: Width.WHOLE_WARP if "cp_fenceproxy" in ins.mods else Width.THREAD,
    accesses=lambda ins: (4, 4),
)
def emit_tensor_map(g: Generator, ins: Instruction) -> None:
    """tensormap.replace and tensormap.cp_fenceproxy."""
    mods = g.mods
    if mods.take("cp_fenceproxy"):
        words = ("global", "shared::cta", "tensormap::generic", "release", "gpu", "sync", "aligned")
        if not all(mods.take(word) for word in words) or as_immediate(ins.operands[2]) != 128:
            raise g.unknown("this form")
        to, source = address(g, ins.operands[0], "global"), address(g, ins.operands[1], "shared")
        g.require_defined()
        g.emit(f"E.maps.copy(C, {to}, {source}, {g.pc})")
        return
    if not mods.take("replace") or not mods.take("tile") or not mods.take("b1024"):
        raise g.unknown()
    field, kind = mods.take(*FIELDS), mods.take("b32", "b64")
    space = space_of(g)
    memory, *values = ins.operands
    if not field or not kind or FIELDS[field][1] != int(kind[1:]) // 8:
        raise g.unknown("this field with this type")
    if space == "" or len(values) != (2 if FIELDS[field][2] > 1 else 1):
        raise g.unknown("a generic address, or these operands")
    index = as_immediate(values[0]) if len(values) > 1 else 0
    if index is None:
        raise g.unknown("a computed entry of the field")
    where = address(g, memory, space)
    value = g.read(values[-1], "u8" if kind == "b64" else "u4")
    g.require_defined()
    place, entry = f"({space!r}, {where})", f"({field!r}, {index})"
    g.emit(f"E.maps.replace(C, {place}, {entry}, {value}, {g.lanes()}, {g.pc})")


def _plain(g: Generator, operands: list[Operand], into: bool, operation: str, mask: str) -> None:
    kind = g.mods.take(*_TYPES)
    g.mods.take("noftz")
    if bool(kind) != bool(operation) or len(operands) != (4 if into else 3):
        raise g.unknown("with these operands")
    to, source, size = operands[:3]
    shared, device = (to, source) if into else (source, to)
    at, other = address(g, shared, "shared"), address(g, device, "global")
    count = f"{g.read(size, 'u4')}.astype(i8)"
    barrier = address(g, operands[3], "shared") if into else "None"
    reduction = (operation, kind) if operation else None
    g.require_defined()
    g.emit(
        f"E.bulk.plain(C, {g.lanes()}, {g.pc}, {at}, {other}, {count}, {barrier}, "
        f"({reduction!r}, {mask}))"
    )
