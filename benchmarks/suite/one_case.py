"""One problem: every contender checked, then all that are right timed side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from benchmarks.suite import check
from benchmarks.suite.cases import PASSES, Case, flops
from benchmarks.suite.check import Inputs, Oracle, Tensors, Verdict
from benchmarks.suite.contenders import Contender, Prepared
from benchmarks.suite.context import Context, OutOfTime, Unusable
from benchmarks.suite.device import first_line
from benchmarks.suite.records import Row
from benchmarks.suite.timing import (
    LEAST_ROUNDS,
    MOST_ROUNDS,
    Call,
    Measured,
    measure,
    sets_needed,
)
from benchmarks.variants import live_elements

TRUSTED = ("sdpa", "cuDNN", "flex", "standard")
"""Peers that others are compared with, by the first word of their names."""


@dataclass
class Entrant:
    """A contender on its way through one case."""

    contender: Contender
    status: str = "ok"
    note: str = ""
    prepared: Prepared | None = None
    verdict: Verdict | None = None
    described: tuple[str, str] = ("", "")  # its code path and plan
    rows: list[Row] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.contender.name


def run_case(
    context: Context,
    case: Case,
    contenders: Sequence[Contender],
    *,
    passes: Sequence[str] = PASSES,
    seconds: float = 2.0,
    note: str = "",
) -> None:
    """Checks, times and records ``case``, unless the journal says that this was done.

    Args:
        seconds: the time for the timing of all passes together.
        note: the note of rows that have no other.

    Raises:
        Unusable: the device is gone; a new process goes on behind what was being done.
    """
    if context.journal.done(case.id):
        return
    try:
        _run_case(context, case, contenders, passes, seconds, note)
    except Unusable:
        raise
    except OutOfTime as step:
        context.journal.skipped(f"{step}, and what follows it in this case")
    except Exception as error:
        # Out of memory in the oracle, say: the cases behind this one are not lost with it.
        context.usable()
        context.journal.failed(f"{case.id}: {first_line(error)}")
    context.device.free()


def _run_case(
    context: Context,
    case: Case,
    contenders: Sequence[Contender],
    passes: Sequence[str],
    seconds: float,
    note: str,
) -> None:
    journal = context.journal
    entrants = [Entrant(contender) for contender in contenders]
    with journal.step(case.id):
        learnt = "backward" in passes
        sets = sets_needed(case.bytes * (2 if learnt else 1), context.device.l2_bytes)
        inputs = [
            check.make_inputs(case, context.device.torch, seed, learnt=learnt)
            for seed in range(sets)
        ]
        _admit(context, case, entrants, inputs[0], learnt)
        live = live_elements(
            case.mods_of({**dict(case.scalars), **case.tensors(context.device.torch)}),
            *(case.batch, case.heads_q, case.seq_q, case.seq_k, context.device.torch),
        )
        for pass_ in passes:
            step = f"{case.id}, {pass_}"
            if journal.done(step):
                continue
            if context.budget.out:
                raise OutOfTime(step)
            with journal.step(step):
                # Of the time of one case, backward and both are worth more: they are longer.
                share = {"forward": 0.3, "backward": 0.35, "both": 0.35}[pass_]
                rows = _timed(context, case, entrants, inputs, pass_, live, seconds * share)
                context.writer.speed(row | {"note": row["note"] or note} for row in rows)


def _admit(
    context: Context, case: Case, entrants: list[Entrant], inputs: Inputs, learnt: bool
) -> None:
    """Prepares and checks each entrant; sets its status."""
    oracle = Oracle(case, inputs, backward=learnt)
    trusted: Tensors | None = None
    # Peers first: flashgen's whole result is compared with that of one that is right.
    for entrant in sorted(entrants, key=lambda entrant: entrant.contender.ours):
        contender = entrant.contender
        reason = contender.supports(case, context.device)
        if reason is not None:
            entrant.status, entrant.note = "unsupported", reason
            continue
        step = f"{case.id}, check of {contender.name}"
        if context.budget.out:
            raise OutOfTime(step)
        lost = context.journal.lost(step)
        if lost is not None:
            entrant.status, entrant.note = "crashed", lost
            context.journal.failed(f"{case.id}: {contender.name} crashed: {lost}")
            continue
        context.journal.note("begin", step=step)
        try:
            entrant.prepared = contender.prepare(case, context.device)
            check.poison(inputs.q)
            try:
                results = _results(entrant.prepared, inputs, learnt)
            except Exception as error:
                if contender.ours or not learnt or "forward" not in entrant.prepared.passes:
                    raise
                # A peer that has no gradients of this case is timed without them.
                context.usable()
                results = _results(entrant.prepared, inputs, False)
                entrant.prepared = replace(entrant.prepared, passes=("forward",))
                entrant.note = f"no gradients: {first_line(error)}"
                if context.tiny:  # stand-ins have gradients: the adapter is wrong
                    context.journal.failed(f"{case.id}: {contender.name}: {entrant.note}")
            # Here, because another contender may call the same operator next.
            entrant.described = entrant.prepared.described()
            verdict = oracle.verdict(results, ours=contender.ours)
            if verdict.ok and entrant.prepared.undropped:
                p = case.mods.dropout
                drops = check.dropped_at_random(entrant.prepared.attend, inputs, p)
                verdict = check.worst_of((verdict, drops))
            if verdict.ok and trusted is not None:
                apart = check.compare_peers(results, trusted)
                verdict = verdict if apart.ok else apart
        except Exception as error:  # a contender may raise anything: it is recorded
            context.usable()
            entrant.status = "error" if contender.ours else "refused"
            entrant.note = first_line(error)
            if contender.ours or context.tiny:
                context.journal.failed(f"{case.id}: {contender.name}: {entrant.note}")
        else:
            entrant.verdict = verdict
            if not verdict.ok:
                entrant.status, entrant.note = "wrong", verdict.text
                context.journal.failed(f"{case.id}: {contender.name} is wrong: {verdict.text}")
            elif trusted is None and contender.name.split()[0] in TRUSTED:
                trusted = results
            results = {}
        context.journal.note("end", step=step)
    context.device.free()


def _results(prepared: Prepared, inputs: Inputs, learnt: bool) -> Tensors:
    out = (prepared.undropped or prepared.attend)(*inputs.learnt)
    if not learnt or "both" not in prepared.passes:
        return {"out": out}
    gradients = torch.autograd.grad(out, differentiated(prepared, inputs), inputs.dout)
    names = ("dq", "dk", "dv", *(f"d{name}" for name in prepared.learned))
    return {"out": out, **dict(zip(names, gradients, strict=True))}


def differentiated(prepared: Prepared, inputs: Inputs) -> tuple[torch.Tensor, ...]:
    """What a backward pass computes gradients of."""
    return (*inputs.learnt, *prepared.learned.values())


def _timed(
    context: Context,
    case: Case,
    entrants: list[Entrant],
    inputs: list[Inputs],
    pass_: str,
    live: int,
    seconds: float,
) -> list[Row]:
    """The rows of one pass, the peers of each row named."""
    lost = context.journal.lost(f"{case.id}, {pass_}")
    if lost is not None:
        context.journal.failed(f"{case.id}: crashed while {pass_} was timed: {lost}")
    calls: dict[str, Call] = {}
    refused: dict[str, str] = {}
    for entrant in entrants:
        prepared = entrant.prepared
        if entrant.status == "ok" and prepared and pass_ in prepared.passes and lost is None:
            try:
                calls[entrant.name] = call_of(prepared, inputs, pass_)
            except Exception as error:  # out of memory, above all: each keeps its own results
                context.usable()
                refused[entrant.name] = first_line(error)
                context.device.free()
    times: dict[str, Measured] = {}
    try:
        if calls:
            rounds = (1, 2) if context.tiny else (LEAST_ROUNDS, MOST_ROUNDS)
            graphs = pass_ == "forward"
            times = measure(
                context.device,
                calls,
                len(inputs),
                seconds,
                graphs=graphs,
                rounds=rounds,
                failures=refused,
            )
            context.usable()
    except Unusable:
        raise
    except Exception as error:
        context.usable()
        lost = first_line(error)
        context.journal.failed(f"{case.id}: {pass_} could not be timed: {lost}")
    calls.clear()
    rate = context.measured(f"matmul {case.dtype}", "rate")
    rows = []
    for entrant in entrants:
        if entrant.prepared and pass_ not in entrant.prepared.passes:
            continue
        row = _row(case, entrant, pass_, live)
        row["library"] = entrant.contender.library(context.device)
        if entrant.name in times:
            operations = flops(pass_, live, case.head_dim, case.head_dim_v)
            row |= _times(times, entrant, entrants, operations, rate)
        elif entrant.name in refused:
            row |= {"status": "refused", "note": refused[entrant.name]}
            if entrant.contender.ours:
                row["status"] = "error"
                context.journal.failed(f"{case.id}, {pass_}: {entrant.name}: {row['note']}")
        elif entrant.status == "ok":
            row |= {"status": "crashed", "note": lost or ""}
        rows.append(row)
    return rows


def call_of(prepared: Prepared, inputs: list[Inputs], pass_: str) -> Call:
    """A function of the number of a set of inputs that runs one pass on it."""
    attend = prepared.attend
    input_sets = inputs[:1] if prepared.materialises else inputs
    if pass_ == "forward":
        return lambda index: attend(*input_sets[index % len(input_sets)].learnt)
    if pass_ == "both":

        def both(index: int) -> Any:
            operands = input_sets[index % len(input_sets)]
            return torch.autograd.grad(
                attend(*operands.learnt), differentiated(prepared, operands), operands.dout
            )

        return both
    outs = [attend(*operands.learnt) for operands in input_sets]

    def backward(index: int) -> Any:
        number = index % len(input_sets)
        operands = input_sets[number]
        learnt = differentiated(prepared, operands)
        return torch.autograd.grad(outs[number], learnt, operands.dout, retain_graph=True)

    return backward


def _row(case: Case, entrant: Entrant, pass_: str, live: int) -> Row:
    path, plan = entrant.described if entrant.status == "ok" else ("", "")
    verdict = entrant.verdict
    return {
        **{
            name: getattr(case, name)
            for name in (
                *("group", "spec", "batch", "heads_q", "heads_kv", "seq_q", "seq_k"),
                *("head_dim", "head_dim_v", "dtype"),
            )
        },
        "scalars": " ".join(f"{name}={value}" for name, value in case.scalars),
        "live": live / case.scores,
        "pass": pass_,
        "contender": entrant.name,
        "path": path,
        "plan": plan,
        "status": entrant.status,
        "note": entrant.note,
        "max_error": verdict.error if verdict else None,
        "max_allowed": verdict.allowed if verdict else None,
    }


def _times(
    times: dict[str, Measured],
    entrant: Entrant,
    entrants: list[Entrant],
    operations: int,
    rate: float | None,
) -> Row:
    measured = times[entrant.name]
    timing = measured.timing
    tflops = operations / timing.p50 / 1e9
    peers = {
        other.name: times[other.name].timing.p50
        for other in entrants
        if other.name in times and other is not entrant and not other.contender.ours
    }
    peer = min(peers, key=lambda name: peers[name], default="")
    return {
        "method": measured.method,
        "samples": timing.samples,
        "ms_p20": timing.p20,
        "ms_p50": timing.p50,
        "ms_p80": timing.p80,
        "tflops": tflops,
        "of_matmul": tflops / rate if rate else None,
        "peer": peer,
        "ratio": peers[peer] / timing.p50 if peer else None,
    }
