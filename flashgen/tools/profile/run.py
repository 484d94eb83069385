"""Profiling a call: its kernels run in the emulator, and each launch becomes a `Profile`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

import ptx_emulator as emulator
from flashgen.calls.cpu.problem import array
from flashgen.calls.ops import BackwardRun, ForwardRun, Report, check, run_backward, run_forward
from flashgen.calls.runtime.calls import run_tangent
from flashgen.calls.runtime.programs import Variant, program_of
from flashgen.calls.runtime.reports import TangentRun
from flashgen.kernels.codegen import Param
from flashgen.kernels.pipeline import Build, build_minmax_tables
from flashgen.kernels.planner import Plan
from flashgen.kernels.visits.visited_tiles import KnownCall
from flashgen.shared.arch import facts
from flashgen.shared.call import CheckedCall, Tangents
from flashgen.shared.errors import InputError
from flashgen.shared.signature import BOUNDARIES, SPLIT
from flashgen.spec.language.spec import AttentionSpec
from flashgen.tools.profile.kernel_profile import Profile, Quantity, TensorTraffic
from flashgen.tools.profile.kernel_steps import lines_of, phases_of
from flashgen.tools.profile.prediction import (
    TERMS,
    LaunchPrediction,
    predict,
    predict_launch_of_splits,
)
from flashgen.tools.profile.roofline import clocks, roofline
from flashgen.tools.profile.split_calls import predict_splits
from ptx_emulator import Counters, Totals
from ptx_emulator.counters.l2 import simulate
from ptx_emulator.counters.ptx_lines import ptx_lines
from ptx_emulator.counters.recorder import ATOMIC, BufferTraffic

Tensor = torch.Tensor
Run = TypeVar("Run", BackwardRun, TangentRun)

_CALL = (
    *("scalars", "tensors", "scale", "q_offset", "k_offset", "dropout_p", "rng"),
    "split_size",
)


def profile_forward(
    spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, **options: Any
) -> tuple[ForwardRun, tuple[Profile, ...]]:
    """Runs the forward call in the emulator, without checkers, and profiles its launches.

    Args:
        q, k, v, options: as in `flashgen.calls.ops.run_forward`, without backend and check_memory.

    Returns:
        The result, and a profile of each launch in launch order; () where nothing is launched.

    Raises:
        FlashgenError: as `run_forward`.
    """
    refuse_lists(spec)
    with emulator.profiling() as launches:
        run = run_forward(spec, q, k, v, backend="emulator", check_memory=False, **options)
    size = run.report.split_size
    problem = problem_of_call(spec, (q, k, v), options | {"split_size": size}, run.rng)
    problem = problem.in_runs(run.report.run)
    packs = spec.paged and BOUNDARIES[0] in (options.get("tensors") or {})
    part = (SPLIT,) if size else ()
    spec = program_of(spec).variant(Variant(part=part, packs=packs))
    merge = () if run.report.merge is None else (run.report.merge,)
    return run, _profiles(spec, launches, (run.report, *merge), problem, options)


def profile_backward(
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None = None,
    **options: Any,
) -> tuple[BackwardRun, tuple[Profile, ...]]:
    """Runs the backward call in the emulator, without checkers, and profiles its launches.

    Arguments as in `flashgen.calls.ops.run_backward`, without backend and check_memory. Returns and
    raises as `profile_forward`.
    """
    return _profiled(run_backward, spec, (q, k, v), (out, lse, dout, dlse), options)


def profile_tangent(
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    moving: Tangents,
    **options: Any,
) -> tuple[TangentRun, tuple[Profile, ...]]:
    """Runs the tangent pass in the emulator, without checkers, and profiles its launches.

    Arguments as in `flashgen.calls.runtime.calls.run_tangent`, without backend and check_memory.
    Returns and raises as `profile_forward`.
    """
    return _profiled(run_tangent, spec, (q, k, v), (out, lse, moving), options)


def _profiled(
    run_pass: Callable[..., Run],
    spec: AttentionSpec,
    operands: tuple[Tensor, Tensor, Tensor],
    rest: tuple[Any, ...],
    options: dict[str, Any],
) -> tuple[Run, tuple[Profile, ...]]:
    """A pass after the forward one; ``rest`` are its other arguments by position."""
    with emulator.profiling() as launches:
        run = run_pass(spec, *operands, *rest, backend="emulator", check_memory=False, **options)
    problem = problem_of_call(spec, operands, options, options.get("rng"))
    has_dlse = run_pass is run_backward and rest[3] is not None
    return run, _profiles(spec, launches, run.reports, problem, options, dlse=has_dlse)


def refuse_lists(spec: AttentionSpec) -> None:
    """Raises InputError for a spec whose calls are computed by calls of other specs."""
    if spec.chooses:
        raise InputError(
            "a call in which queries choose their keys is not profiled or predicted",
            where=f"spec {spec.name}, {spec.block_sparse!r}",
            numbers="several calls of other specs compute it: in these a group of queries is a "
            "sequence, and a block of keys a page",
            way_out="flashgen run SPEC; python benchmarks/chosen_keys.py of a checkout counts and "
            "predicts such calls",
        )


def problem_of_call(
    spec: AttentionSpec,
    operands: tuple[Tensor, Tensor, Tensor],
    options: Mapping[str, Any],
    rng: Tensor | None = None,
) -> CheckedCall:
    """The problem of a call: its checked sizes and scalars.

    Args:
        options: as for `flashgen.calls.ops.run_forward`; options that are no part of a problem are
            ignored.
        rng: dropout's seed and offset, where the options have none.
    """
    call = {name: options[name] for name in _CALL if options.get(name) is not None}
    return check(spec, *operands, **call if rng is None else call | {"rng": rng})


def _profiles(
    spec: AttentionSpec,
    launches: Sequence[Counters],
    reports: Sequence[Report],
    problem: CheckedCall,
    options: Mapping[str, Any],
    dlse: bool = False,
) -> tuple[Profile, ...]:
    refuse_lists(spec)
    builds = [report.kernel for report in reports if report.kernel is not None]
    builds += build_minmax_tables(spec, reports[0].arch) if launches else ()
    by_name = {build.source.name: build for build in builds}
    columns = {spec.head_dim_v, *(build.plan.head_dim_v for build in builds if build.plan.block_k)}
    if len(columns) > 1:
        raise InputError(
            "a call whose launches compute some columns of v each has no profile of its own",
            where=f"{spec.name}, head_dim_v {spec.head_dim_v}",
            numbers=f"{len(launches)} launches, of {min(columns)} columns and more",
            way_out=f"the profile of a part: head_dim_v={min(columns)}",
        )
    captured = {name: array(tensor) for name, tensor in (options.get("tensors") or {}).items()}
    call, splits = KnownCall(spec, problem, captured), None
    if spec.is_served and launches:
        forward = builds[0]
        splits = predict_splits(call, forward.analysis.mask, forward.plan)
    profiles = []
    for counters in launches:
        build = by_name[counters.kernel]
        if spec.is_served:
            prediction = predict_launch_of_splits(build, splits)
        else:
            prediction = predict(call, build, dlse)
        profiles.append(profile_of(build, counters, prediction))
    return tuple(profiles)


def profile_of(build: Build, counters: Counters, prediction: LaunchPrediction) -> Profile:
    """The profile of one launch from its counters."""
    plan, source = build.plan, build.source
    arch = facts(plan.arch)
    totals = counters.total()
    recorded = counters.recorded
    assert recorded is not None, "the counters are those of a profiled launch"
    buffers = [buffer for buffer in recorded.buffers if any(buffer.issued)]
    tensors = _tensors(source.params, buffers, prediction)
    predicted = [tensor.issued.predicted for tensor in tensors]
    complete = None not in predicted
    blocks = len(recorded.trace.starts) - 1
    resident = min(blocks, arch.sms * plan.blocks_per_sm)
    l2 = simulate(recorded.trace, arch.l2_bytes, resident)
    added = sum(buffer.issued[ATOMIC] for buffer in buffers)
    return Profile(
        kernel=source.name,
        plan=plan,
        arch=arch,
        blocks=blocks,
        tensors=tensors,
        issued=Quantity(
            "issued",
            "B",
            totals.global_bytes,
            sum(number or 0 for number in predicted) if complete else None,
        ),
        distinct=Quantity(
            "distinct",
            "B",
            sum(tensor.distinct for tensor in tensors),
            prediction.distinct if complete else None,
        ),
        work=_work(plan, totals, added, prediction),
        totals=totals,
        l2=l2,
        roofline=roofline(arch, totals, added, l2, plan.path),
        phases=phases_of(source, counters.by_line(outermost=True)),
        lines=lines_of(source, counters.by_line()),
        build=build,
        ptx=ptx_lines(emulator.load(build.ptx, source.name), counters),
        duration=prediction.duration,
    )


def _tensors(
    params: Sequence[Param], buffers: Sequence[BufferTraffic], prediction: LaunchPrediction
) -> tuple[TensorTraffic, ...]:
    order = [param.name for param in params]
    traffic = []
    for buffer in buffers:
        # A label lists the indices of the parameters that point into the buffer.
        names = [order[int(label.rpartition(" ")[2])] for label in buffer.label.split(" and ")]
        predicted = None
        if all(name in prediction.bytes for name in names):
            predicted = sum(prediction.bytes[name] for name in names)
        name = ", ".join(names)
        traffic.append(
            TensorTraffic(
                name,
                Quantity(name, "B", sum(buffer.issued), predicted),
                buffer.read + buffer.written,
                sum(buffer.sectors),
                buffer.sectors_least,
            )
        )
    return tuple(sorted(traffic, key=lambda tensor: order.index(tensor.name.partition(",")[0])))


def _work(
    plan: Plan, totals: Totals, added: int, prediction: LaunchPrediction
) -> tuple[Quantity, ...]:
    """Multiply-adds, and the clocks of each term of the plan's cost."""
    clocks_by_term = clocks(facts(plan.arch), totals, added, plan.path)
    macs = totals.tensor_multiply_adds
    quantities = [Quantity("multiply-adds", "", macs, prediction.multiply_adds)]
    quantities += [
        Quantity(term, "clk", clocks_by_term[term], prediction.clocks.get(term)) for term in TERMS
    ]
    return tuple(q for q in quantities if q.counted or q.predicted)
