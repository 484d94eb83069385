"""The plan: a frozen value that explains itself."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, field

from flashgen.plan.formulas import Number, counted
from flashgen.plan.model_backward import OF_CAPTURED, dq_row_warps
from flashgen.plan.search import Tile, model_of
from flashgen.plan.traffic import Traffic, Visited, traffic
from flashgen.plan.traffic_backward import BackwardTraffic, backward_traffic

# The banner of an emitted file puts "// " before each line, and lines end at column 100.
COLUMNS = 97
INDENT = 10

# A costly mask is evaluated in a loop up to this head dim of V. Beyond it O leaves too few
# registers for what the loop keeps: tiles would be smaller, and full ones cost a tenth more.
MASK_LOOP_UP_TO = 128


@dataclass(frozen=True)
class Line:
    """One step of a derivation: ``name = formula = substituted = value``, at most ``limit``.

    Attributes:
        name: of the quantity; `flashgen.plan.formulas.QUANTITIES` says what the names mean.
        formula: how it is made.
        substituted: the formula with this plan's numbers.
        value: what it comes to.
        unit: "B", "clk", or nothing.
        relation: "=", or "<=" when the formula is an upper bound of the quantity.
        limit: what the value must not pass; None where there is nothing to pass.
        limit_name: what the limit is called.
        binding: this constraint is why the tile is not larger.
        detail: an intermediate step, which only `Plan.explain` shows.
    """

    name: str
    formula: str
    substituted: str
    value: Number
    unit: str = ""
    relation: str = "="
    limit: Number | None = None
    limit_name: str = ""
    binding: bool = False
    detail: bool = False


@dataclass(frozen=True)
class Refusal:
    """Why a larger tile was not taken.

    Attributes:
        change: what is larger about it.
        quantity: of which it needs too much; "cost" when it fits but is dearer.
        needs, limit, unit: how much of that, and how much there is, or the chosen tile's cost.
    """

    change: str
    quantity: str
    needs: Number
    limit: Number
    unit: str

    def __str__(self) -> str:
        needs, limit = counted(self.needs), counted(self.limit)
        unit = f" {self.unit}" if self.unit else ""
        if self.quantity == "cost":
            return f"{self.change}: fits, but costs {needs}{unit} against {limit}"
        of = f"{unit} of" if unit else ""
        return f"{self.change}: needs {needs}{of} {self.quantity}, {limit}{unit} allowed"


@dataclass(frozen=True)
class Plan:
    """Tiles, warps and shared-memory layout of one kernel, with their derivation.

    Attributes:
        kernel: "forward", or a part of backward: "delta" (rowsum(dO * O)), "dkdv", "dq", or "fused"
            for dK, dV and dQ at once, and "captured" for the gradients of learned tensors, or
            "captured_exact" for the same in sums that have no order;
            or, before all of these, "summary" for a captured tensor's table of extremes.
        arch: that the kernel is compiled for.
        path: the code path, which names the templates.
        policy: "derived", "paper" for Algorithm 1's block sizes, or "given" by the caller.
        dtype, itemsize: of Q, K, V and O; bytes per element.
        head_dim, head_dim_v: of Q and K; of V and O.
        block_q, block_k: query rows and keys of a tile (the paper's Br and Bc). A block of
            "dkdv" and "fused" owns block_k keys and takes block_q queries per step, any other block
            owns block_q queries and takes block_k keys per step; 0 where there is no such tile.
        warps: per block; each owns 16 * row_groups rows of the block's side.
        column_warps: warps that own the same rows, each with a share of the gradient's columns.
        score_warps: how many of those share their scores, each computing those of block_q /
            score_warps queries: column_warps, with P and dS passed through shared memory, or 1,
            when each computes all of them and nothing is passed.
        stages: buffers each for K and V in "forward", and for the two operands of a step of the
            backward kernels of path "sm_90a". Those of "sm_80" have a fixed number: two for the
            operand that a step uses first and last (Q; in "dq" K), one for the other.
        access_bytes: per access to global memory: 16, or itemsize for tensors not so aligned.
        smem_q, smem_k, smem_v: byte offsets of the tiles in dynamic shared memory.
        smem_do, smem_rows, smem_p, smem_ds: the same of dO, of (LSE, delta) per query row, and of P
            and dS, [block_k, block_q]; 0 where the kernel has no such tile.
        smem_bytes: of dynamic shared memory per block.
        sink_bytes: of the sink's logit, in the kernels that read it: "forward", and "delta" where
            it makes the sink's gradient; else 0.
        registers: per thread that the compiler may use, set by the launch bounds.
        registers_needed: per thread by the model, at most `registers`.
        blocks_per_sm: resident blocks that the launch bounds ask for.
        heads_per_tile: query heads whose rows a forward tile has, one head behind the other; they
            share K and V.
        cost: predicted clocks of one SM per score element; per row for "delta".
        derivation: the constraints and the objective, with their numbers.
        refused: why each next larger tile was not taken.
        notes: further lines: roundings, and what the numbers are of.
    """

    arch: str
    path: str
    policy: str
    dtype: str
    itemsize: int
    head_dim: int
    head_dim_v: int
    block_q: int
    block_k: int
    warps: int
    stages: int
    access_bytes: int
    smem_q: int
    smem_k: int
    smem_v: int
    smem_bytes: int
    registers: int
    registers_needed: int
    blocks_per_sm: int
    cost: float
    derivation: tuple[Line, ...] = field(repr=False)
    refused: tuple[Refusal, ...] = field(repr=False)
    notes: tuple[str, ...] = field(repr=False)
    kernel: str = "forward"
    column_warps: int = 1
    score_warps: int = 1
    smem_do: int = 0
    smem_rows: int = 0
    smem_p: int = 0
    smem_ds: int = 0
    sink_bytes: int = 0
    heads_per_tile: int = 1

    @property
    def queries_per_tile(self) -> int:
        """Query rows that a tile has of each of its heads."""
        return self.block_q // self.heads_per_tile

    @property
    def owns_keys(self) -> bool:
        """A block owns block_k keys, rather than block_q queries."""
        return self.kernel in ("dkdv", "fused")

    @property
    def takes_jobs(self) -> bool:
        """A block does any number of jobs, one after another, each what `grid` has a block for."""
        return self.path == "sm_90a" and self.kernel == "forward"

    @property
    def loops_over_masks(self) -> bool:
        """A costly mask is asked about all elements of a tile in a loop, keys past the end too."""
        return self.kernel == "forward" and self.head_dim_v <= MASK_LOOP_UP_TO

    @property
    def of_captured(self) -> bool:
        """It makes the gradients of learned tensors."""
        return self.kernel in OF_CAPTURED

    @property
    def launches(self) -> int:
        """How often a pass launches it: exact sums need to know the greatest of what they add."""
        return 2 if self.kernel == "captured_exact" else 1

    @property
    def tile(self) -> Tile:
        """What was chosen; with it the same plan can be asked for."""
        step = self.block_q if self.owns_keys else self.block_k
        row_groups, sharing = self.row_groups, (self.column_warps, self.score_warps)
        return Tile(step, self.warps, row_groups, self.blocks_per_sm, *sharing)

    @property
    def row_groups(self) -> int:
        """Groups of 16 rows that one warp owns: of keys where `owns_keys`, else of queries."""
        owned = self.block_k if self.owns_keys else self.block_q
        return owned * self.column_warps // (16 * self.warps)

    @property
    def dq_row_warps(self) -> int:
        """Warps of "fused" that share the rows of a dQ tile; the others share its columns."""
        return dq_row_warps(self.block_q, self.warps, self.head_dim)

    @property
    def other_warps(self) -> int:
        """Warps of a block besides `warps`: those that copy, where others compute."""
        return model_of(self.path, self.kernel, self.itemsize).other_warps if self.block_k else 0

    @property
    def producer_registers(self) -> int:
        """Per thread of the warps that copy; 0 where all compute."""
        found = (line.value for line in self.derivation if line.name == "producer")
        return int(next(found, 0))

    @property
    def threads(self) -> int:
        """Per block."""
        return 32 * (self.warps + self.other_warps)

    @property
    def binding(self) -> tuple[str, ...]:
        """Names of the constraints that keep the tile from being larger."""
        return tuple(line.name for line in self.derivation if line.binding)

    def grid(
        self,
        batch: int,
        heads_q: int,
        heads_kv: int,
        seq_q: int,
        seq_k: int,
        *,
        packed: bool = False,
        head_bits: int = 0,
    ) -> tuple[int, int, int]:
        """Blocks of the launch: (tiles, heads, batch entries); or jobs, where blocks take them.

        Of query tiles and query heads, `heads_per_tile` at a time, or, where `owns_keys`, of key
        tiles and key heads. Where heads take turns, (tiles times such heads, heads divided by them,
        batch entries).

        Args:
            head_bits: as from `flashgen.plan.order.head_bits`; 0: head by head.
            packed: the batch entries are sequences that lie one behind the other, seq_q and seq_k
                their lengths together: (at most so many tiles of all of them, heads, 1).
        """
        length, block, heads = seq_q, self.queries_per_tile, heads_q // self.heads_per_tile
        if self.owns_keys:
            length, block, heads = seq_k, self.block_k, heads_kv
        if packed and self.kernel != "delta":
            return (length // block + batch) << head_bits, heads >> head_bits, 1
        return -(-length // block) << head_bits, heads >> head_bits, 1 if packed else batch

    def traffic(
        self,
        batch: int,
        heads_q: int,
        heads_kv: int,
        seq_q: int,
        seq_k: int,
        visited: Visited | None = None,
    ) -> Traffic:
        """Bytes that the forward kernel moves to and from global memory.

        Args:
            visited: the key tiles that the kernel loads for each query tile, the same for every
                batch entry and head; None for all of them. For a mask that depends on b or h, ask
                head by head (batch 1, heads 1) and add.

        Raises:
            ValueError: this is a backward kernel, visited is for another number of tiles, or a tile
                would have heads that do not share K and V.
        """
        if self.kernel != "forward":
            raise ValueError(f"{self.kernel} is a backward kernel: ask for backward_traffic")
        return traffic(self, batch, heads_q, heads_kv, seq_q, seq_k, visited)

    def backward_traffic(
        self,
        batch: int,
        heads_q: int,
        heads_kv: int,
        seq_q: int,
        seq_k: int,
        visited: Visited | None = None,
        *,
        dlse: bool = False,
    ) -> BackwardTraffic:
        """Bytes that a backward kernel moves to and from global memory.

        Args:
            visited: as for `traffic`; where `owns_keys`, the query tiles for each key tile, the
                same for every head, or those of each query head of a group one behind the other.
            dlse: the caller has a gradient of LSE.

        Raises:
            ValueError: this is the forward kernel, or visited is for another number of tiles.
        """
        if self.kernel == "forward":
            raise ValueError("this is the forward kernel: ask for traffic")
        return backward_traffic(self, batch, heads_q, heads_kv, seq_q, seq_k, visited, dlse)

    def __str__(self) -> str:
        """The derivation as the banner of the emitted file has it: lines of at most 97 columns."""
        return self.explain(details=False)

    def explain(self, *, details: bool = True) -> str:
        """The derivation in words and numbers, with every intermediate step unless told not to."""
        lines = [f"plan{' ' * (INDENT - 4)}{self._head()}"]
        for note in self.notes:
            lines += _broken([note])
        for step in self.derivation:
            if details or not step.detail:
                lines += _broken(_parts(step))
        for refusal in self.refused:
            lines += _broken([f"refused {refusal}"])
        return "\n".join(lines)

    def _head(self) -> str:
        """What was chosen."""
        parts = [f"block_q {self.block_q}", f"block_k {self.block_k}", f"warps {self.warps}"]
        if self.heads_per_tile > 1:
            parts.insert(1, f"heads_per_tile {self.heads_per_tile}")
        if self.kernel == "forward":
            parts.append(f"stages {self.stages}")
        else:
            parts = [self.kernel, *(part for part in parts if not part.endswith(" 0"))]
        if self.column_warps > 1:
            parts += [f"column_warps {self.column_warps}", f"score_warps {self.score_warps}"]
        return "  ".join([*parts, f"blocks per SM {self.blocks_per_sm}"])


def broken(line: Line) -> list[str]:
    """A derivation line on as many lines of print as it needs."""
    return _broken(_parts(line))


def _parts(line: Line) -> list[str]:
    """A derivation line in the pieces between which it may be broken."""
    value = counted(line.value) + (f" {line.unit}" if line.unit else "")
    if line.limit is not None:
        value += f" of {counted(line.limit)}" + (f" {line.unit}" if line.unit else "")
    if line.binding:
        value += "  (binds)"
    parts = [f"{line.name} {line.relation} {line.formula}"]
    if line.substituted not in (line.formula, str(line.value)):
        parts.append(f"= {line.substituted}")
    return [*parts, f"= {value}"]


def _broken(parts: list[str]) -> list[str]:
    """``parts`` on as few lines as they need, indented; broken between parts rather than inside."""
    lines = [""]
    for part in parts:
        lead = "  " if len(lines) > 1 else ""
        room = COLUMNS - INDENT - len(lead)
        joined = f"{lines[-1]} {part}".strip()
        if len(joined) <= room:
            lines[-1] = joined
            continue
        pieces = textwrap.wrap(part, room - 2, subsequent_indent="  ", break_long_words=False)
        lines += pieces if lines[-1] else []
        if not lines[-1]:
            lines = pieces
    return [" " * INDENT + ("  " if place else "") + line for place, line in enumerate(lines)]


@dataclass(frozen=True)
class BackwardPlan:
    """The kernels of a backward pass, and why these.

    Attributes:
        scheme: "fused": one kernel makes all gradients, with dQ summed by atomic additions in
            float32; "split": dQ has a kernel of its own, whose sums have one order.
        deterministic: gradients must be the same, bit by bit, each time: only "split" is, and of
            the kernels for learned tensors only "captured_exact".
        kernels: in the order of their launches: ("delta", "fused") or ("delta", "dkdv", "dq"), and
            where the score reads learned tensors "captured" or "captured_exact".
        notes: the predicted costs of both schemes, and what decided.
    """

    scheme: str
    deterministic: bool
    kernels: tuple[Plan, ...]
    notes: tuple[str, ...]

    @property
    def cost(self) -> float:
        """Predicted clocks of one SM per score element; delta's are per row, and not counted."""
        return sum(each.cost * each.launches for each in self.kernels if each.kernel != "delta")

    @property
    def of_keys(self) -> Plan:
        """The plan of the kernel that makes dK and dV: "fused" or "dkdv"."""
        return next(each for each in self.kernels if each.owns_keys)

    def kernel(self, name: str) -> Plan:
        """The plan of one kernel.

        Raises:
            KeyError: this scheme has no kernel of that name.
        """
        for each in self.kernels:
            if each.kernel == name:
                return each
        raise KeyError(name)

    def __str__(self) -> str:
        """The choice of the scheme, then each kernel's derivation; at most 97 columns."""
        return self.explain(details=False)

    def explain(self, *, details: bool = True) -> str:
        """The same with every intermediate step unless told not to."""
        lines = [f"backward  scheme {self.scheme}"]
        for note in self.notes:
            lines += _broken([note])
        return "\n".join([*lines, *(each.explain(details=details) for each in self.kernels)])
