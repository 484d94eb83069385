"""The quantities that formulas mention: their meanings, and their values in a plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

Number = int | float

QUANTITIES = {
    "block_q": "query rows per block (the paper's Br)",
    "block_k": "keys per step of the main loop (the paper's Bc)",
    "d_qk": "head dim of Q and K",
    "d_v": "head dim of V and O",
    "d": "the larger head dim (the paper's d)",
    "depth": "columns of Q and K in shared memory, a multiple of the depth of a product",
    "depth_v": "columns of V in shared memory",
    "e": "bytes per operand element",
    "stages": "buffers for K, and for V where stages_v does not say otherwise",
    "stages_v": "buffers for V, one where two do not fit",
    "warps": "warps per block",
    "row_groups": "groups of 16 rows per warp, of the side that the block owns",
    "column_warps": "warps that own the same rows, each with a share of the columns of its sums",
    "score_warps": "the number of these warps that share scores through shared memory; 1: none",
    "repeats": "the number of times that each score is computed",
    "room": "registers of a thread beside its gradients and addresses",
    "fitting": "groups of 8 keys whose scores fit in these registers",
    "ring": "panels for which the ring of a kernel has space whose tiles come panel by panel",
    "passes": "passes in which a warpgroup computes its scores of a step",
    "pass_keys": "keys of such a pass",
    "columns": "columns of dK and dV, or of dQ, that a warp accumulates",
    "exchanged": "tiles that warps exchange: P and dS where they share scores, else 0",
    "dq_row_warps": "warps that divide the rows of a dQ tile; the others divide its columns",
    "dq_columns": "columns of a dQ tile per warp",
    "dq_groups": "warpgroups that divide the queries of a dQ tile; 1: they divide its columns",
    "syncs": "barriers per step",
    "panels": "panels of 64 columns of K or V that are copied at once",
    "blocks": "resident blocks per SM",
    "M": "shared memory that one block can have, in bytes",
    "M_sm": "shared memory of an SM, in bytes",
    "reserved": "shared memory that the system reserves in each block, in bytes",
    "R": "32-bit registers of an SM",
    "smem": "shared memory of a block, in bytes",
    "smem_sm": "shared memory of all resident blocks, in bytes",
    "registers": "registers that a thread needs",
    "pending": "registers per accumulator of S and dP for values that are being made or used",
    "first_plan": "1 in the first plan of a kernel, 0 in one that leaves registers free",
    "ahead": "1 where a step computes the scores of the next one, whose registers are free; else 0",
    "launched": "registers of each thread at the start of a block",
    "key_box": "keys of a box of a block that owns every key_stride-th box",
    "key_stride": "blocks that share their keys box by box",
    "records": "bytes in which the producer tells of boxes, in backward kernels per stage; else 0",
    "box_k": "keys of a box, of which such tiles consist",
    "box_q": "queries of such a box, where blocks own keys",
    "searching": "registers of a producer thread that searches for live tiles; 0: none does",
    "producer": "registers of a thread of the producer warpgroup",
    "register_limit": "registers that a thread can have with this number of resident blocks",
    "extra": "registers that the spec, the architecture and unequal head dims add",
    "access": "bytes per access to global memory",
    "copy_ops": "instructions per access of a copy to shared memory",
    "one_tensor": "1 where the values are the first columns of the keys, in one tile",
    "e_kv": "bytes per code of a cache of codes",
    "convert_ops": "instructions to convert a code to an operand element; to copy it too, where it "
    "becomes one in shared memory",
    "row_ops": "instructions of a warp to find a row of codes and its scales",
    "k_row": "bytes of a row of codes of K in shared memory, where they stay codes there",
    "v_row": "those of a row of codes of V",
    "k_reads": "times that each code of K is read from shared memory",
    "scale_reads": "reads of the scales of codes by work tiles, of K and as many of V",
    "scales_read": "bytes of the scales of codes that work tiles read",
    "q_moves": "1 where a call gives the tangent of Q, else 0",
    "k_moves": "1 where it gives that of K",
    "v_moves": "1 where it gives that of V",
    "scores_move": "1 where scores have tangents",
    "factors": "tensor-core products per multiplication: 6 for float32, else 1",
    "tensor_rate": "tensor-core multiply-adds per clock and SM",
    "l2_rate": "bytes per clock that an SM reads from L2",
    "atomic_share": "rate of atomic additions to L2, as a share of the rate of reads from it",
    "barrier": "clocks for which a block stands still at a barrier",
    "handover": "clocks of a step in which a warpgroup stands still",
    "exposed": "share of what a warp does besides the busiest resource's work that nothing hides",
    "mask_stall": "instructions that take as long as one of a mask, which waits for the one before",
    "hbm_rate": "bytes per clock of global memory, per SM",
    "score_ops": "instructions of score_mod per element, its derivative's included in backward, "
    "or of weight_mod beyond those of a softmax",
    "special_ops": "functions of score_mod per element that special-function units compute, or of "
    "weight_mod beyond a softmax's exponential",
    "fma_columns": "columns of a tile whose exponentials are computed on FMA units",
    "undivided": "cost with all exponentials on special-function units",
    "divided": "least cost with the exponentials of some columns on FMA units",
    "dropout_ops": "instructions per score element for dropout's random bits and selection",
    "sum_columns": "columns of the float32 sums of dQ",
    "macs": "multiply-adds per score element",
    "reads": "bytes of fragments read from shared memory per score element",
    "windows": "bytes of a warp's sums of the elements of learned tensors that a tile reads",
    "logit": "bytes of a sink's logit",
    "row_bytes": "bytes to and from global memory per row",
    "part_bytes": "bytes of a row of a partial result",
    "lanes": "lanes that read one row of a part",
    "restarted": "steps of a block for each split that it begins after its first",
    "row_warps": "warps that share a row of a part, a column for each lane",
    "loads": "16-byte loads of a lane that are in flight together",
    "chained_loads": "loads of a block of which each needs the one before",
    "early_parts": "parts, of 32 columns, that all blocks may load before they know their LSE",
    "latency": "clocks from a load of global memory to its data",
    "in_flight": "bytes that the loads of a block have in flight",
    "resident": "blocks that share an SM",
    "from_l2": "clocks of a block whose loads are all in flight, at the rate of L2",
    "in_turn": "clocks of a block whose loads wait for a place in flight",
    "block_time": "clocks of one block",
    "products": "instructions per score element for the matrix products",
    "rest": "instructions per score element for everything else",
    "tensor": "clocks of the tensor cores per score element",
    "shared": "clocks of shared memory per score element",
    "l2": "clocks of the path from L2 per score element",
    "shared_v": "those of the walk for dV, where dK and dV have a walk each",
    "atomics": "clocks of the atomic additions to dQ per score element",
    "special": "clocks of the special-function units per score element",
    "issue": "clocks of the instruction schedulers per score element",
    "busiest": "clocks of the busiest resource per score element",
    "alone": "clocks per score element of a warp that only copies overlap",
    "pace": "clocks per score element of warpgroups that take turns without a gap",
    "overlap": "the number of warps per scheduler that are out of step with each other",
    "occupied": "share of the schedulers that have a warp",
    "barriers": "clocks lost at barriers per score element",
    "chain": "clocks per score element of the warpgroup that computes the scores for another too",
    "refill": "clocks per score element for which a buffer, or a part, is in use, or filled again",
    "waits": "clocks per score element of waits for a single buffer to be filled",
    "cost": "clocks of one SM per score element; per row for delta, convert_dq and merge",
    "busy": "predicted share of the time in which the tensor cores multiply",
    "sms": "SMs of the product",
    "slots": "blocks that run at the same time",
    "cluster": "blocks that copy the same keys together",
    "work_tiles": "tiles of queries of a launch, of all heads and batch entries",
    "edges": "bytes of the rows of a work tile, read before its steps and written after them",
    "full_rounds": "clocks of the rounds before the last one, bound by global memory",
    "begun": "steps that a work tile takes beside those of its main loop",
    "rounds": "blocks per slot, if every work tile has a block of its own",
    "saved": "clocks of the block starts that persistent blocks save",
    "clock_mhz": "clocks per microsecond",
    "cleared": "clocks to clear the work-tile counter",
    "steps": "steps of the main loops of all blocks",
    "makespan": "steps until the last block ends, when each free slot runs the next work tile",
    "quantisation": "the factor by which idle slots make the launch longer",
    "scores": "score elements of the launch",
    "bytes": "bytes of operands and results, each counted once",
    "work": "clocks of the launch if all SMs were busy until its end",
    "hbm": "clocks to move its bytes through global memory",
    "time": "clocks of the launch",
    "e_out": "bytes per element of the forward kernel's output: 4 for partial results",
    "query_rows": "rows of Q that work tiles read",
    "key_rows": "rows of K that work tiles read",
    "value_rows": "rows of V that work tiles read",
    "part_rows": "rows of O that the forward kernel writes, of all splits",
    "merged_rows": "rows of O that the merge reads, of all splits",
    "lse_rows": "elements of LSE that the forward kernel writes, of all splits",
    "table_reads": "entries of the page table that lanes read",
    "length_reads": "lengths of sequences that lanes read",
    "rows": "query rows of all heads and sequences",
    "keys": "keys of all key heads and sequences that a query reaches",
    "q_read": "bytes of Q that the forward kernel reads",
    "k_read": "bytes of K that the forward kernel reads",
    "v_read": "bytes of V that the forward kernel reads",
    "pages_read": "bytes of the page table and of the lengths that the forward kernel reads",
    "o_written": "bytes of O that the forward kernel writes",
    "lse_written": "bytes of LSE that the forward kernel writes",
    "forward_bytes": "bytes that the forward kernel reads and writes",
    "parts_read": "bytes of partial results that the merge reads",
    "parts_lse_read": "bytes of their LSE that the merge reads",
    "merged_written": "bytes of out and LSE that the merge writes",
    "merge_bytes": "bytes that the merge reads and writes",
    "bound_bytes": "bytes of K, V, q and out, each once: the HBM bound",
    "over_bound": "bytes of all launches over those of the HBM bound",
}
"""The meaning of each quantity that a formula may mention, by name."""


class Quantities(Mapping[str, Number]):
    """Values of quantities by name; immutable and hashable."""

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[str, Number]) -> None:
        self._values = dict(values)

    def copy(self) -> dict[str, Number]:
        """The values as a new dict."""
        return dict(self._values)

    def __getitem__(self, name: str) -> Number:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return hash(frozenset(self._values.items()))

    def __repr__(self) -> str:
        return f"Quantities({self._values!r})"
