"""Barriers of a block or a cluster, mbarriers and fences."""

from __future__ import annotations

from ptx_emulator.isa.generator import Generator, instruction
from ptx_emulator.isa.memory import address
from ptx_emulator.ptx.instructions import Width
from ptx_emulator.ptx.syntax import Imm, Instruction, Mem, Operand, Reg, Sym
from ptx_emulator.state.memory import SHARED_WINDOW

_MBARRIER_ACTIONS = ("arrive", "arrive_drop", "test_wait", "try_wait", "init", "inval")
_BYTES = ("expect_tx", "complete_tx")
_RESULTS = ("arrive", "arrive_drop", "test_wait", "try_wait", "pending_count")


def uniform(g: Generator, operand: Operand) -> str:
    """A value that is the same in all lanes of a warp, as int64."""
    if isinstance(operand, Imm):
        return str(operand.value)
    return f"uniform_value({g.read(operand, 'u4')}, C)"


@instruction(
    "bar",
    "barrier",
    unit="barrier",
    result=lambda ins: "red" in ins.mods,
    width=lambda ins: Width.WARP if "warp" in ins.mods else Width.BLOCK,
)
def emit_barrier(g: Generator, ins: Instruction) -> None:
    mods = g.mods
    if mods.take("warp"):
        mods.take("sync")
        g.require_defined()  # bar.warp.sync: the cohort has already waited for its lanes
        return
    if mods.take("cluster"):
        cluster_barrier(g)
        return
    mods.take("cta")
    mods.take("aligned")
    action = mods.take("sync", "arrive", "red")
    if not action:
        raise g.unknown()
    vote, result, operands = "None", "None", list(ins.operands)
    if action == "red":
        operation = mods.take("popc", "and", "or")
        kind = mods.take("u32", "pred")
        to = operands.pop(0)
        if not isinstance(to, Reg):
            raise g.unknown()
        vote = g.let(g.read(operands.pop(), "b1"))
        dtype = g.program.dtype[to.index]
        if kind == "u32" and dtype not in ("u4", "i4"):
            raise g.unknown("the dtype of the result")
        result = f"({to.index}, {operation!r}, {dtype!r})"
    number = g.let(uniform(g, operands[0]))
    count = g.let(uniform(g, operands[1])) if len(operands) > 1 else "0"
    g.require_defined()
    if g.masked:
        g.finish(g.pc, g.pc + 1)  # a cohort that waits for its warp executes this instruction again
        g.emit(f"if E.wait_for_warp(C, None, {g.pc}): return True")
    else:
        g.finish(g.pc + 1)
    g.emit(
        f"E.barriers.arrive(C, {number}, {count}, {action != 'arrive'}, {g.pc}, {vote}, {result})"
    )
    g.ended = True


def cluster_barrier(g: Generator) -> None:
    """barrier.cluster.arrive and .wait."""
    mods = g.mods
    action = mods.take("arrive", "wait")
    mods.take("release", "relaxed", "acquire")
    mods.take("aligned")
    if not action:
        raise g.unknown()
    g.finish(g.pc + 1)
    if g.masked:
        g.emit(f"if E.wait_for_warp(C, None, {g.pc}): return True")
    g.emit(f"E.cluster.{action}(C, {g.pc})")
    g.ended = True


# ---- mbarriers


def place_of(g: Generator, operand: Operand) -> str:
    """The address of an mbarrier in the block's shared memory; its state space is optional."""
    if g.mods.take("shared", "shared::cta", "shared::cluster"):
        return address(g, operand, "shared")
    if isinstance(operand, Mem) and isinstance(operand.base, Sym):
        return address(g, operand, "shared")
    return f"({address(g, operand, '')} - {SHARED_WINDOW})"


@instruction(
    "mbarrier",
    unit="barrier",
    result=lambda ins: not set(ins.mods).isdisjoint(_RESULTS),
    starts_segment=lambda ins: "try_wait" in ins.mods,
    accesses=lambda ins: (8, 16),
    asynchronous=True,
)
def emit_mbarrier(g: Generator, ins: Instruction) -> None:
    mods = g.mods
    if mods.take("pending_count"):
        if not mods.take("b64"):
            raise g.unknown()
        state = g.read(ins.operands[1], "u8")
        g.write(ins.operands[0], f"({state} >> {g.literal(32, 'u8')}).astype(u4)", "u4")
        return
    action = mods.take(*_MBARRIER_ACTIONS) or mods.take(*_BYTES)
    if not action or not mods.take("b64"):
        raise g.unknown()
    order = mods.take("release", "acquire", "relaxed")
    mods.take("cta", "cluster")
    operands = list(ins.operands)
    if action in ("init", "inval", *_BYTES):
        where = place_of(g, operands[0])
        number = g.read(operands[1], "u4") if len(operands) > 1 else ""
        g.require_defined()
        if action in _BYTES:
            size = f"{'-' if action == 'complete_tx' else ''}{number}.astype(i8)"
            g.emit(f"E.mbarriers.expect(C, {where}, {size}, {g.lanes()}, {g.pc})")
        else:
            count = f"{number}, " if action == "init" else ""
            g.emit(f"E.mbarriers.{action}(C, {where}, {count}{g.lanes()}, {g.pc})")
    elif action in ("test_wait", "try_wait"):
        _wait(g, operands, action == "try_wait")
    else:
        words = {
            "relaxed": order == "relaxed",
            "drop": action == "arrive_drop",
            "noComplete": bool(mods.take("noComplete")),
        }
        _arrive(g, operands, tuple(word for word, present in words.items() if present))


def _wait(g: Generator, operands: list[Operand], blocks: bool) -> None:
    parity = bool(g.mods.take("parity"))
    where = place_of(g, operands[1])
    phase = g.read(operands[2], "u4" if parity else "u8")
    g.require_defined()
    repeats = g.program.repeats
    if g.check and g.pc in repeats.ignored:
        g.emit(f"E.mbarriers.ignored(C, {g.lanes()}, {g.pc})")
    # Without a loop around it, a thread may go on before the phase completes.
    blocks = blocks and g.pc in repeats.endless
    done = g.let(f"E.mbarriers.wait(C, {where}, {phase}, {g.lanes()}, {g.pc}, {parity}, {blocks})")
    if blocks:
        g.emit(f"if {done} is None: return True")
    g.write(operands[0], done, "b1")


def _arrive(g: Generator, operands: list[Operand], modifiers: tuple[str, ...]) -> None:
    expects = g.mods.take("expect_tx")
    to = None if isinstance(operands[0], Mem) else operands.pop(0)
    where = place_of(g, operands[0])
    given = g.read(operands[1], "u4") if len(operands) > 1 else ""
    count = given if given and not expects else "1"
    g.require_defined()
    options = f", expects={given}" if expects else ""
    options += f", modifiers={modifiers}" if modifiers else ""
    call = f"E.mbarriers.arrive(C, {where}, {count}, {g.lanes()}, {g.pc}{options})"
    if isinstance(to, Reg):
        g.write(to, g.let(call), "u8")
    else:
        g.emit(call)


# ---- fences


@instruction("membar", "fence", unit="barrier", result=False)
def emit_fence(g: Generator, ins: Instruction) -> None:
    scope = g.mods.take("cta", "gl", "sys", "gpu", "cluster")
    kind = g.mods.take("sc", "acq_rel", "acquire", "release")
    if g.mods.take("mbarrier_init"):
        g.emit(f"E.mbarriers.fence_init(C, {g.lanes()})")
        return
    if g.mods.take("proxy"):
        fence_proxy(g, ins)
        return
    if scope:
        sequential = kind == "sc" or ins.op == "membar"
        g.emit(f"E.fence(C, {scope != 'cta'}, {sequential})")


def fence_proxy(g: Generator, ins: Instruction) -> None:
    if g.mods.take("alias"):
        return
    if g.mods.take("tensormap::generic"):
        if ins.operands:  # of acquire: the map and its size
            where = address(g, ins.operands[0], "")
            g.require_defined()
            g.emit(f"E.maps.fence(C, {where}, {g.lanes()})")
        else:
            g.emit("E.fence(C, True)")
        return
    if not g.mods.take("async"):
        raise g.unknown("a fence of this proxy")
    # Which proxy wrote global memory is not tracked.
    if not g.mods.take("global"):
        g.mods.take("shared::cta", "shared::cluster")
        g.emit(f"E.fence_proxy(C, {g.lanes()})")
