"""Barriers of a block or a cluster, mbarriers and fences."""

from __future__ import annotations

from ptx_emulator.isa.generator import Generator, instruction
from ptx_emulator.isa.memory import address, shared_address
from ptx_emulator.ptx.instructions import Width, as_immediate
from ptx_emulator.ptx.syntax import Imm, Instruction, Mem, Operand, Reg

_MBARRIER_ACTIONS = ("arrive", "arrive_drop", "test_wait", "try_wait", "init", "inval")
_BYTES = ("expect_tx", "complete_tx")
_RESULTS = ("arrive", "arrive_drop", "test_wait", "try_wait", "pending_count")


def uniform(g: Generator, operand: Operand) -> str:
    """A number or count of a barrier as int64: one for each warp, whose lanes must agree."""
    if isinstance(operand, Imm):
        return str(operand.value)
    return f"E.barriers.uniform({g.execution()}, {g.let(g.read(operand, 'u4'))})"


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
    action = g.one_of("sync", "arrive", "red")
    votes, operands, to = "", list(ins.operands), None
    if action == "red":
        operation = mods.take("popc", "and", "or")
        kind = mods.take("u32", "pred")
        to = operands.pop(0)
        if not isinstance(to, Reg):
            raise g.unknown("a result that is not a register")
        vote = g.let(g.read(operands.pop(), "b1"))
        dtype = g.program.dtype[to.index]
        g.refuse_if(kind == "u32" and dtype not in ("u4", "i4"), "the dtype of the result")
        votes = f", ({vote}, ({to.index}, {operation!r}, {dtype!r}))"
    g.refuse_if(action == "arrive" and len(operands) < 2, "no count of threads")
    number = g.let(uniform(g, operands[0]))
    count = g.let(uniform(g, operands[1])) if len(operands) > 1 else "0"
    g.require_defined()
    if isinstance(to, Reg):  # `Barriers` writes its value
        g.set_defined(to.index)
    if g.masked:
        g.finish(g.pc, g.pc + 1)  # a cohort that waits for its warp executes this instruction again
        g.emit(f"if E.wait_for_warp(C, None, {g.pc}): return True")
    else:
        g.finish(g.pc + 1)
    arguments = f"{number}, {count}, {action != 'arrive'}{votes}"
    g.emit(f"E.barriers.arrive({g.checked_execution()}, {arguments})")
    g.ended = True


def cluster_barrier(g: Generator) -> None:
    """barrier.cluster.arrive and .wait."""
    mods = g.mods
    action = g.one_of("arrive", "wait")
    relaxed = mods.take("release", "relaxed", "acquire") == "relaxed"
    mods.take("aligned")
    g.finish(g.pc + 1)
    if g.masked:
        g.emit(f"if E.wait_for_warp(C, None, {g.pc}): return True")
    g.emit(f"E.cluster.{action}(C, {g.pc}{', True' if relaxed else ''})")
    g.ended = True


# ---- mbarriers


@instruction(
    "mbarrier",
    unit="barrier",
    result=lambda ins: not set(ins.mods).isdisjoint(_RESULTS),
    starts_segment=lambda ins: not {"try_wait", "test_wait"}.isdisjoint(ins.mods),
    accesses=lambda ins: (8, 16),
    asynchronous=True,
)
def emit_mbarrier(g: Generator, ins: Instruction) -> None:
    mods = g.mods
    g.need("b64")
    if mods.take("pending_count"):
        state = g.read(ins.operands[1], "u8")
        g.write(ins.operands[0], f"({state} >> {g.literal(32, 'u8')}).astype(u4)", "u4")
        return
    action = mods.take(*_MBARRIER_ACTIONS) or g.one_of(*_BYTES)
    order = mods.take("release", "acquire", "relaxed")
    mods.take("cta", "cluster")
    operands = list(ins.operands)
    local = action in ("init", "inval", "test_wait", "try_wait")
    g.refuse_if(local and "shared::cluster" in mods.left, "an mbarrier of another block")
    if action in ("init", "inval", *_BYTES):
        address_text = shared_address(g, operands[0])
        number = "" if action == "inval" else g.read(operands[1], "u4")
        if action in _BYTES:
            size = f"{'-' if action == 'complete_tx' else ''}{number}.astype(i8)"
            g.emit(f"E.mbarriers.expect({g.checked_execution()}, {address_text}, {size})")
        else:
            count = f", {number}" if action == "init" else ""
            g.emit(f"E.mbarriers.{action}({g.checked_execution()}, {address_text}{count})")
    elif action in ("test_wait", "try_wait"):
        _wait(g, operands, order == "relaxed")
    else:
        drop = "drop" if action == "arrive_drop" else ""
        _arrive(g, operands, f"{order} {drop} {mods.take('noComplete')}")


def _wait(g: Generator, operands: list[Operand], relaxed: bool) -> None:
    parity = bool(g.mods.take("parity"))
    address_text = shared_address(g, operands[1])
    g.refuse_if(parity and as_immediate(operands[2]) not in (None, 0, 1), "this parity")
    phase = g.read(operands[2], "u4" if parity else "u8")
    repeats = g.program.repeats
    if g.check and g.pc in repeats.ignored:
        g.emit(f"E.mbarriers.ignored({g.checked_execution()})")
    # Without a loop around it, a thread may go on before the phase completes. In a loop that does
    # nothing else, waiting is as good as testing again and again.
    blocks = g.pc in repeats.idle
    modes = f"{parity}, {blocks}, {relaxed}"
    done = g.let(f"E.mbarriers.wait({g.checked_execution()}, {address_text}, {phase}, {modes})")
    if blocks:
        g.emit(f"if {done} is None: return True")
    g.write(operands[0], done, "b1")


def _arrive(g: Generator, operands: list[Operand], modifiers: str) -> None:
    expects = g.mods.take("expect_tx")
    to = None if isinstance(operands[0], Mem) else operands.pop(0)
    far = "shared::cluster" in g.mods.left and isinstance(to, Reg)
    g.refuse_if(far, "a state of an mbarrier of another block")
    g.refuse_if("noComplete" in modifiers and len(operands) < 2, "no count")
    address_text = shared_address(g, operands[0])
    number = g.read(operands[1], "u4") if len(operands) > 1 else ""
    count = number if number and not expects else "1"
    expected = f", {number}" if expects else ""
    arguments = f"{address_text}, {count}, {modifiers!r}{expected}"
    call = f"E.mbarriers.arrive({g.checked_execution()}, {arguments})"
    if isinstance(to, Reg):
        g.write(to, g.let(call), "u8")
    else:
        g.emit(call)


# ---- fences


@instruction("membar", "fence", unit="barrier", result=False)
def emit_fence(g: Generator, ins: Instruction) -> None:
    scope = g.mods.take("cta", "gl", "sys", "gpu", "cluster")
    kind = g.mods.take("sc", "acq_rel", "acquire", "release")
    # Restricts a fence to what lies in shared memory, which orders no less there.
    restricted = g.mods.take("sync_restrict::shared::cta", "sync_restrict::shared::cluster")
    g.refuse_if(
        restricted and (scope, kind) not in (("cluster", "acquire"), ("cluster", "release")),
        f".{restricted} of this fence",
    )
    if g.mods.take("mbarrier_init"):
        g.emit(f"E.mbarriers.fence_init(C, {g.lanes()})")
        return
    if g.mods.take("proxy"):
        fence_proxy(g, ins, bool(restricted))
        return
    g.refuse_if(not scope, "no scope")
    sequential = kind == "sc" or ins.op == "membar"
    g.emit(f"E.fence(C, {scope not in ('cta', 'cluster')}, {sequential})")


def fence_proxy(g: Generator, ins: Instruction, only_shared: bool) -> None:
    if g.mods.take("alias"):
        return
    if g.mods.take("tensormap::generic"):
        if ins.operands:  # of acquire: the map and its size
            address_text = address(g, ins.operands[0], "")
            g.emit(f"E.maps.fence({g.checked_execution()}, {address_text})")
        else:
            g.emit("E.fence(C, True)")
        return
    # From the generic proxy to the asynchronous one; without ::generic also back.
    g.refuse_if(not g.mods.take("async", "async::generic"), "a fence of this proxy")
    space = g.mods.take("global", "shared::cta", "shared::cluster").split("::")[0]
    g.emit(f"E.fence_proxy(C, {g.lanes()}, {'shared' if only_shared else space!r})")
