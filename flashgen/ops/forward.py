"""One forward call: check, choose a kernel, build it, run it; for the operator and the commands."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any

import torch

from flashgen.errors import InputError
from flashgen.ops import backends
from flashgen.ops.backends import Bound, nearest_arch
from flashgen.ops.bind import bind, heads_of_call
from flashgen.ops.block_sparse import static_layout, with_layout
from flashgen.ops.captures import named, pointers_of
from flashgen.ops.checks import Problem, check
from flashgen.ops.contents import check_contents
from flashgen.ops.layout import empty_rows, in_layout_of, rows_before_heads
from flashgen.ops.maps import path_for
from flashgen.ops.numbers import probability_of
from flashgen.ops.report import ForwardRun, Report
from flashgen.ops.sinks import lse_without_keys
from flashgen.ops.tables import Counted, Tables
from flashgen.ops.tiles import quiet, tiles_of
from flashgen.ops.tuned import remembered
from flashgen.ops.variants import without_dropout
from flashgen.pipeline import build
from flashgen.plan import NO_TILES, HeadsPerTile, Tile, plan
from flashgen.spec import AttentionSpec

__all__ = ["Forward", "ForwardRun", "Report", "draw_rng", "nearest_arch", "prepare", "run_forward"]

Tensor = torch.Tensor

_EMPTY = "nothing to launch: a size is 0"
_TILED = "tiled algorithms on torch tensors: no kernel"
_NAMES = ("q", "k", "v", "o")


class Forward:
    """A call that was checked, with everything decided that addresses and contents do not decide.

    Serves every call with tensors of the same shapes, strides, dtype and device and the same
    numbers.
    """

    __slots__ = (
        "_aligned_reason",
        "_blocks",
        "_bound",
        "_built",
        "_heads",
        "_is_empty",
        "_kernel_arch",
        "_layout",
        "_lse_model",
        "_obstacle",
        "_out_model",
        "_sram",
        "_swapped",
        "_tables",
        "_tiles",
        "arch",
        "backend",
        "device",
        "drops",
        "index",
        "problem",
        "spec",
    )

    def __init__(
        self,
        spec: AttentionSpec,
        problem: Problem,
        backend: str,
        arch: str,
        q: Tensor,
        *kv: Tensor,
        sram: int | None = None,
        tiles: Mapping[str, Tile] = NO_TILES,
        blocks: int | None = None,
    ) -> None:
        self.drops = problem.dropout_p > 0
        self.spec = spec if self.drops else without_dropout(spec)
        self.problem = problem
        self.backend = backend
        self.arch = arch
        self._kernel_arch, self._aligned_reason = path_for(arch, q=q, k=kv[0], v=kv[1])
        self._sram = sram
        self._tiles = tiles
        self._blocks = blocks
        self.device = q.device
        self.index = backends.index_of(q.device) if backend == "gpu" else 0
        self._is_empty = problem.is_empty
        self._layout = static_layout(spec, problem, q.device)
        self._swapped = rows_before_heads(q)
        # One element each: torch.empty_like makes contiguous tensors of them, in half of the time
        # that torch.empty takes to read a shape.
        batch, heads, seq, dim = *q.shape[:3], problem.head_dim_v
        shape = (batch, seq, heads, dim) if self._swapped else (batch, heads, seq, dim)
        self._out_model = q.new_empty(()).expand(shape)
        self._lse_model = q.new_empty((), dtype=torch.float32).expand(batch, heads, seq)
        found = map(backends.stride_obstacle, _NAMES, (q, *kv))
        self._obstacle = next((text for text in found if text), None)
        self._bound: dict[int, Bound] = {}
        self._heads: dict[int, HeadsPerTile] = {}
        self._tables: dict[int, Tables] = {}  # for the kernels that read captured tensors
        self._built = 0.0

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rng: Tensor | None = None,
        captured: Sequence[Tensor] = (),
        *,
        checkers: bool = True,
        order_seed: int | None = None,
    ) -> tuple[Tensor, Tensor, Any]:
        """out, lse, and what `report` makes a Report of.

        Args:
            captured: for each of the spec's tensors, in their order.
        """
        if q.is_neg() or k.is_neg() or v.is_neg():
            q, k, v = q.resolve_neg(), k.resolve_neg(), v.resolve_neg()
        if self._is_empty:
            return self._nothing(q, captured)
        rng = rng.contiguous() if self.drops and rng is not None else None
        by_name = named(self.spec, captured) if captured else {}
        check_contents(self.spec, by_name, self.problem, self.device)
        if self._layout:
            by_name |= self._layout
        if self.backend == "tiled":
            return self._tiled(q, k, v, rng, by_name)
        out = torch.empty_like(self._out_model)
        if self._swapped:
            out = out.transpose(1, 2)
        lse = torch.empty_like(self._lse_model)
        if self.spec.packed:  # rows beyond the last boundary are nobody's: no key, as in empty rows
            out.zero_()
            lse.fill_(-math.inf)
        at = (q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), lse.data_ptr())
        if self._obstacle is None and not (at[0] | at[1] | at[2] | at[3]) % 16:
            width, reason = 16, self._aligned_reason
        else:
            width, reason = q.element_size(), self._reason(q, k, v, out)
        bound = self._bound.get(width)
        if bound is None:
            bound = self._bind(width, {"q": q, "k": k, "v": v, "o": out}, by_name)
        built, self._built = self._built, 0.0
        start = perf_counter()
        counters = None
        tabled: list[Counted] = []
        # How many jobs were taken: none yet.
        taken = None
        if bound.blocks is not None and bound.blocks.persistent:
            taken = torch.zeros(1, dtype=torch.int32, device=self.device)
        if self.backend == "gpu" and not by_name:
            more = () if rng is None else (rng.data_ptr(),)
            if bound.blocks is not None:
                more = (*more, 0 if taken is None else taken.data_ptr())
            bound.launch((*at, *more), self.index)
        else:
            tensors = {"q": q, "k": k, "v": v, "o": out, "lse": lse, "rng": rng, "taken": taken}
            emulation: dict[str, Any] = {"checkers": checkers, "order_seed": order_seed}
            if by_name:
                tensors |= pointers_of(by_name)
                made = self._tables[width].made
                tables, tabled = made(self.backend, by_name, self.index, **emulation)
                tensors |= tables
                start = perf_counter()
            counters = bound.run(self.backend, tensors, self.index, **emulation)
        seconds = perf_counter() - start
        done = (self, width, reason, bound.build, counters, built, seconds, tabled)
        return out, lse, (*done, self._heads[width].reason, bound.blocks)

    def _bind(self, width: int, tensors: backends.Tensors, captured: Mapping[str, Tensor]) -> Bound:
        start = perf_counter()
        tiles = self._tiles
        if self.backend == "gpu" and width == 16 and self._sram is None and not tiles:
            tiles = remembered(self.spec, self._kernel_arch, "forward", self.problem, self.index)
        p = self.problem
        options: dict[str, Any] = {
            "sram": self._sram,
            "tile": tiles.get("forward"),
            "access_bytes": width,
        }
        of_one_head = plan(self.spec, self._kernel_arch, **options)
        heads = self._heads[width] = heads_of_call(self.spec, of_one_head, p, captured)
        kernel = build(self.spec, self._kernel_arch, heads_per_tile=heads.heads, **options)
        self._built = perf_counter() - start
        bound = self._bound[width] = bind(
            kernel,
            p,
            tensors,
            captured,
            packed=self.spec.packed,
            sms=backends.sms_of(self.backend, self.index) if kernel.plan.takes_jobs else None,
            blocks=self._blocks,
        )
        if captured:
            self._tables[width] = Tables(self.spec, self.arch, captured, (bound,))
        return bound

    def _reason(self, *tensors: Tensor) -> str:
        bases = map(backends.base_obstacle, _NAMES, tensors)
        return self._obstacle or next(text for text in bases if text)

    def _nothing(self, q: Tensor, captured: Sequence[Tensor]) -> tuple[Tensor, Tensor, Any]:
        out = empty_rows(q, self.problem.head_dim_v).zero_()
        if self.spec.sink is None:
            lse = q.new_full(q.shape[:3], -math.inf, dtype=torch.float32)
        else:
            lse = lse_without_keys(self.spec, named(self.spec, captured), q)
        return out, lse, (self, 0, _EMPTY, None, None, 0.0, 0.0, [], "", None)

    def _tiled(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rng: Tensor | None,
        captured: Mapping[str, Tensor],
    ) -> tuple[Tensor, Tensor, Any]:
        from flashgen import tiled

        p = self.problem
        start = perf_counter()
        with quiet():
            out, lse = tiled.forward(
                self.spec,
                q,
                k,
                v,
                scale=p.scale,
                q_offset=p.q_offset,
                k_offset=p.k_offset,
                scalars=dict(p.scalars),
                tensors=captured,
                dropout_p=p.dropout_p,
                rng=rng,
                **tiles_of(self.spec, self.arch, self._sram, self._tiles),
            )
            out = in_layout_of(q, out)
        seconds = perf_counter() - start
        return out, lse, (self, 0, _TILED, None, None, 0.0, seconds, [], "", None)


def report(done: Any) -> Report:
    """The Report of what `Forward.run` did."""
    forward, width, reason, kernel, counters, built, seconds, tabled, heads, blocks = done
    backend = "none" if reason is _EMPTY else forward.backend
    tables = tuple(
        Report(backend, forward.arch, width, reason, of_table, counted, run_seconds=spent)
        for of_table, counted, spent in tabled
    )
    times = built, seconds
    rest = (*times, tables, heads, blocks)
    return Report(backend, forward.arch, width, reason, kernel, counters, *rest)


def prepare(
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None,
    q_offset: int,
    k_offset: int,
    scalars: Mapping[str, object],
    tensors: Mapping[str, object],
    dropout_p: float | Tensor,
    rng: Tensor | None,
    backend: str | None,
    arch: str | None,
    sram: int | None = None,
    tiles: Mapping[str, Tile] = NO_TILES,
    blocks: int | None = None,
) -> Forward:
    """Checks a call and decides where it runs. Arguments as in `run_forward`.

    Raises:
        InputError: an argument is wrong.
        PlanError: there are no facts about the GPU.
    """
    problem = check(
        spec,
        q,
        k,
        v,
        scale=scale,
        q_offset=q_offset,
        k_offset=k_offset,
        scalars=scalars,
        tensors=tensors,
        dropout_p=dropout_p,
        rng=rng,
    )
    where = backends.choose(backend, q.device)
    target = backends.target_of(arch, where, q.device)
    if blocks is not None and where == "tiled":
        raise InputError(
            "tiled algorithms have no blocks",
            where="argument blocks",
            numbers=f"given {blocks!r} for the backend 'tiled'",
            way_out="backend='emulator', or no blocks",
        )
    return Forward(spec, problem, where, target, q, k, v, sram=sram, tiles=tiles, blocks=blocks)


def run_forward(
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scalars: Mapping[str, object] | None = None,
    tensors: Mapping[str, Tensor] | None = None,
    scale: float | None = None,
    q_offset: int = 0,
    k_offset: int = 0,
    dropout_p: float | Tensor = 0.0,
    rng: Tensor | None = None,
    backend: str | None = None,
    arch: str | None = None,
    sram: int | None = None,
    tiles: Mapping[str, Tile] = NO_TILES,
    blocks: int | None = None,
    check_memory: bool = True,
    order_seed: int | None = None,
) -> ForwardRun:
    """Runs the kernel of ``spec`` that fits these tensors. Arguments as in `flashgen.attention`.

    Args:
        scalars, tensors: a number for each of the spec's scalars, a tensor for each of its captured
            tensors, by name; "layout" as in `flashgen.attention`.
        sram: bytes of shared memory per block to plan for, instead of the architecture's.
        tiles: {"forward": this one} instead of the planner's, or of one that `flashgen tune` has
            measured.
        blocks: of the launch, instead of the plan's number; only for kernels whose blocks take
            jobs.
        check_memory: the emulator's checkers for memory and races.
        order_seed: the emulator runs blocks and warps in an order drawn from it.

    Raises:
        InputError: an argument is wrong; nothing has run then.
        FlashgenError: planning, compiling or running failed.
    """
    if rng is None and isinstance(q, Tensor) and spec.dropout:
        rng = draw_rng(dropout_p, q.device)
    tensors = with_layout(spec, tensors or {})
    forward = prepare(
        spec,
        q,
        k,
        v,
        scale=scale,
        q_offset=q_offset,
        k_offset=k_offset,
        scalars=scalars or {},
        tensors=tensors,
        dropout_p=dropout_p,
        rng=rng,
        backend=backend,
        arch=arch,
        sram=sram,
        tiles=tiles,
        blocks=blocks,
    )
    captured = tuple(tensors[tensor.name] for tensor in spec.tensors)
    out, lse, done = forward.run(
        q, k, v, rng, captured, checkers=check_memory, order_seed=order_seed
    )
    return ForwardRun(out, lse, report(done), rng if forward.drops else None)


def draw_rng(dropout_p: float | Tensor, device: torch.device) -> Tensor | None:
    """A seed and an offset from torch's generator of the device; None when nothing is dropped.

    They stay on the device: nothing waits for them, and a CUDA graph draws new ones at every
    replay.

    Returns:
        int64 [2], from 0 to below 2^63 - 1.

    Raises:
        InputError: dropout_p is no number in [0, 1).
    """
    if not isinstance(dropout_p, Tensor) and probability_of(dropout_p) == 0:
        return None
    return torch.randint(2**63 - 1, (2,), dtype=torch.int64, device=device)
