"""Emitters of mma, ldmatrix, stmatrix and movmatrix.

mma.sync with float32 accumulators is not executed where it stands: it is remembered, and all that
are pending are executed when one of their results is read (or the segment ends). Then chains that
accumulate into the same registers, and tiles that share operands, have become one matrix product.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from flashgen.emulator import tensor  # noqa: F401  (registers the run-time functions)
from flashgen.emulator.codegen import Generator
from flashgen.emulator.emit_memory import address, space_of
from flashgen.emulator.ptx import Instruction, Operand, Reg
from flashgen.emulator.registry import emits, items_of

# (shape, operand type) -> chunks of 16 bytes along k
_DEPTH = {
    ("m16n8k16", "f16"): 2,
    ("m16n8k8", "f16"): 1,
    ("m16n8k16", "bf16"): 2,
    ("m16n8k8", "bf16"): 1,
    ("m16n8k8", "tf32"): 2,
    ("m16n8k4", "tf32"): 1,
    ("m16n8k32", "s8"): 2,
    ("m16n8k32", "u8"): 2,
    ("m16n8k16", "s8"): 1,
    ("m16n8k16", "u8"): 1,
}


@dataclass
class Product:
    """An mma that waits for somebody to read its result; fields are names of locals."""

    kind: str
    depth: int
    a: tuple[str, ...]
    b: tuple[str, ...]
    c: tuple[str, ...]
    d: tuple[str, ...]


@emits("mma")
def multiply(g: Generator, ins: Instruction) -> None:
    mods = g.mods
    if not mods.take("sync") or not mods.take("aligned"):
        raise g.unknown("mma without .sync.aligned")
    shape = next((m for m in mods.left if m.startswith("m") and "n" in m), "")
    mods.take(shape)
    if mods.take("row", "col") != "row" or not mods.take("col"):
        raise g.unknown("layouts other than .row.col")
    if g.guard:
        raise g.unknown("a guarded mma")
    types = list(mods.left)
    if len(types) != 4:
        raise g.unknown("sparse, block-scaled or saturating forms")
    mods.left.clear()
    d_type, a_type, b_type, c_type = types
    depth = _DEPTH.get((shape, a_type))
    if depth is None or _DEPTH.get((shape, b_type)) is None or d_type != c_type:
        raise g.unknown("this shape with these types")
    to, a_items, b_items, c_items = (items_of(o) for o in ins.operands)
    a = _operands(g, a_items, 2 * depth)
    b = _operands(g, b_items, depth)
    if a_type in ("s8", "u8"):
        c = [g.read(o, "i4") for o in c_items]
        g.demand()
        kinds = repr((a_type, b_type))
        out = g.let(
            f"mma_integer(C, {kinds}, {depth}, {tuple_of(a)}, {tuple_of(b)}, {tuple_of(c)})"
        )
        for place, item in enumerate(to):
            g.write(item, f"{out}[{place}]", "i4")
        return
    if a_type != b_type:
        raise g.unknown("mixed operand types")
    if d_type == "f16":
        if a_type != "f16":
            raise g.unknown("this accumulator")
        c = [g.read(o, "u4") for o in c_items]
        g.demand()
        args = f"{tuple_of(a)}, {tuple_of(b)}, {tuple_of(c)}"
        out = g.let(f"mma_half(C, {a_type!r}, {depth}, {args})")
        for place, item in enumerate(to):
            g.write(item, f"{out}[{place}]", "u4")
        return
    if d_type != "f32":
        raise g.unknown("this accumulator")
    _defer(g, a_type, depth, a, b, c_items, to)


def _operands(g: Generator, items: tuple[Operand, ...], count: int) -> list[str]:
    if len(items) != count:
        raise g.unknown("a fragment of another size")
    return [local_of(g, g.read(o, "u4")) for o in items]


def local_of(g: Generator, expression: str) -> str:
    return expression if expression.isidentifier() else g.let(expression)


def tuple_of(names: list[str] | tuple[str, ...]) -> str:
    return "(" + ", ".join(names) + ",)"


def _defer(
    g: Generator,
    kind: str,
    depth: int,
    a: list[str],
    b: list[str],
    c_items: tuple[Operand, ...],
    to: tuple[Operand, ...],
) -> None:
    c = []
    for operand in c_items:
        pending = g.names.get(operand.index) if isinstance(operand, Reg) else None
        if pending in g.pending_names and isinstance(operand, Reg):
            g.note_definedness(operand.index)
            c.append(str(pending))
        else:
            c.append(local_of(g, g.read(operand, "f4")))
    g.demand()
    # Reading c may have flushed what was pending; the names read before stay valid.
    order = [2 * k + half for k in range(depth) for half in range(2)]
    d = tuple(g.fresh() for _ in to)
    g.pending.append(Product(kind, depth, tuple(a[i] for i in order), tuple(b), tuple(c), d))
    later = []
    for operand, name in zip(to, d, strict=True):
        if not isinstance(operand, Reg):
            raise g.unknown("a result that is not a register")
        if g.program.dtype[operand.index] == "f4":
            g.names[operand.index] = name
            if g.check and operand.index in g.program.tracked:
                g.set_definedness(operand.index, g.literal(1, "b1"))
        else:
            later.append((operand, name))
    g.pending_names.update(d)
    if later:
        flush_products(g, -1)
        for operand, name in later:
            g.write(operand, name, "f4")


def flush_products(g: Generator, live: int) -> None:
    """Emits the pending products; ``live`` says which registers somebody will still read."""
    pending, g.pending = g.pending, []
    g.pending_names = set()
    if not pending:
        return
    needed = {name for index, name in g.names.items() if live >> index & 1}
    # A sum that somebody else starts from as well cannot vanish inside a chain.
    uses = Counter(name for product in pending for name in product.c)
    needed |= {name for name, count in uses.items() if count > 1}
    chains: list[list[Product]] = []
    tail: dict[tuple[str, ...], int] = {}  # accumulator names -> chain that ends in them
    level_of_name: dict[str, int] = {}
    levels: list[int] = []
    for product in pending:
        at = tail.pop(product.c, None)
        joins = at is not None and not needed.intersection(product.c)
        if joins and at is not None and chains[at][0].kind == product.kind:
            chains[at].append(product)
        else:
            chains.append([product])
            levels.append(1 + max((level_of_name.get(name, -1) for name in product.c), default=-1))
            at = len(chains) - 1
        tail[product.d] = at
        for name in product.d:
            level_of_name[name] = levels[at]
    groups: dict[tuple[int, str, int], list[list[Product]]] = {}
    for chain, level in zip(chains, levels, strict=True):
        key = (level, chain[0].kind, sum(p.depth for p in chain))
        groups.setdefault(key, []).append(chain)
    for (_, kind, depth), members in sorted(groups.items()):
        for grid in _grids(members):
            _emit_grid(g, kind, depth, grid)


def _sequence(chain: list[Product], side: str) -> tuple[str, ...]:
    return tuple(name for p in chain for name in (p.a if side == "a" else p.b))


def _grids(chains: list[list[Product]]) -> list[list[list[list[Product]]]]:
    """Splits chains into grids [m][n] in which rows share A and columns share B."""
    rows: dict[tuple[str, ...], dict[tuple[str, ...], list[Product]]] = {}
    extra = []
    for chain in chains:
        row = rows.setdefault(_sequence(chain, "a"), {})
        column = _sequence(chain, "b")
        if column in row:
            extra.append([[chain]])
        else:
            row[column] = chain
    by_columns: dict[tuple[tuple[str, ...], ...], list[list[list[Product]]]] = {}
    for row in rows.values():
        columns = tuple(sorted(row))
        by_columns.setdefault(columns, []).append([row[c] for c in columns])
    return [*by_columns.values(), *extra]


def _emit_grid(g: Generator, kind: str, depth: int, grid: list[list[list[Product]]]) -> None:
    a = [name for row in grid for name in _sequence(row[0], "a")]
    b = [name for chain in grid[0] for name in _sequence(chain, "b")]
    c = [name for row in grid for chain in row for name in chain[0].c]
    d = [name for row in grid for chain in row for name in chain[-1].d]
    tiles = (len(grid), len(grid[0]), depth)
    args = f"{tuple_of(a)}, {tuple_of(b)}, {tuple_of(c)}"
    g.say(f"{', '.join(d)}, = mma_group(C, {kind!r}, {tiles}, {args})")


def _matrices(g: Generator) -> tuple[int, bool]:
    """Of ldmatrix and stmatrix: how many 8 x 8 matrices, and whether they are transposed."""
    mods = g.mods
    if not mods.take("sync") or not mods.take("aligned") or not mods.take("m8n8"):
        raise g.unknown("forms other than .sync.aligned.m8n8")
    count = int((mods.take("x1", "x2", "x4") or "x0")[1])
    transposed = bool(mods.take("trans"))
    if space_of(g) != "shared" or not mods.take("b16") or g.guard:
        raise g.unknown("another space, type, or a guard")
    return count, transposed


@emits("ldmatrix")
def load_matrix(g: Generator, ins: Instruction) -> None:
    count, transposed = _matrices(g)
    items = items_of(ins.operands[0])
    if len(items) != count:
        raise g.unknown("a result of another size")
    where = address(g, ins.operands[1], "shared")
    g.demand()
    value = g.let(f"load_matrix(E, C, {where}, {g.lanes()}, {count}, {transposed}, {g.pc})")
    for place, item in enumerate(items):
        g.write(item, f"{value}[:, {place}]", "u4")


@emits("stmatrix")
def store_matrix(g: Generator, ins: Instruction) -> None:
    count, transposed = _matrices(g)
    items = items_of(ins.operands[1])
    if len(items) != count:
        raise g.unknown("a source of another size")
    where = address(g, ins.operands[0], "shared")
    values = [local_of(g, g.read(item, "u4")) for item in items]
    g.demand()
    g.say(f"store_matrix(E, C, {where}, {tuple_of(values)}, {g.lanes()}, {transposed}, {g.pc})")


@emits("movmatrix")
def move_matrix(g: Generator, ins: Instruction) -> None:
    for word in ("sync", "aligned", "m8n8", "trans", "b16"):
        if not g.mods.take(word):
            raise g.unknown()
    g.write(ins.operands[0], f"move_matrix({g.read(ins.operands[1], 'u4')}, C.n)", "u4")
