"""One backward call: check, build the kernels, run them one after another."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from flashgen.errors import InputError
from flashgen.ops import backends, sinks
from flashgen.ops.backends import Bound
from flashgen.ops.bind import bind
from flashgen.ops.block_sparse import static_layout, with_layout
from flashgen.ops.captures import named, pointers_of
from flashgen.ops.checks import Problem, check, check_gradients
from flashgen.ops.contents import check_contents
from flashgen.ops.layout import copy_sums, empty_rows, in_layout_of, zero_sums
from flashgen.ops.maps import path_for
from flashgen.ops.report import BackwardRun, Report
from flashgen.ops.sums import ExactSums, FloatSums, meetings_of
from flashgen.ops.tables import Counted, Tables
from flashgen.ops.tiles import quiet, tiles_of
from flashgen.ops.tuned import remembered
from flashgen.ops.variants import learning, without_dropout
from flashgen.plan import NO_TILES, Plan, Tile
from flashgen.spec import AttentionSpec

Tensor = torch.Tensor

_EMPTY = "nothing to launch: a size is 0"
_TILED = "tiled algorithms on torch tensors: no kernel"

# What kernels call the tensors that are read in rows, and what their arguments are called.
_READ = {"q": "q", "k": "k", "v": "v", "o": "out", "do": "dout"}


class Backward:
    """A backward call that was checked, with all decided but addresses and contents.

    Serves every call with tensors of the same shapes, strides, dtypes and device and the same
    numbers.
    """

    __slots__ = (
        "_bound",
        "_built",
        "_crooked",
        "_kernel_arch",
        "_layout",
        "_meetings",
        "_reason",
        "_sram",
        "_tables",
        "_tiles",
        "arch",
        "backend",
        "deterministic",
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
        deterministic: bool,
        *tensors: Tensor,
        sram: int | None = None,
        tiles: Mapping[str, Tile] = NO_TILES,
    ) -> None:
        """
        Args:
            spec: its tensors with grad=True are those whose gradients are needed.
            tensors: q, k, v, out and dout.
        """
        self.drops = problem.dropout_p > 0
        self.spec = spec if self.drops else without_dropout(spec)
        self.problem = problem
        self.backend = backend
        self.arch = arch
        self.deterministic = deterministic
        self._sram = sram
        self._tiles = tiles
        self.device = tensors[0].device
        self.index = backends.index_of(self.device) if backend == "gpu" else 0
        found = map(backends.row_obstacle, _READ.values(), tensors)
        self._layout = static_layout(spec, problem, self.device)
        self._crooked = dict(zip(_READ, found, strict=True))
        # What is copied first is contiguous, which TMA takes.
        by_tma = {
            label: tensor
            for (name, label), tensor in zip(_READ.items(), tensors, strict=True)
            if name != "o" and self._crooked[name] is None
        }
        self._kernel_arch, self._reason = path_for(arch, **by_tma)
        self._bound: dict[tuple[str, ...], tuple[Bound, ...]] = {}
        self._tables: Tables | None = None  # for the kernels that read captured tensors
        # Where gradients are summed exactly: how many contributions may meet in an element.
        self._meetings: dict[str, int] = {}
        self._built = 0.0

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        dout: Tensor,
        dlse: Tensor | None,
        rng: Tensor | None = None,
        captured: Sequence[Tensor] = (),
        *,
        checkers: bool = True,
        order_seed: int | None = None,
    ) -> tuple[tuple[Tensor, ...], Any]:
        """dq, dk, dv and the needed gradients of captures; what `reports` makes Reports of.

        Args:
            captured: for each of the spec's tensors, in their order.
        """
        read = {
            name: tensor.resolve_neg() if tensor.is_neg() else tensor
            for name, tensor in zip(_READ, (q, k, v, out, dout), strict=True)
        }
        rng = rng.contiguous() if self.drops and rng is not None else None
        if dlse is not None and dlse.is_neg():
            dlse = dlse.resolve_neg()
        by_name = named(self.spec, captured) if captured else {}
        check_contents(self.spec, by_name, self.problem, self.device)
        if self._layout:
            by_name |= self._layout
        if self.backend == "tiled" and not self.problem.is_empty:
            return self._tiled(read, lse, dlse, rng, by_name)
        dq, dk, dv = (empty_rows(tensor, tensor.shape[3]) for tensor in (q, k, v))
        if self.spec.packed:  # rows beyond the last boundary are nobody's
            for gradient in (dq, dk, dv):
                gradient.zero_()
        sums = (ExactSums if self.deterministic else FloatSums)(self.spec, by_name)
        if self.problem.is_empty:
            sinks.add_without_keys(self.spec, sums, by_name, dlse)
            zeros = (dq.zero_(), dk.zero_(), dv.zero_(), *sums.gradients())
            return zeros, (self, (), (), 0.0, _EMPTY)
        copies = []
        for name, tensor in read.items():
            why = self._crooked[name] or backends.base_obstacle(_READ[name], tensor)
            if why is not None:
                read[name] = tensor.clone(memory_format=torch.contiguous_format)
                copies.append((name, f"{_READ[name]} was copied: {why}"))
        tensors: dict[str, Tensor | None] = {
            **read,
            "lse": lse.contiguous(),
            "dlse": None if dlse is None else dlse.contiguous(),
            "rows": q.new_empty((*q.shape[:3], 2), dtype=torch.float32),
            "rng": rng,
            "dq": dq,
            "dk": dk,
            "dv": dv,
        }
        if by_name:
            tensors |= pointers_of(by_name)
            tensors |= sums.pointers
        bound = self._bound.get(copied := tuple(name for name, _ in copies))
        if bound is None:
            bound = self._bind(copied, tensors, by_name)
        unrounded: tuple[Tensor, Plan] | None = None
        for kernel in bound:
            if sinks.SUMS in kernel.arguments.pointers:
                tensors[sinks.SUMS] = sinks.sums_for(kernel, q)
            if "dq_sum" in kernel.arguments.pointers:
                dq_sum = tensors["dq_sum"] = zero_sums(dq, kernel.build.plan)
                unrounded = dq_sum, kernel.build.plan
        emulation: dict[str, Any] = {"checkers": checkers, "order_seed": order_seed}
        counted: list[Counted] = []
        if self._tables is not None:
            made, counted = self._tables.made(self.backend, by_name, self.index, **emulation)
            tensors |= made
        for kernel, again in _launches(bound):
            if again and isinstance(sums, ExactSums):
                tensors |= sums.measured(self._meetings)
            start = time.perf_counter()
            counters = kernel.run(self.backend, tensors, self.index, **emulation)
            counted.append((kernel.build, counters, time.perf_counter() - start))
        if unrounded is not None:
            copy_sums(*unrounded, dq, self.problem.scale)
        sink_sums = tensors.get(sinks.SUMS)
        if sink_sums is not None:
            sinks.add_sums(self.spec, sums, by_name, sink_sums)
        built, self._built = self._built, 0.0
        told = tuple(text for _, text in copies)
        done = (self, tuple(counted), told, built, self._reason)
        return (dq, dk, dv, *sums.gradients()), done

    def _bind(
        self,
        copied: tuple[str, ...],
        tensors: backends.Tensors,
        captured: Mapping[str, Tensor],
    ) -> tuple[Bound, ...]:
        from flashgen.pipeline import build_backward

        start = time.perf_counter()
        tiles = self._tiles
        if self.backend == "gpu" and self._sram is None and not tiles:
            which = "deterministic" if self.deterministic else "backward"
            tiles = remembered(self.spec, self._kernel_arch, which, self.problem, self.index)
        kernels = build_backward(
            self.spec,
            self._kernel_arch,
            sram=self._sram,
            deterministic=self.deterministic,
            tiles=tiles,
        )
        self._built = time.perf_counter() - start
        p, packed = self.problem, self.spec.packed
        bound = self._bound[copied] = tuple(
            bind(kernel, p, tensors, captured, packed=packed) for kernel in kernels
        )
        if captured:
            self._tables = Tables(self.spec, self.arch, captured, bound)
        for kernel in kernels:
            if kernel.plan.kernel == "captured_exact":
                self._meetings = meetings_of(kernel, p, captured, packed=packed)
        return bound

    def _tiled(
        self,
        read: dict[str, Tensor],
        lse: Tensor,
        dlse: Tensor | None,
        rng: Tensor | None,
        captured: Mapping[str, Tensor],
    ) -> tuple[tuple[Tensor, ...], Any]:
        from flashgen import tiled

        p = self.problem
        q, k, v, out, dout = read.values()
        start = time.perf_counter()
        with quiet():
            gradients = tiled.backward(
                self.spec,
                q,
                k,
                v,
                out,
                lse,
                dout,
                dlse,
                scale=p.scale,
                q_offset=p.q_offset,
                k_offset=p.k_offset,
                scalars=dict(p.scalars),
                tensors=captured,
                dropout_p=p.dropout_p,
                rng=rng,
                **tiles_of(self.spec, self.arch, self._sram, self._tiles, backward=True),
            )
            of_operands = map(in_layout_of, (q, k, v), gradients[:3])
            of_captures = (gradient.contiguous() for gradient in gradients[3:])
            results = (*of_operands, *of_captures)
        seconds = time.perf_counter() - start
        return results, (self, ((None, None, seconds),), (), 0.0, _TILED)


def _launches(bound: Iterable[Bound]) -> Iterator[tuple[Bound, bool]]:
    """Kernels in the order of their launches, and whether each was launched before."""
    for kernel in bound:
        for turn in range(kernel.build.plan.launches):
            yield kernel, turn > 0


def reports(done: Any) -> tuple[tuple[Report, ...], tuple[str, ...]]:
    """The Reports of what `Backward.run` did, one per launch, and what was copied."""
    call, counted, copies, built, reason = done
    if not counted:
        return (Report("none", call.arch, 0, reason),), ()
    width = 0 if reason is _TILED else 16
    told = tuple(
        Report(call.backend, call.arch, width, reason, kernel, counters, built, seconds)
        for kernel, counters, seconds in counted
    )
    return told, copies


def prepare(
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
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
    deterministic: bool | None,
    needed: Sequence[bool] | None = None,
    sram: int | None = None,
    tiles: Mapping[str, Tile] = NO_TILES,
) -> Backward:
    """Checks a backward call and decides where it runs. Arguments as in `run_backward`.

    Args:
        needed: for each of the spec's tensors with grad=True, whether its gradient is; all are
            when None.

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
    check_gradients(q, v, out, lse, dout, dlse)
    where = backends.choose(backend, q.device)
    target = backends.target_of(arch, where, q.device)
    certain = settled(deterministic)
    if needed is not None and not all(needed):
        learned = [tensor.name for tensor in spec.tensors if tensor.grad]
        chosen = zip(learned, needed, strict=True)
        spec = learning(spec, frozenset(name for name, wanted in chosen if wanted))
    operands = (q, k, v, out, dout)
    return Backward(spec, problem, where, target, certain, *operands, sram=sram, tiles=tiles)


def settled(deterministic: bool | None) -> bool:
    """Whether gradients must have the same bits in every run; None leaves it to torch's switch.

    Raises:
        InputError: it is neither None nor a bool.
    """
    if deterministic is None:
        return torch.are_deterministic_algorithms_enabled()
    if isinstance(deterministic, bool):
        return deterministic
    raise InputError(
        "deterministic is neither True, False nor None",
        where="argument deterministic",
        numbers=f"given {deterministic!r}",
        way_out="None, to follow torch.use_deterministic_algorithms",
    )


def run_backward(
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None = None,
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
    deterministic: bool | None = None,
    sram: int | None = None,
    tiles: Mapping[str, Tile] = NO_TILES,
    check_memory: bool = True,
    order_seed: int | None = None,
) -> BackwardRun:
    """Gradients for those of out and lse; the forward call's own arguments otherwise.

    They are those of q, k and v, and of the spec's captured tensors with grad=True.

    Args:
        out, lse: what the forward call gave.
        dout: gradient of out, any strides.
        dlse: gradient of lse, float32; zeros when None.
        rng: the forward call's seed and offset; needed when dropout_p is not 0.
        deterministic: whether every run must give the same bits; None asks torch.
        sram, check_memory, order_seed: as in `flashgen.ops.run_forward`.
        tiles: of these kernels, as in `flashgen.plan.plan_backward`.

    Raises:
        InputError: an argument is wrong; nothing has run then.
        FlashgenError: planning, compiling or running failed.
    """
    tensors = with_layout(spec, tensors or {})
    call = prepare(
        spec,
        q,
        k,
        v,
        out,
        lse,
        dout,
        dlse,
        scale=scale,
        q_offset=q_offset,
        k_offset=k_offset,
        scalars=scalars or {},
        tensors=tensors,
        dropout_p=dropout_p,
        rng=rng,
        backend=backend,
        arch=arch,
        deterministic=deterministic,
        sram=sram,
        tiles=tiles,
    )
    captured = tuple(tensors[tensor.name] for tensor in spec.tensors)
    (dq, dk, dv, *more), done = call.run(
        q, k, v, out, lse, dout, dlse, rng, captured, checkers=check_memory, order_seed=order_seed
    )
    told, copies = reports(done)
    return BackwardRun(dq, dk, dv, told, copies, call.deterministic, tuple(more))
