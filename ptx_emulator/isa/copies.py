"""cp.async, cp.async.bulk and cp.reduce.async.bulk, with tensor maps and without; tensormap."""

from __future__ import annotations

from ptx_emulator.isa.generator import Generator, instruction
from ptx_emulator.isa.memory import address, shared_address, space_of, take_hints
from ptx_emulator.ptx.instructions import Width, as_immediate
from ptx_emulator.ptx.syntax import Instruction, Mem, Operand, Reg, Sym
from ptx_emulator.state.memory import PARAM_WINDOW

# Of each field of tensormap.replace: its offset, the bytes of one entry, and how many there are.
# Maps have no place for element strides, which are all 1.
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
    "element_stride": (0, 4, 5),
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
    g.need("async")
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
    small = g.one_of("ca", "cg")
    g.one_of("shared", "shared::cta")
    g.need("global")
    operands = _without_policy(g, ins)
    size = g.immediate(operands[2], "a size")
    g.refuse_if(size not in ((16,) if small == "cg" else (4, 8, 16)), "this copy size")
    to = address(g, operands[0], "shared")
    source = address(g, operands[1], "global")
    read = _source_bytes(g, operands[3], size) if len(operands) > 3 else size
    g.emit(f"E.copies.issue({g.checked_execution()}, {to}, {source}, {size}, {read})")


def _arrive(g: Generator, ins: Instruction) -> None:
    """cp.async.mbarrier.arrive: an arrival when the earlier copies of the thread are complete."""
    g.need("arrive", "b64")
    counted = bool(g.mods.take("noinc"))
    address_text = shared_address(g, ins.operands[0])
    g.emit(f"E.copies.arrive({g.checked_execution()}, {address_text}, {counted})")


def _group(g: Generator, ins: Instruction, copies: str) -> bool:
    """Emits commit_group or wait_group of the copies ``E.copies`` or ``E.bulk``, if it is one."""
    if g.mods.take("commit_group"):
        g.emit(f"E.{copies}.commit(C, {g.lanes()})")
        return True
    if g.mods.take("wait_group"):
        reads = copies == "bulk" and g.mods.take("read")
        left = g.immediate(ins.operands[0], "a number of groups")
        g.emit(f"E.{copies}.wait(C, {left}, {g.lanes()}{', True' if reads else ''})")
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
        _prefetch(g, _without_policy(g, ins))
        return
    operation = mods.take(*_REDUCTIONS) if mods.take("reduce") else ""
    operands = _without_policy(g, ins)
    mask = "None"
    if mods.take("multicast::cluster"):
        mask = f"{g.read(operands[-1], 'u2')}.astype(i8)"
        operands = operands[:-1]
    into = bool(mods.take("mbarrier::complete_tx::bytes"))
    g.refuse_if(not into and not mods.take("bulk_group"), "a bulk copy without mbarrier or group")
    spaces = [m for m in mods.left if m.split("::")[0] in ("shared", "global")]
    for space in spaces:
        mods.take(space)
    wanted = (("shared::cluster", "global"), ("shared::cta", "global"))
    if into and tuple(spaces) == ("shared::cluster", "shared::cta"):
        _between_blocks(g, operands, operation, mask)
        return
    if tuple(spaces) not in (wanted if into else (("global", "shared::cta"),)):
        raise g.unknown("a bulk copy between these state spaces")
    if mods.take("tensor"):
        _tensor(g, operands, into, operation, mask)
    else:
        _plain(g, operands, into, operation, mask)


def _between_blocks(g: Generator, operands: list[Operand], operation: str, mask: str) -> None:
    """A copy from shared memory of the block to that of another one of its cluster."""
    g.refuse_if(operation, "a bulk reduction in shared memory")
    g.refuse_if(mask != "None" or len(operands) != 4, "with these operands")
    to, source, barrier = (address(g, operands[index], "shared") for index in (0, 1, 3))
    count = f"{g.read(operands[2], 'u4')}.astype(i8)"
    g.emit(f"E.bulk.between_blocks({g.checked_execution()}, {to}, {source}, {barrier}, {count})")


def _prefetch(g: Generator, operands: list[Operand]) -> None:
    """A copy of global memory into L2: it has no effect, but its operands are checked."""
    g.need("L2", "global")
    if g.mods.take("tensor"):
        g.refuse_if(len(operands) != 1, "im2col copies")
        tensor_map, coordinates = _box_in_tensor(g, operands[0])
        g.emit(f"E.bulk.prefetch_tensor({g.checked_execution()}, {tensor_map}, ({coordinates}))")
        return
    source, size = operands
    count = f"{g.read(size, 'u4')}.astype(i8)"
    g.emit(f"E.bulk.prefetch({g.checked_execution()}, {address(g, source, 'global')}, {count})")


def _box_in_tensor(g: Generator, tensor: Operand) -> tuple[str, str]:
    """The address of a tensor map, and the coordinates of a box."""
    rank = g.mods.take("1d", "2d", "3d", "4d", "5d")
    g.mods.take("tile")
    if not isinstance(tensor, Mem) or len(tensor.coordinates) != int(rank[:1] or 0):
        raise g.unknown("a number of coordinates that differs from its dimension")
    tensor_map = address(g, tensor, "")
    if isinstance(tensor.base, Sym):
        tensor_map = f"({tensor_map} + {PARAM_WINDOW})"
    return tensor_map, "".join(g.read(c, "i4") + ", " for c in tensor.coordinates)


def _tensor(g: Generator, operands: list[Operand], into: bool, operation: str, mask: str) -> None:
    g.refuse_if(len(operands) != (3 if into else 2), "im2col copies, or masks of blocks")
    tensor, shared = (operands[1], operands[0]) if into else (operands[0], operands[1])
    tensor_map, coordinates = _box_in_tensor(g, tensor)
    offset = address(g, shared, "shared")
    barrier = address(g, operands[2], "shared") if into else "None"
    arguments = f"{offset}, {tensor_map}, {barrier}, {mask}, ({coordinates})"
    g.emit(f"E.bulk.tensor({g.checked_execution()}, {arguments}, {operation or None!r})")


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
        g.need(*words)
        g.refuse_if(as_immediate(ins.operands[2]) != 128, "another size than 128")
        to, source = address(g, ins.operands[0], "global"), address(g, ins.operands[1], "shared")
        g.emit(f"E.maps.copy({g.checked_execution()}, {to}, {source})")
        return
    g.need("replace", "tile", "b1024")
    field, kind = g.one_of(*FIELDS), g.one_of("b32", "b64")
    space = space_of(g)
    memory, *values = ins.operands
    g.refuse_if(FIELDS[field][1] != int(kind[1:]) // 8, "this field with this type")
    if space == "" or len(values) != (2 if FIELDS[field][2] > 1 else 1):
        raise g.unknown("a generic address, or these operands")
    index = g.immediate(values[0], "an entry of the field") if len(values) > 1 else 0
    address_text = address(g, memory, space)
    value = g.read(values[-1], "u8" if kind == "b64" else "u4")
    location, entry = f"({space!r}, {address_text})", f"({field!r}, {index})"
    g.emit(f"E.maps.replace({g.checked_execution()}, {location}, {entry}, {value})")


def _plain(g: Generator, operands: list[Operand], into: bool, operation: str, mask: str) -> None:
    kind = g.mods.take(*_TYPES)
    g.mods.take("noftz")
    if bool(kind) != bool(operation) or len(operands) != (4 if into else 3):
        raise g.unknown("with these operands")
    to, source, size = operands[:3]
    shared, device = (to, source) if into else (source, to)
    offset, other = address(g, shared, "shared"), address(g, device, "global")
    count = f"{g.read(size, 'u4')}.astype(i8)"
    barrier = address(g, operands[3], "shared") if into else "None"
    reduction = (operation, kind) if operation else None
    arguments = f"{offset}, {other}, {barrier}, {mask}, {count}"
    g.emit(f"E.bulk.plain({g.checked_execution()}, {arguments}, {reduction!r})")
