"""The plan of a kernel: a frozen value that prints its derivation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from flashgen.kernels.planner.derivation import (
    INDENT,
    DerivationLine,
    Refusal,
    printed_line,
    wrapped,
)
from flashgen.kernels.planner.models.codes_sm80 import model_of_codes
from flashgen.kernels.planner.models.fitted_common import (
    L2_SHARE_OF_HEADS,
    MASK_LOOP_HEAD_DIM,
    PING_PONG_HEAD_DIM,
)
from flashgen.kernels.planner.models.fitted_sm90 import (
    BLOCK_START_CLOCKS,
    CLEAR_COUNTER_US,
    SPARE_NOT_AHEAD,
)
from flashgen.kernels.planner.models.kernel_model import LEARNED_KERNELS, MMA_ROWS, KernelModel
from flashgen.kernels.planner.models.panels_sm90 import panels_of_kernel
from flashgen.kernels.planner.quantities import QUANTITIES, Quantities
from flashgen.kernels.planner.tile_problem import MODELS, Tile
from flashgen.shared.arch import facts
from flashgen.shared.launch_facts import (
    Box,
    LaunchFacts,
    LaunchMachine,
    LaunchRules,
    ParamFacts,
)
from flashgen.shared.signature import GradientTerm
from flashgen.spec.language.block_layout import BlockSparse


@dataclass(frozen=True)
class SmemMap:
    """The map of a block's dynamic shared memory.

    Attributes:
        parts: the bytes of each part in their order, by the names of the model's formulas:
            "smem_q", "smem_k", "smem_v", "smem_do" of the tiles, in "tangent" "smem_q_tangent" and
            others of their tangents; "smem_rows" of (LSE, delta) per query row, "smem_p" and
            "smem_ds" of P and dS, [block_k, block_q]. In a "forward" that `exchanges`, these are a
            number per query row and warp, and P, [block_q, block_k]. "smem_ring" is the ring of
            panels, where tiles come panel by panel, and "smem_windows" the sums of learned elements
            that warps add. A part with another name is found without an offset.
    """

    parts: tuple[tuple[str, int], ...] = ()

    def __getitem__(self, name: str) -> int:
        """The byte offset of the part "smem_" + name; 0 where the kernel has no such part."""
        end = 0
        for part, size in self.parts:
            if size and part == f"smem_{name}":
                return end
            end += size
        return 0


@dataclass(frozen=True, kw_only=True)
class Plan(LaunchRules):
    """Tiles, warps and shared-memory layout of one kernel, with their derivation.

    Attributes:
        kernel: "forward"; one of the backward kernels "delta" (rowsum(dO * O)), "dkdv", "dq",
            "fused" (dK, dV and dQ at once), "convert_dq" (dQ from the sums of "fused"; "convert_dk"
            and "convert_dv" where groups of heads are divided), "captured"
            (gradients of learned tensors) and "captured_exact" (the same with order-independent
            sums); "tangent" (the tangents of O and LSE); "minmax_table" (min/max tables of captured
            tensors, before all other kernels);
            "merge" (partial results, after all other kernels); "append_kv" (new keys and values,
            written to a paged cache) or "append_codes" (the same, as codes of 8 bits);
            "add_rows" (rows of gradients, added to sums in float32).
        arch: the architecture that the kernel is compiled for.
        path: the code path, which names the templates.
        policy: "derived", "paper" for Algorithm 1's block sizes, or "given" by the caller.
        dtype, itemsize: the dtype of Q, K, V and O, and its bytes per element.
        in_parts: whether a block of "fused" owns a part of a group of query heads: it then writes
            float32 sums of dK and dV. "convert_dk" and "convert_dv" add the sums of all parts in
            their order.
        fused_plan: for "convert_dk" and "convert_dv", the plan of "fused"; else None.
        one_tensor: whether the values are the first columns of the keys, and both have one tile.
        partial: whether O is float32 although the operands have 16 bits, in "forward".
        folds: whether a block of "forward" has all splits of its rows and joins their results.
        runs: whether it has a run of neighbouring splits, joins their results and writes a part.
        returns_maxima: whether "forward" writes the largest score of each row beside LSE.
        head_dim, head_dim_v: the head dim of Q and K, and the head dim of V and O.
        block_q, block_k: query rows and keys of a tile (the paper's Br and Bc). A thread block of
            "dkdv" and "fused" owns block_k keys and walks the queries in steps of block_q; any
            other block owns block_q queries and walks the keys in steps of block_k. 0 where there
            is no such tile.
        warps: computing warps per thread block; each owns 16 * row_groups rows.
        column_warps: warps that own the same rows, each with a share of the columns of O or of a
            gradient.
        score_warps: equal to column_warps where those warps share their scores (each computes some
            of them, and P and dS pass through shared memory); 1 where each of them computes all
            scores and nothing is exchanged, or, in "forward" of path "sm_90a", one for the other.
        stages: buffers for each of K and V in "forward", and for each of the two operands of a step
            in the backward kernels of path "sm_90a"; where warps of that path share scores, dO has
            one. Backward kernels of path "sm_80" have a fixed number: two for the operand that a
            step uses first and last (Q; in "dq" K), else one.
        access_bytes: bytes per access to global memory: 16, or itemsize for unaligned tensors.
        smem: the map of dynamic shared memory; empty for kernels without tiles of scores.
        smem_bytes: bytes of dynamic shared memory per thread block.
        gathers: whether a tile consists of boxes with live blocks of a layout, wherever they are;
            else it is one box.
        sink_bytes: bytes of the sink's logit in the kernels that read it: "forward", and "delta"
            where it computes the sink's gradient; else 0.
        has_rows: whether rows have base and delta, which "delta" writes and the other backward
            kernels read: unless weights are not summed.
        registers: registers per thread that the compiler may use, set by the launch bounds.
        registers_needed: registers per thread by the model, at most `registers`.
        blocks_per_sm: resident thread blocks per SM that the launch bounds request.
        heads_per_tile: query heads whose rows share a forward tile, one head after the other; they
            share K and V. Where they cannot divide its rows, the last rows belong to no head.
        tangents: of "tangent", the names of the tensors that have a tangent, in the order of
            `requests.tangents_of`; else ().
        sums_tile: rows and columns of a tile of the float32 sums of dQ, to which "fused" adds, and
            which "delta" fills with zeros and "convert_dq" reads, or of the sums that "convert_dk"
            and "convert_dv" read; None where there are no sums.
        integer_bits: 64 where expressions of the spec have 64-bit integers wherever some accepted
            call needs them; 32 for a kernel of calls within int32.
        cost: predicted clocks of one SM per score element; per row for "delta" and "convert_dq",
            and per row of a part for "merge".
        derivation: the constraints and the cost, with their numbers.
        refused: why each next larger tile was not chosen.
        notes: further lines: the machine's numbers, the code path, roundings.
        quantities: every evaluated quantity of the model by name, such as "tensor" or "macs";
            `flashgen.kernels.planner.quantities.QUANTITIES` has the meanings.
    """

    policy: str
    stages: int = 1
    registers: int
    registers_needed: int
    cost: float
    derivation: tuple[DerivationLine, ...] = field(repr=False)
    refused: tuple[Refusal, ...] = field(repr=False, default=())
    notes: tuple[str, ...] = field(repr=False)
    quantities: Quantities = field(repr=False, compare=False)
    column_warps: int = 1
    score_warps: int = 1
    smem: SmemMap = SmemMap()
    sink_bytes: int = 0
    has_rows: bool = True
    partial: bool = False
    folds: bool = False
    runs: bool = False
    returns_maxima: bool = False
    gathers: bool = False
    in_parts: bool = False
    fused_plan: Plan | None = field(repr=False, default=None)
    tangents: tuple[str, ...] = ()

    @property
    def tile_text(self) -> str:
        """The queries and keys of a tile in words; "" for a kernel without tiles."""
        if not self.block_q or self.block_k:
            return f"{self.block_q} x {self.block_k}" if self.block_q else ""
        return f"{self.block_q} row{'s' * (self.block_q > 1)}"

    @property
    def joins(self) -> bool:
        """Whether a block of "forward" has several splits of its rows."""
        return self.folds or self.runs

    @property
    def output_columns(self) -> int:
        """Columns of O that a warp of "forward" has."""
        return self.head_dim_v // self.column_warps

    @property
    def stages_v(self) -> int:
        """Buffers for V."""
        return int(self.quantities.get("stages_v", self.stages))

    @property
    def kv_itemsize(self) -> int:
        """Bytes per element of K and V in memory."""
        return int(self.quantities.get("e_kv", self.itemsize))

    @property
    def tiles_hold_codes(self) -> bool:
        """Whether tiles of K and V hold codes, which become elements in registers."""
        return "k_row" in self.quantities

    @property
    def orders_queries(self) -> bool:
        """Whether fragments of Q and of codes have the elements of a step in an order in which a
        lane has four neighbours: tensor cores add all 16 of a step at once."""
        return self.quantities.get("k_reads") == 1

    @property
    def out_itemsize(self) -> int:
        """Bytes per element of O."""
        return 4 if self.partial else self.itemsize

    @property
    def lse_bytes(self) -> int:
        """Bytes that "forward" writes of a row beside O: LSE, and the largest score."""
        return 8 if self.returns_maxima else 4

    @property
    def moving(self) -> tuple[str, ...]:
        """The operands, of q, k and v, whose tangents "tangent" reads."""
        return tuple(name for name in "qkv" if self.quantities.get(f"{name}_moves"))

    @property
    def scores_move(self) -> bool:
        """Whether scores have tangents, in "tangent"."""
        return bool(self.quantities.get("scores_move"))

    @property
    def heads_per_lane(self) -> int:
        """Query heads whose rows a lane computes: one for all rows, one for each of its two rows in
        a row group, or one for each row."""
        if self.heads_per_tile == 1:
            return 1
        lanes = MMA_ROWS // 2  # rows of a lane are 8 apart
        return max(1, MMA_ROWS * self.row_groups // max(lanes, self.queries_per_tile))

    @property
    def fma_columns(self) -> int:
        """Columns of a tile whose exponentials are computed on FMA units, a multiple of 8."""
        return int(self.quantities.get("fma_columns", 0))

    @property
    def loops_over_masks(self) -> bool:
        """Whether a costly mask is evaluated in a loop over all elements of a tile.

        The loop includes keys past the end of the sequence.
        """
        return self.kernel == "forward" and self.head_dim_v <= MASK_LOOP_HEAD_DIM

    @property
    def ping_pong(self) -> bool:
        """Whether consumer warpgroups of the forward kernel of path "sm_90a" run in ping-pong."""
        several = self.block_q > self.code_path.group_rows
        return several and max(self.head_dim, self.head_dim_v) <= PING_PONG_HEAD_DIM

    def skipping_rows(self, *, bounded: bool) -> int:
        """The rows of a warpgroup, where warpgroups skip tiles that their own rows do not reach.

        Warpgroups do so in a forward tile of one head; 0 for all other tiles, and for one
        warpgroup.

        Args:
            bounded: whether bounds alone, and no search, decide which tiles are visited.
        """
        by_warpgroup = self.kernel == "forward" and self.code_path.copies_by_tma and bounded
        rows = self.code_path.group_rows
        return rows if by_warpgroup and self.heads_per_tile == 1 and self.block_q > rows else 0

    def ranges_as_bits(self, ends: int) -> bool:
        """Whether the columns outside a row's own range are a bit mask instead of comparisons.

        Comparing columns with a range takes one instruction per column and end of the range. A bit
        mask takes about eight instructions per row and eight per end, and the compiler then tests
        seven bits at a time (counted by benchmarks/instructions.py). A range that all rows share is
        compared once.

        Args:
            ends: the ends of the range that a row has, 1 or 2.
        """
        columns = self.walked_keys // 4  # the columns of a row that one lane has
        return ends * columns > 8 * (1 + ends)

    def blocks_as_bits(self, layout: BlockSparse) -> bool:
        """Whether the blocks of a layout in a row of scores fit in 32 bits: a tile has at most 256
        columns."""
        return (layout.block_k if self.rows_are_queries else layout.block_q) >= 16

    @property
    def is_for_learned(self) -> bool:
        """Whether the kernel computes the gradients of learned tensors."""
        return self.kernel in LEARNED_KERNELS

    @property
    def starts_next(self) -> bool:
        """Whether the kernel lets the next launch of its call start while it runs, if it overlaps;
        see `CodePath.dependents`. A forward kernel does so with split keys only."""
        return any(first == self.kernel for first, _ in self.code_path.dependents)

    @property
    def tile(self) -> Tile:
        """The chosen tile. Planning with it as the given tile results in the same block sizes."""
        return Tile(
            step=self.block_q if self.owns_keys else self.block_k,
            warps=self.warps,
            row_groups=self.row_groups,
            blocks=self.blocks_per_sm,
            column_warps=self.column_warps,
            score_warps=self.score_warps,
            cluster=self.cluster,
        )

    @property
    def row_groups(self) -> int:
        """Groups of 16 rows that one warp owns: of keys where `owns_keys`, else of queries."""
        owned = self.block_k if self.owns_keys else self.block_q
        return owned * self.column_warps // (MMA_ROWS * self.warps)

    @property
    def rows_are_queries(self) -> bool:
        """Whether rows of the accumulators of scores are queries; else they are keys."""
        return not self.owns_keys or self.in_passes

    @property
    def model(self) -> KernelModel:
        """The cost model of the kernel; a KeyError for kernels without tiles of scores."""
        model = MODELS[self.path][self.kernel, self.itemsize]
        model = model.for_columns(self.head_dim_v, one_tensor=self.one_tensor)
        model = model.form_of(self.column_warps, self.score_warps)
        if self.kv_itemsize == self.itemsize:
            return model
        return model_of_codes(model, in_registers=self.tiles_hold_codes)

    @property
    def exchanges(self) -> bool:
        """Whether warps of "forward" share the scores of their rows, and exchange P."""
        return self.kernel == "forward" and self.score_warps > 1

    @property
    def columns_read_again(self) -> int:
        """Columns of keys that "forward" reads a second time, as values."""
        return self.head_dim_v if self.one_tensor and self.exchanges else 0

    @property
    def in_passes(self) -> bool:
        """Whether the kernel has the form of `backward_columns_sm90`, whose warps share keys."""
        return "passes" in self.quantities

    @property
    def streamed(self) -> bool:
        """Whether the kernel has the form of `streamed_sm90`, whose tiles come panel by panel."""
        return "ring" in self.quantities

    @property
    def walks(self) -> int:
        """How often a block walks its tiles: once, or for dV and for dK."""
        return 2 if self.streamed and self.owns_keys else 1

    @property
    def ring(self) -> int:
        """Panels for which the ring of a `streamed` kernel has space."""
        return int(self.quantities["ring"])

    @property
    def passes(self) -> int:
        """Passes in which a warpgroup computes its scores of a step; 1 in all other forms."""
        return int(self.quantities.get("passes", 1))

    @property
    def scores_ahead(self) -> bool:
        """Whether a step of Hopper's "fused" computes the scores of the next one."""
        return bool(self.quantities.get("ahead", 0))

    def spare_after_spill(self, spare: int) -> int:
        """The registers to leave free next, after the compiler spilled with ``spare`` of them.

        First the same tile no longer computes scores ahead; then tiles are smaller.
        """
        if self.scores_ahead:
            return SPARE_NOT_AHEAD
        return spare + max(8, self.registers - self.registers_needed + 1)

    @property
    def pass_keys(self) -> int:
        """Keys of one of the `passes`."""
        return int(self.quantities["pass_keys"])

    @property
    def masked_columns(self) -> int:
        """Columns of the accumulators of scores for which a lane masks its rows at a time."""
        if self.in_passes:
            return self.pass_keys
        return (self.block_q if self.owns_keys else self.block_k) // self.score_warps

    @property
    def divides_groups(self) -> bool:
        """Whether this tile has a form whose blocks own parts of a group of query heads."""
        return self.kernel == "fused" and self.code_path.dq_strips and not self.in_passes

    def parts_of_group(self, *sizes: int) -> tuple[int, int]:
        """The number of parts of each group of query heads in a call of these sizes, and the query
        heads of a part, as in `part_heads`; one part of all heads unless `in_parts`."""
        if self.fused_plan is not None:
            return self.fused_plan.parts_of_group(*sizes)
        batch, heads_q, heads_kv, seq_q, seq_k = sizes
        group = heads_q // max(1, heads_kv)
        heads = self.part_heads(batch, heads_q, heads_kv, seq_q, seq_k) if self.in_parts else group
        return max(1, -(-group // max(1, heads))), heads

    @property
    def dq_row_warps(self) -> int:
        """Warps of "fused" that divide the rows of a dQ tile; the others divide its columns."""
        return int(self.quantities["dq_row_warps"])

    @property
    def other_warps(self) -> int:
        """Warps of a thread block that do not compute: the producer warpgroup."""
        return 0 if self.streams else self.model.other_warps

    def columns_of_warp(self, dim: int) -> int:
        """Groups of 8 columns that a warp sums of a gradient with `dim` columns, in pairs."""
        return min(dim // 8, -(-dim // (16 * self.column_warps)) * 2)

    @property
    def producer_registers(self) -> int:
        """Registers per thread of the producer warpgroup; 0 where all warps compute."""
        return int(self.quantities.get("producer", 0))

    @property
    def threads(self) -> int:
        """Threads per block."""
        return 32 * (self.warps + self.other_warps)

    @property
    def binding(self) -> tuple[str, ...]:
        """Names of the constraints that keep the tile from being larger."""
        return tuple(line.name for line in self.derivation if line.binding)

    @property
    def box_k(self) -> int:
        """Keys of a box of "forward" and "dq"; 0 where every warp finds the tiles.

        The producer searches for boxes, and tells the consumers which boxes make up a tile.
        """
        return int(self.quantities.get("box_k", 0))

    @property
    def box_q(self) -> int:
        """Queries of a box of a kernel whose blocks own keys and gather queries; else 0."""
        return int(self.quantities.get("box_q", 0))

    @property
    def key_box(self) -> int:
        """Keys of a box of a block that owns keys and gathers queries; 0 for any other block."""
        return int(self.quantities.get("key_box", 0))

    @property
    def key_stride(self) -> int:
        """Blocks that share their keys box by box; 1 where each has neighbouring keys."""
        return int(self.quantities.get("key_stride", 1))

    @property
    def records(self) -> bool:
        """Whether the producer tells the consumers which boxes make up a tile."""
        return self.box_k > 0 or self.box_q > 0

    @property
    def boxes_per_tile(self) -> int:
        """Boxes of a tile; 1 where it is not gathered."""
        if self.box_q:
            return self.block_q // self.box_q
        return self.block_k // self.box_k if self.box_k else 1

    @property
    def masks_pairs(self) -> bool:
        """Whether the mask is applied to words of two elements, in Hopper's backward kernels."""
        return self.kernel in ("fused", "dkdv", "dq") and self.code_path.copies_by_tma

    @property
    def walked_keys(self) -> int:
        """Keys of a unit that the walk over keys finds: a box that is gathered, or a tile."""
        return self.box_k or self.block_k

    @property
    def walked_queries(self) -> int:
        """Query rows of each head in a tile, or in a box of a walk over queries."""
        return self.box_q or self.queries_per_tile

    @property
    def units(self) -> tuple[int, int]:
        """Queries and keys of a tile, or of one of its boxes."""
        keys = self.key_box if self.key_stride > 1 else self.walked_keys
        return self.walked_queries, keys

    def steps_of(self, walked: int) -> int:
        """Steps in which a block visits so many tiles, or boxes of gathered tiles, of one head.

        For queries that reach no box, a gathered tile is empty.
        """
        rows_without = self.kernel == "forward" and self.box_k > 0
        return max(int(rows_without), -(-walked // self.boxes_per_tile))

    @property
    def machine(self) -> LaunchMachine:
        """The facts of the architecture's product on which launches depend."""
        gpu = facts(self.arch)
        return LaunchMachine(
            gpu.sms,
            L2_SHARE_OF_HEADS * gpu.l2_bytes,
            BLOCK_START_CLOCKS,
            CLEAR_COUNTER_US * (gpu.clock_hz / 1e6),
        )

    @property
    def boxes(self) -> tuple[tuple[str, Box], ...]:
        """The boxes that TMA copies of each operand: columns, rows and heads; none without TMA."""
        if not self.code_path.copies_by_tma or self.streams:
            return ()
        sizes = (self.head_dim, self.head_dim_v, self.column_warps)
        (panel, _), (panel_v, _) = panels_of_kernel(
            self.kernel, *sizes, one_tensor=self.one_tensor, streamed=self.streamed
        )
        rows = self.code_path.group_rows
        # A warpgroup's rows are queries of one head, or the tile's queries of several heads.
        queries, keys = self.units
        if self.kernel == "forward":
            queries = min(rows, queries)
        heads = rows // queries if self.heads_per_tile > 1 else 1
        boxes = (
            ("q", (panel, queries, heads)),
            ("k", (panel, keys, 1)),
            ("v", (panel_v, keys, 1)),
        )
        if self.kernel == "tangent":
            moving = ((f"{name}_tangent", box) for name, box in boxes if name in self.moving)
            return (*boxes, *moving)
        return boxes if self.kernel == "forward" else (*boxes, ("do", (panel_v, queries, 1)))

    def launch_facts(
        self, name: str, params: Sequence[ParamFacts], terms: tuple[GradientTerm, ...] = ()
    ) -> LaunchFacts:
        """What the launches of the compiled kernel need.

        Args:
            name: the name of the kernel.
            params: the fields of its parameter struct.
            terms: for exact sums of learned tensors, the elements to whose gradients it adds.
        """
        return LaunchFacts(
            name=name,
            params=tuple(params),
            threads=self.threads,
            of_gpu=self.machine,
            boxes=self.boxes,
            terms=terms,
            **{field.name: getattr(self, field.name) for field in fields(LaunchRules)},
        )

    def __str__(self) -> str:
        """The derivation without intermediate steps: lines of at most 97 columns."""
        return self.explain(details=False)

    def explain(self, *, details: bool = True) -> str:
        """The derivation in words and numbers; with ``details``, every intermediate step too."""
        lines = [f"plan{' ' * (INDENT - 4)}{self.choice}"]
        for note in self.notes:
            lines += wrapped(note)
        for line in self.derivation:
            if details or not line.detail:
                lines += printed_line(line)
        for refusal in self.refused:
            lines += wrapped(f"refused {refusal}")
        return "\n".join(lines)

    @property
    def summary(self) -> tuple[str, ...]:
        """The tile, what it needs and what limits it, in three lines; () for kernels without tiles
        of scores, and for plans of the paper's policy."""
        cost = next((line.value for line in self.derivation if line.name == "cost"), None)
        if cost is None or self.streams:
            return ()
        blocks = "1 block runs" if self.blocks_per_sm == 1 else f"{self.blocks_per_sm} blocks run"
        needs = {line.name: line for line in self.derivation if line.limit is not None}
        used = []
        for name, unit in (("smem", "B of shared memory"), ("registers", "registers a thread")):
            if name in needs:
                used.append(f"{needs[name].value:,} of {needs[name].limit:,} {unit}")
        binding = dict.fromkeys(self.binding)
        limits = [QUANTITIES[name].partition(",")[0] for name in binding if name != "cost"]
        limits += ["the cost of other tiles"] if "cost" in binding or not limits else []
        return (
            f"{self.kernel}: a block has {self.block_q} queries and {self.block_k} keys at once, "
            f"in {self.warps} warps; {blocks} on an SM",
            f"it needs {' and '.join(used)}",
            f"{float(cost):.3f} clocks per score by the model; limits: {', '.join(limits)}",
        )

    @property
    def choice(self) -> str:
        """The chosen tile in one line."""
        parts = [f"block_q {self.block_q}", f"block_k {self.block_k}", f"warps {self.warps}"]
        if self.heads_per_tile > 1:
            parts.insert(1, f"heads_per_tile {self.heads_per_tile}")
        if self.kernel == "forward":
            parts.append(f"stages {self.stages}")
            if self.stages_v != self.stages:
                parts.append(f"stages_v {self.stages_v}")
        else:
            parts = [self.kernel, *(part for part in parts if not part.endswith(" 0"))]
        if self.column_warps > 1:
            parts += [f"column_warps {self.column_warps}", f"score_warps {self.score_warps}"]
        if self.cluster > 1:
            parts.append(f"cluster {self.cluster}")
        return "  ".join([*parts, f"blocks per SM {self.blocks_per_sm}"])
