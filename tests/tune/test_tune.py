"""Tiles are ranked by predicted time, checked, timed alternately, and the winner is stored."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

import flashgen as fg
from flashgen.calls.ops import check
from flashgen.calls.ops import run_forward as run_on_emulator
from flashgen.calls.runtime import backends
from flashgen.calls.runtime import tuned_tiles as tuned
from flashgen.calls.runtime.forward import PreparedForward
from flashgen.calls.runtime.prepared_call import Setup
from flashgen.calls.runtime.programs import program_of
from flashgen.calls.runtime.tangent import PreparedTangent
from flashgen.kernels.compile import cache
from flashgen.kernels.compile.cache import CacheWarning
from flashgen.kernels.planner import (
    TangentPlanRequest,
    Tile,
    plan,
    plan_backward,
    plan_tangent,
)
from flashgen.kernels.planner.backward_schemes import streaming_kernels_of
from flashgen.kernels.planner.duration import duration_of
from flashgen.kernels.planner.models.fitted_common import LAUNCH_GAP_US, OVERLAP_GAP_US
from flashgen.kernels.planner.traffic import LaunchSizes, Walk
from flashgen.kernels.visits.visited_tiles import KnownCall
from flashgen.shared.call import CheckedCall, Inputs, LaunchOptions, Operands
from flashgen.tools.cli import app
from flashgen.tools.tune import measure
from flashgen.tools.tune.measure import checked, fastest
from flashgen.tools.tune.rank import TileChoice, by_time, derived, rank
from tests.support.examples import spec_path, values_of
from tests.support.judged import plain
from tests.support.shapes import Case
from tests.support.tiers import slow

CAUSAL = fg.load(spec_path("causal"))
NARROW = CAUSAL.replace(head_dim=16)  # whose kernels are compiled in less time
ARCH = "sm_80"


def problem(batch=4, heads=16, seq=4096, **more) -> CheckedCall:
    sizes = {"batch": batch, "heads_q": heads, "heads_kv": heads, "seq_q": seq, "seq_k": seq}
    numbers = {"q_offset": 0, "k_offset": 0, "scale": 0.125, "scalars": {}}
    return CheckedCall(**{"head_dim": 64, "head_dim_v": 64, **numbers, **sizes, **more})


NARROW_PROBLEM = problem(head_dim=16, head_dim_v=16)


@pytest.mark.slow
@pytest.mark.parametrize("pass_name", tuned.PASSES)
def test_choices_come_by_predicted_time(pass_name):
    choices = rank(KnownCall(CAUSAL, problem(seq=1024)), ARCH, pass_name=pass_name)
    times = [choice.seconds for choice in choices]
    assert times == sorted(times)
    for choice in choices:
        launches = [plan.launches for plan in choice.plans]
        assert launches == [1] * len(choice.plans)
        with_tiles = sum(each.seconds for each in choice.durations)
        if pass_name in ("forward", "tangent"):
            assert choice.seconds == pytest.approx(with_tiles)
        kernels = set(choice.tiles)
        assert kernels in ({"forward"}, {"tangent"}, {"fused"}, {"dkdv", "dq"})
        for alone in ("forward", "tangent"):
            assert (kernels == {alone}) == (pass_name == alone)
        assert pass_name != "deterministic" or kernels == {"dkdv", "dq"}


@pytest.mark.slow
def test_the_predicted_time_includes_the_mask_and_the_rounds_of_blocks():
    full = rank(KnownCall(fg.AttentionSpec(head_dim=64), problem()), ARCH)
    causal = rank(KnownCall(CAUSAL, problem()), ARCH)
    assert 1.7 < full[0].seconds / causal[0].seconds < 2.1
    best = full[0].plans[0]
    sizes = LaunchSizes(4, 16, 16, 4096, 4096)
    assert full[0].seconds == duration_of(best, [Walk(sizes)]).seconds


@pytest.mark.parametrize("arch", [slow("sm_80"), "sm_90a"])
def test_backward_choices_count_the_kernels_without_tiles_and_the_gaps_between_launches(arch):
    call, sizes = KnownCall(NARROW, NARROW_PROBLEM), LaunchSizes(4, 16, 16, 4096, 4096)
    gap = (LAUNCH_GAP_US if arch == "sm_80" else OVERLAP_GAP_US) * 1e-6
    others = {}
    for choice in rank(call, arch, pass_name="backward"):
        scheme = "split" if "dq" in choice.tiles else "fused"
        with_tiles = sum(each.seconds for each in choice.durations)
        others[scheme] = choice.seconds - with_tiles - 2 * gap
        if scheme == "fused":
            plans = streaming_kernels_of(NARROW, choice.plans[0])
            streaming = sum(duration_of(each, [Walk(sizes)]).seconds for each in plans)
            assert [each.kernel for each in plans] == ["delta", "convert_dq"]
            assert others[scheme] == pytest.approx(streaming)
    assert others["fused"] > others["split"] > 0  # which has no sums to clear and to convert


def test_few_rows_have_smaller_tiles_than_the_planner_chooses_for_all_shapes():
    choices = rank(KnownCall(CAUSAL, problem(1, 1, 256)), ARCH)
    own = derived(CAUSAL, ARCH, "forward", choices)
    assert own in choices
    assert own.tiles == {"forward": plan(CAUSAL, ARCH).tile}
    assert choices[0].plans[0].block_q < own.plans[0].block_q
    assert choices[0].seconds < 0.7 * own.seconds


@pytest.mark.slow
def test_heads_that_are_not_alike_are_ranked_by_what_each_walks():
    path = spec_path("per_head_window")
    spec = fg.load(path)
    values = values_of(path, Case(512, 512, heads_q=4, heads_kv=4))
    arrays = {name: tensor.numpy() for name, tensor in values["tensors"].items()}
    sizes = problem(1, 4, 512, scalars=values["scalars"])
    narrow = rank(KnownCall(spec, sizes, arrays), ARCH)
    far = {name: array + 600 for name, array in arrays.items()}
    wide = rank(KnownCall(spec, sizes, far), ARCH)
    assert narrow[0].seconds < wide[0].seconds


def test_no_time_is_predicted_for_packed_sequences():
    spec = fg.load(spec_path("variable_length"))
    choices = rank(KnownCall(spec, problem()), ARCH)
    assert not by_time(spec)
    assert [choice.seconds for choice in choices] == [c.plans[0].cost for c in choices]


def inputs(seq_q=40, seq_k=50) -> Inputs:
    call = plain(NARROW, seq_q, seq_k)
    options = {"scalars": {}, "tensors": {}}
    return Inputs(call.qkv, (call.gradients[0], None), options, call.moving())


HOW = {"backend": "emulator", "arch": ARCH}


@pytest.mark.slow
@pytest.mark.parametrize("pass_name", tuned.PASSES)
def test_correct_choices_are_timed_alternately_and_the_fastest_is_first(pass_name):
    choices = rank(KnownCall(NARROW, NARROW_PROBLEM), ARCH, pass_name=pass_name)[:2]
    candidates = checked(choices, NARROW, inputs(), pass_name, **HOW)
    assert [each.refused for each in candidates] == ["", ""]
    calls = []

    def timer(call):
        if call not in calls:
            calls.append(call)
            call()
        return 1.0 - 0.25 * calls.index(call)

    measured = fastest(candidates, timer, NARROW, inputs(), pass_name, **HOW)
    assert [each.choice for each in measured] == [choices[1], choices[0]]
    assert [each.seconds for each in measured] == [0.75, 1.0]


@pytest.mark.slow
def test_a_wrong_choice_is_never_timed(monkeypatch):
    def wrong(spec, q, k, v, *, tiles, **options):
        run = run_on_emulator(spec, q, k, v, tiles=tiles, **options)
        return replace(run, out=run.out + (tiles["forward"].warps == 2))

    monkeypatch.setattr(measure, "run_forward", wrong)
    ranked = rank(KnownCall(NARROW, NARROW_PROBLEM), ARCH)
    choices = [next(c for c in ranked if c.plans[0].warps == warps) for warps in (2, 4)]
    candidates = checked(choices, NARROW, inputs(), "forward", **HOW)
    assert [bool(each.refused) for each in candidates] == [True, False]
    assert candidates[0].refused.startswith("out: ")
    measured = fastest(candidates, lambda call: 1.0, NARROW, inputs(), "forward", **HOW)
    assert [each.seconds for each in measured] == [1.0, None]


def test_a_choice_that_does_not_fit_is_refused_in_words():
    plans = (replace(plan(NARROW, ARCH), block_k=128, blocks_per_sm=32),)
    (found,) = checked([TileChoice(plans, math.nan)], NARROW, inputs(), "forward", **HOW)
    assert found.refused == "PlanError: the kernel cannot have the given tile"


def test_shapes_of_a_class_share_a_winner():
    classes = {tuned.shape_class(problem(2, 16, seq)) for seq in (1025, 1500, 2048)}
    assert classes == {"bh32-g1-q2048-k2048"}
    assert tuned.shape_class(problem(2, 16, 2049)) not in classes
    assert tuned.shape_class(problem(4, 16, 2048)) not in classes


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tuned, "gpu_name", lambda index: "NVIDIA Test (80 GB)")
    return tmp_path


SMALLER = Tile(64, 4, 1, 2)


def keep(root, pass_name="forward", tiles=None, **problem_options):
    winner = tuned.Winner(tiles or {"forward": SMALLER}, 1e-3, 2e-3)
    where = tuned.tiles_file(
        root, "NVIDIA Test (80 GB)", CAUSAL, ARCH, pass_name, problem(**problem_options)
    )
    assert tuned.write(where, winner)
    assert tuned.read(where) == winner
    return where


def test_a_winner_is_remembered_for_its_gpu_spec_pass_and_shape_class(folder, monkeypatch):
    def stored(spec=CAUSAL, arch=ARCH, pass_name="forward", **sizes):
        return tuned.remembered(spec, arch, pass_name, problem(**sizes), 0)

    assert stored() == {}
    where = keep(folder)
    assert "NVIDIA-Test-80-GB" in str(where)
    assert stored() == stored(seq=3000) == {"forward": SMALLER}
    assert stored(seq=512) == stored(pass_name="backward") == stored(arch="sm_90") == {}
    assert stored(spec=CAUSAL.replace(dtype="float32")) == {}
    monkeypatch.setattr(tuned, "gpu_name", lambda index: "another")
    assert stored() == {}


def test_calls_on_the_gpu_take_the_winner(folder, monkeypatch):
    monkeypatch.setattr(backends, "index_of", lambda device: 0)
    q, k, v = plain(CAUSAL, 100, 100).qkv
    call = {"scale": None, "q_offset": 0, "k_offset": 0, "scalars": {}}
    stated = check(CAUSAL, q, k, v, **call)
    target = backends.Target("gpu", ARCH, q.device, 0)
    setup = Setup(program_of(CAUSAL), stated, target)
    forward = PreparedForward(setup, Operands(q, k, v))
    tensors = {"q": q, "k": k, "v": v, "o": q}
    assert forward._kernel(16, tensors, {}).bound.build.plan.tile == plan(CAUSAL, ARCH).tile
    where = tuned.tiles_file(folder, "NVIDIA Test (80 GB)", CAUSAL, ARCH, "forward", stated)
    tuned.write(where, tuned.Winner({"forward": SMALLER}, 1e-3, 2e-3))
    assert forward._kernel(16, tensors, {}).bound.build.plan.tile == SMALLER
    launch = LaunchOptions(sram=60_000)
    given = PreparedForward(setup._replace(launch=launch), Operands(q, k, v))
    assert given._kernel(16, tensors, {}).bound.build.plan.tile != SMALLER, "sram plans for itself"


def test_operands_that_tma_cannot_take_do_not_get_a_winner_of_its_path(folder, monkeypatch):
    monkeypatch.setattr(backends, "index_of", lambda device: 0)
    q, k, v = plain(CAUSAL, 100, 100).qkv
    q = torch.cat((q, q), 1)
    expanded = [tensor.expand(1, 2, 100, 64) for tensor in (k, v)]
    stated = check(CAUSAL, q, k, v, scale=None, q_offset=0, k_offset=0, scalars={})
    hopper = plan(CAUSAL, "sm_90a").tile
    where = tuned.tiles_file(folder, "NVIDIA Test (80 GB)", CAUSAL, "sm_90a", "forward", stated)
    tuned.write(where, tuned.Winner({"forward": hopper}, 1e-3, 2e-3))
    target = backends.Target("gpu", "sm_90a", q.device, 0)
    setup = Setup(program_of(CAUSAL), stated, target)
    forward = PreparedForward(setup, Operands(q, *expanded))
    bound = forward._kernel(16, {"q": q, "k": expanded[0], "v": expanded[1], "o": q}, {}).bound
    assert bound.build.plan.path == "sm_80"


def test_tangents_of_all_operands_have_the_winner(folder, monkeypatch):
    monkeypatch.setattr(backends, "index_of", lambda device: 0)
    call = plain(CAUSAL, 100, 100)
    stated = check(CAUSAL, *call.qkv, scale=None, q_offset=0, k_offset=0, scalars={})
    own = plan_tangent(TangentPlanRequest.for_all(CAUSAL, ARCH)).tile
    smaller = Tile(16, 4, 1, 1)
    assert own != smaller
    where = tuned.tiles_file(folder, "NVIDIA Test (80 GB)", CAUSAL, ARCH, "tangent", stated)
    tuned.write(where, tuned.Winner({"tangent": smaller}, 1e-3, 2e-3))
    target = backends.Target("gpu", ARCH, call.qkv[0].device, 0)
    setup = Setup(program_of(CAUSAL), stated, target)
    read = dict(zip("qkv", call.qkv, strict=True))
    read |= dict.fromkeys(("o", "o_tangent"), call.qkv[0])
    for names in (("q", "k", "v"), ("q",)):
        tensors = read | {f"{x}_tangent": read[x] if x in names else None for x in "qkv"}
        bound, _, _ = PreparedTangent(setup, names)._bind(tensors, {})
        assert (bound.build.plan.tile == smaller) == (names == ("q", "k", "v"))


def test_a_backward_winner_names_all_kernels_of_its_scheme(folder):
    chosen = plan_backward(CAUSAL, ARCH, deterministic=True)
    tiles = {each.kernel: each.tile for each in chosen.kernels[1:]}
    keep(folder, "deterministic", tiles)
    assert tuned.remembered(CAUSAL, ARCH, "deterministic", problem(), 0) == tiles


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", "holds no tiles"),
        ("[]", "holds no tiles"),
        ("null", "holds no tiles"),
        ("[" * 200_000, "nested too deep"),
        ('{"tiles": {"forward": {"step": 1}}}', "holds no tiles"),
        (
            '{"tiles": {"forward": null}, "seconds": 1, "derived_seconds": 1, "version": "1"}',
            "None",
        ),
    ],
)
def test_a_damaged_record_is_reported_and_ignored(folder, text, expected):
    where = keep(folder)
    where.write_text(text)
    with pytest.warns(CacheWarning, match=expected):
        assert tuned.remembered(CAUSAL, ARCH, "forward", problem(), 0) == {}


def test_a_record_of_another_version_or_of_impossible_tiles_is_reported_and_ignored(folder):
    where = keep(folder)
    record = json.loads(where.read_text())
    where.write_text(json.dumps(record | {"version": "0.0.0"}))
    with pytest.warns(CacheWarning, match="tune again"):
        assert tuned.remembered(CAUSAL, ARCH, "forward", problem(), 0) == {}
    record["tiles"]["forward"]["step"] = 20
    where.write_text(json.dumps(record))
    with pytest.warns(CacheWarning, match="unusable"):
        assert tuned.remembered(CAUSAL, ARCH, "forward", problem(), 0) == {}


def test_without_a_disk_cache_nothing_is_remembered(monkeypatch):
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", "off")
    assert tuned.remembered(CAUSAL, ARCH, "forward", problem(), 0) == {}


def test_clearing_the_cache_forgets_winners(folder):
    where = keep(folder)
    cache.clear(folder)
    assert not where.exists()


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine measures")
def test_the_command_ranks_and_says_that_it_only_ranked():
    options = ("--shape", "1,2,256", "--show", "3")
    for more in ((), ("--backward",), ("--backward", "--deterministic", "--dropout", "0.1")):
        result = CliRunner().invoke(app, ["tune", str(spec_path("causal")), *options, *more])
        assert result.exit_code == 0, result.output
        assert "ranked by the model, not measured: " in result.output
        assert "the planner's, for all shapes" in result.output
        assert "quantisation = makespan*slots/(steps + begun*work_tiles)" in result.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine measures")
def test_the_command_plans_for_other_machines():
    options = ["--shape", "1,2,256", "--arch", "sm_86", "--sram", "49152", "--head-dim", "256"]
    result = CliRunner().invoke(app, ["tune", str(spec_path("causal")), *options])
    assert result.exit_code == 0, result.output
    assert "sm_86" in result.output


def test_the_command_refuses_where_nothing_fits():
    options = ["--sram", "1000", "--shape", "1,1,64"]
    result = CliRunner().invoke(app, ["tune", str(spec_path("causal")), *options])
    assert result.exit_code == 2


@pytest.mark.parametrize(
    ("name", "more", "expected"),
    [
        ("causal", (), "predicted forward: "),
        ("causal", ("--backward",), "predicted fused: "),
        ("causal", ("--tangent",), "predicted tangent: "),
        ("document", (), "full_rounds + work*quantisation/rounds)"),
        ("sliding_window", ("--scalar", "window=64"), "predicted forward: "),
        ("variable_length", (), "no time is predicted"),
    ],
)
def test_a_plan_predicts_the_time_of_its_launches_for_a_shape(name, more, expected):
    result = CliRunner().invoke(app, ["plan", str(spec_path(name)), "--shape", "1,2,256", *more])
    assert result.exit_code == 0, result.output
    assert expected in result.output
