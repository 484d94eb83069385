"""Branches, exits, traps and calls."""

from __future__ import annotations

from ptx_emulator.errors import Trapped
from ptx_emulator.isa.generator import Generator, instruction
from ptx_emulator.ptx.syntax import Instruction, LabelRef, Sym
from ptx_emulator.state.wave import Execution


def raise_trap(execution: Execution, what: str) -> None:
    if execution.active.any():
        numbers = "a GPU stops the program here as well"
        way_out = "find out why the kernel takes this branch"
        execution.machine.fail(Trapped, what, execution.first(), numbers, way_out)


def guard_of(g: Generator, ins: Instruction) -> str:
    """The guard as an expression, '' when there is none."""
    if ins.guard is None:
        return ""
    value = g.read(ins.guard, "b1")
    g.require_defined()
    # Read before the registers are stored back: the guard may not be live afterwards.
    return g.let(f"~{value}" if ins.guard_negated else value)


@instruction("bra", unit="control", result=False, branches=True)
def emit_branch(g: Generator, ins: Instruction) -> None:
    g.mods.take("uni")
    target = ins.operands[0]
    assert isinstance(target, LabelRef)
    guard = guard_of(g, ins)
    if guard:
        g.finish(target.target, g.pc + 1)
        g.emit(f"E.branch(C, {guard}, {target.target}, {g.pc + 1})")
    else:
        g.finish(target.target)
        g.emit(f"C.pc = {target.target}")
    g.ended = True


@instruction("brx", unit="control", result=False, branches=True)
def emit_branch_indexed(g: Generator, ins: Instruction) -> None:
    g.mods.take("idx")
    g.mods.take("uni")
    table = ins.operands[1]
    if ins.guard is not None or not isinstance(table, Sym):
        raise g.unknown("a guarded or computed table")
    targets = g.program.branch_targets[table.name]
    index = g.let(f"{g.read(ins.operands[0], 'u4')}.astype(i8)")
    g.require_defined()
    g.finish(*targets)
    g.emit(f"E.branch_table(C, {index}, {targets!r}, {g.pc})")
    g.ended = True


@instruction("exit", "ret", unit="control", result=False, branches=True)
def emit_leave(g: Generator, ins: Instruction) -> None:
    g.mods.take("uni")
    guard = guard_of(g, ins)
    g.finish(g.pc + 1)
    g.emit(f"E.exit(C, {guard or None}, {g.pc + 1})")
    g.ended = True


@instruction("trap", "brkpt", unit="control", result=False, branches=True)
def emit_trap(g: Generator, ins: Instruction) -> None:
    g.emit(f"raise_trap({g.checked_execution()}, 'the kernel executed {ins.op}')")


@instruction("call", unit="control", result=False)
def emit_call(g: Generator, ins: Instruction) -> None:
    name = next((o.name for o in ins.operands if isinstance(o, Sym)), "")
    if name == "__assertfail":
        g.mods.left.clear()
        g.emit(f"raise_trap({g.checked_execution()}, 'a device-side assert failed')")
        return
    if not name:
        what = "a call through a pointer, recursive or of no function of the module"
        raise g.unknown(what, "write a recursion as a loop, and call functions of the module")
    what = f"a call of the external function {name}"
    raise g.unknown(what, "call functions of the module, printf and assert alone")


@instruction("call_of_nothing", unit="control", result=False, branches=True)
def emit_call_of_nothing(g: Generator, ins: Instruction) -> None:
    """The end of the comparisons of a call through a pointer, see `ptx.flatten`."""
    what = "a call through a pointer that points to no function with these parameters"
    g.emit(f"raise_trap({g.checked_execution()}, {what!r})")


@instruction("nanosleep", unit="control", result=False, ends_segment=True)
def emit_sleep(g: Generator, ins: Instruction) -> None:
    g.mods.type()


@instruction(
    "griddepcontrol",
    unit="control",
    result=False,
    starts_segment=lambda ins: "wait" in ins.mods,
)
def emit_dependent_launch(g: Generator, ins: Instruction) -> None:
    """Without effect in a launch that does not overlap the one before it."""
    if g.one_of("wait", "launch_dependents") == "wait":
        g.emit(f"if E.dependent and E.dependent.wait({g.checked_execution()}): return True")
    else:
        g.emit("if E.dependent: E.dependent.start_dependents(C)")
