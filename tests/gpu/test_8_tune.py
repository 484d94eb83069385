"""On a GPU: tiles are checked, timed and kept, and calls take the fastest.

A dry run times calls of the emulator by the clock on the wall, and keeps its results for a GPU of
its own.
"""

from __future__ import annotations

import time

import pytest
import torch

import flashgen as fg
from flashgen.calls.ops import run_backward, run_forward
from flashgen.calls.runtime import tuned_tiles as tuned
from flashgen.calls.runtime.calls import run_tangent
from flashgen.calls.runtime.tuned_tiles import Winner
from flashgen.kernels.visits.visited_tiles import KnownCall
from flashgen.shared.call import Inputs, Tangents
from flashgen.tools.profile.run import problem_of_call
from flashgen.tools.tune.measure import checked, fastest, on_gpu
from flashgen.tools.tune.rank import derived, rank
from tests.support import gpu_device as gpu
from tests.support.examples import spec_path

SEQ, HEADS, BATCH, MOST = gpu.pick((4096, 16, 4, 6), (48, 1, 1, 1))
SMALL = gpu.pick(333, 40)


def by_the_wall(call) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


TIMER = gpu.pick(on_gpu, by_the_wall)


def inputs(spec, batch, heads, seq) -> Inputs:
    generator = torch.Generator().manual_seed(0)
    shape = (batch, heads, seq, spec.head_dim)
    q, k, v, dout, *moving = (
        torch.randn(shape, generator=generator).to(getattr(torch, spec.dtype)).to(gpu.DEVICE)
        for _ in range(7)
    )
    options = {"scalars": {}, "tensors": {}}
    return Inputs((q, k, v), (dout, None), options, Tangents(*moving))


@pytest.mark.parametrize("pass_name", tuned.PASSES)
def test_the_winner_is_right_remembered_and_taken(pass_name, tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path))
    spec, how = fg.load(spec_path("causal")), {"backend": gpu.BACKEND, "arch": gpu.arch()}
    given = inputs(spec, BATCH, HEADS, SEQ)
    problem = problem_of_call(spec, given.operands, given.options)
    ranked = rank(KnownCall(spec, problem), gpu.arch(), pass_name=pass_name)
    own = derived(spec, gpu.arch(), pass_name, ranked)
    tried = [own, *(each for each in ranked[:MOST] if each is not own)]
    candidates = checked(tried, spec, inputs(spec, 1, 2, SMALL), pass_name, **how)
    assert not [
        each.refused for each in candidates if each.refused and "spills" not in each.refused
    ]
    measured = fastest(candidates, TIMER, spec, given, pass_name, **how)
    for each in measured:
        print(
            pass_name, each.choice.tiles, "predicted", each.choice.seconds, "measured", each.seconds
        )
    winner = measured[0]
    assert winner.seconds is not None
    if gpu.DRY:
        monkeypatch.setattr(tuned, "gpu_name", lambda index: "dry run")
    where = tuned.tiles_file(tmp_path, tuned.gpu_name(0), spec, gpu.arch(), pass_name, problem)
    assert tuned.write(where, Winner(winner.choice.tiles, winner.seconds, 0.0))
    assert tuned.remembered(spec, gpu.arch(), pass_name, problem, 0) == winner.choice.tiles
    if gpu.DRY:
        return
    (q, k, v), (dout, _) = given.operands, given.gradients
    forward = run_forward(spec, q, k, v)
    plans = [forward.plan]
    if pass_name == "tangent":
        run = run_tangent(spec, q, k, v, forward.out, forward.lse, given.tangents)
        plans = [report.kernel.plan for report in run.reports]
    elif pass_name != "forward":
        run = run_backward(
            spec,
            q,
            k,
            v,
            forward.out,
            forward.lse,
            dout,
            deterministic=pass_name == "deterministic",
        )
        plans = [report.kernel.plan for report in run.reports if report.kernel.plan.block_k]
    assert {plan.kernel: plan.tile for plan in plans} == winner.choice.tiles
