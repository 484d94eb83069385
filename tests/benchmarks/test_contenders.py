"""Who is timed: what contenders support, their masks and scores, and that wrong ones are caught."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import flashgen as fg
from benchmarks.suite import check
from benchmarks.suite.cases import (
    PASSES,
    ROOT,
    Case,
    all_spec_names,
    full_list,
    grid,
    make,
    tiny_list,
)
from benchmarks.suite.contenders import Prepared, contenders
from benchmarks.suite.contenders.flex import flexes
from benchmarks.suite.contenders.ours import Flashgen, flashgens, spec_of
from benchmarks.suite.contenders.sdpa import dense_mask, sdpas
from benchmarks.suite.contenders.served import Served
from benchmarks.suite.contenders.standard import Standard
from benchmarks.suite.context import Context, Unusable
from benchmarks.suite.device import Device
from benchmarks.suite.journal import Journal, entries
from benchmarks.suite.one_case import run_case
from benchmarks.suite.parts.sparsity import with_share
from benchmarks.suite.records import Stamp, Writer, read
from benchmarks.suite.supervisor import Budget
from benchmarks.variants import FORMS
from flashgen import reference
from tests.support.tiers import slow

DEVICE = Device()
CPU = torch.device("cpu")


class LikeAGpu(Device):
    """What `supports` looks at, of a GPU that is not there."""

    kind = "gpu"

    def __init__(self) -> None:
        super().__init__()
        self.memory_bytes = 140 << 30


GPU = LikeAGpu()
SDPA = {contender.name.removeprefix("sdpa "): contender for contender in sdpas()}
DENSE = SDPA["cuDNN through torch, dense mask"]
FLEX, FLASH, AUTOTUNED = flexes()


def small(spec: str, *, seq_q: int = 24, seq_k: int = 40, dtype: str = "float32") -> Case:
    return make("x", spec, 2, 4, 2, seq_q, seq_k, 16, dtype=dtype)


def captures(name: str) -> bool:
    return bool(fg.load(ROOT / f"specs/{name}.py").tensors)


def has_softmax(name: str) -> bool:  # FlexAttention has no other weights
    return fg.load(ROOT / f"specs/{name}.py").is_softmax


def test_every_spec_without_tensors_has_a_form_in_torch_so_that_it_is_measured() -> None:
    without = set(all_spec_names()) - set(FORMS)
    missing = sorted(name for name in without if not captures(name) and has_softmax(name))
    assert missing == [], "benchmarks/variants.py: mask, score and scalars of these specs"


MADE_OF_SEVERAL = sorted({case.spec for case in full_list()} - set(FORMS))


@pytest.mark.parametrize("name", [*sorted(set(all_spec_names()) & set(FORMS)), *MADE_OF_SEVERAL])
def test_a_form_is_its_spec(name: str) -> None:
    # The suite's own attention with the form against the oracle's with the spec: not one element
    # of S may differ, and scores by rounding alone.
    case = small(name, seq_q=53 if name == "variable_length" else 37, seq_k=53)
    case = replace(case, dim_v=24, batch=1 if name == "variable_length" else 2)
    inputs = check.make_inputs(case, CPU, seed=1)
    q, k, v = (tensor.detach() for tensor in inputs.learnt)
    scalars = {key: value for key, value in case.scalars if key != "dropout_p"}
    given: Any = {"scalars": scalars, "tensors": case.tensors(CPU)}
    given["tensors"] = {key: tensor.detach() for key, tensor in given["tensors"].items()}
    exact, _ = reference.attention(spec_of(case), q, k, v, **given)
    wanted = reference.gradients(spec_of(case), q, k, v, inputs.dout, **given)
    oracle = check.Oracle(case, inputs)
    results = dict(zip(("out", "dq", "dk", "dv"), (exact, *wanted[:3]), strict=True))
    for key, tensor in oracle.sliced(results).items():
        torch.testing.assert_close(oracle._exact[key], tensor, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", [*sorted(FORMS), "causal+alibi"])
def test_standard_attention_agrees_with_the_oracle_and_so_does_the_dense_mask(name: str) -> None:
    case = small(name, seq_q=40, seq_k=40)
    inputs = check.make_inputs(case, CPU, seed=2)
    out = Standard().prepare(case, DEVICE).attend(*inputs.learnt)
    gradients = torch.autograd.grad(out, inputs.learnt, inputs.dout)
    results = {"out": out, **dict(zip(("dq", "dk", "dv"), gradients, strict=True))}
    verdict = check.Oracle(case, inputs).verdict(results, ours=False)
    assert verdict.ok, verdict.text
    if SDPA["math"].supports(case, DEVICE) is None:
        other = SDPA["math"].prepare(case, DEVICE).attend(*inputs.learnt)
        torch.testing.assert_close(other, out, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("paged", [slow(False), True])
def test_split_and_paged_decoding_equal_plain_attention(paged: bool) -> None:
    case = make("decode", "full", 2, 4, 2, 1, 96, 32)
    inputs = check.make_inputs(case, CPU, seed=3, learnt=False)
    served = Served("sm_80", paged=paged)
    assert served.supports(case, DEVICE) is None
    assert served.supports(grid("full", 1024, 128), DEVICE) is not None
    out = served.prepare(case, DEVICE).attend(*inputs.learnt)
    verdict = check.Oracle(case, inputs, backward=False).verdict({"out": out}, ours=True)
    assert verdict.ok, verdict.text


def test_paged_decoding_is_left_out_where_the_keys_end_inside_a_page() -> None:
    served = Served("sm_80", paged=True)
    assert "whole pages" in str(served.supports(make("decode", "full", 2, 4, 2, 1, 90, 32), GPU))


def test_the_dry_run_has_a_case_that_every_contender_of_decoding_takes() -> None:
    (case,) = [case for case in tiny_list() if case.group == "decode"]
    for paged in (False, True):
        assert Served("sm_80", paged=paged).supports(case, DEVICE) is None


def test_flash_takes_no_mask_and_efficient_no_groups() -> None:
    causal, window = grid("causal", 1024, 128), grid("sliding_window", 1024, 128)
    assert SDPA["flash"].supports(causal, GPU) is None
    assert "takes no mask" in str(SDPA["flash"].supports(window, GPU))
    assert SDPA["efficient"].supports(window, GPU) is None
    grouped = make("x", "causal", 1, 8, 2, 64, 64, 64)
    assert "grouped" in str(SDPA["efficient"].supports(grouped, GPU))
    assert SDPA["cudnn"].supports(grouped, GPU) is None


def test_torch_attention_takes_exact_biases_but_no_other_score_function() -> None:
    wide = replace(grid("alibi", 1024, 64), dtype="float32")
    assert SDPA["efficient"].supports(wide, GPU) is None
    assert "round the bias" in str(SDPA["efficient"].supports(grid("alibi", 1024, 64), GPU))
    assert "no bias" in str(SDPA["math"].supports(grid("softcap", 1024, 64), GPU))
    bias = dense_mask(small("alibi"), DEVICE)
    assert bias is not None
    assert bias.shape == (1, 4, 24, 40)
    assert dense_mask(small("full"), DEVICE) is None


def test_cudnn_behind_a_dense_mask_is_named_so() -> None:
    causal, window = grid("causal", 1024, 128), grid("sliding_window", 1024, 128)
    assert DENSE.supports(window, GPU) is None
    assert "tensors" in str(DENSE.supports(causal, GPU))
    assert "plain" in str(SDPA["cudnn"].supports(window, GPU))
    assert SDPA["cudnn"].supports(causal, GPU) is None


def test_a_causal_switch_is_used_for_square_problems_only() -> None:
    uneven = make("x", "causal", 1, 2, 2, 8, 16, 64)
    assert "square" in str(SDPA["flash"].supports(uneven, GPU))


def test_what_materialises_the_scores_is_left_out_where_they_do_not_fit() -> None:
    assert Standard().supports(grid("causal", 8192, 128), GPU) is None
    assert "GiB" in str(Standard().supports(grid("causal", 16384, 64), GPU))
    assert "GiB" in str(SDPA["math"].supports(grid("causal", 16384, 64), GPU))


def test_backends_for_gpus_say_so_elsewhere() -> None:
    case = small("causal", seq_q=40, dtype="bfloat16")
    for name in ("cudnn", "flash", "efficient"):
        assert SDPA[name].supports(case, DEVICE) == "needs a GPU"


def test_flex_serves_every_form_but_compiles_only_for_the_main_shapes() -> None:
    for name in FORMS:
        assert FLEX.supports(make("x", name, 1, 2, 2, 64, 64, 64, key=True), GPU) is None
    assert "too long to compile" in str(FLEX.supports(grid("causal", 512, 64), GPU))
    key = {case.spec for case in full_list() if case.key}
    assert key >= set(FORMS)


def test_flashgen_serves_everything_and_has_a_deterministic_mode_for_gradients_alone() -> None:
    plain, deterministic = flashgens(DEVICE)
    assert (plain.name, deterministic.name) == ("flashgen sm_80", "flashgen sm_80 deterministic")
    case = small("causal")
    assert plain.supports(case, GPU) is None
    assert "forward" in plain.prepare(case, DEVICE).passes
    assert "forward" not in deterministic.prepare(case, DEVICE).passes


def test_each_code_path_of_a_device_is_a_contender() -> None:
    device = Device()
    device.archs = ("sm_90a", "sm_90")
    names = [contender.name for contender in flashgens(device)]
    assert names[0] == "flashgen sm_90a"
    assert "flashgen sm_80 deterministic" in names


def test_the_list_begins_with_the_main_shape_and_has_every_group_once() -> None:
    cases = full_list()
    assert (cases[0].group, cases[0].spec, cases[0].seq_q) == ("llama", "causal", 8192)
    assert len({case.id for case in cases}) == len(cases)
    groups = {case.group for case in cases}
    assert groups == {"llama", "grid", "gpt2-medium", "variant", "decode", "model"}
    shapes = {(c.head_dim, c.seq_q, c.spec) for c in cases if c.group == "grid"}
    assert shapes >= {
        (d, n, s)
        for d in (64, 128, 256)
        for n in (512, 1024, 2048, 4096, 8192, 16384)
        for s in ("causal", "full")
    }
    decode = {(case.batch, case.seq_k) for case in cases if case.group == "decode"}
    assert decode >= {(batch, 1024 * 2**i) for i in range(8) for batch in (1, 8)}
    assert (2, 32768) in decode
    assert {case.group for case in tiny_list()} <= groups


def test_a_result_with_one_wrong_key_is_wrong() -> None:
    case = small("causal", seq_q=40, dtype="bfloat16")
    inputs = check.make_inputs(case, CPU, seed=3, learnt=False)
    oracle = check.Oracle(case, inputs, backward=False)
    right = Standard().prepare(case, DEVICE).attend(*inputs.learnt)
    assert oracle.verdict({"out": right}, ours=True).ok
    wrong = right.clone()
    wrong[-1, -1, 5] = right[-1, -1, 6]
    verdict = oracle.verdict({"out": wrong}, ours=True)
    assert not verdict.ok
    assert verdict.text.startswith("out max")
    assert verdict.error > verdict.allowed
    assert not oracle.verdict({"out": torch.full_like(right, float("nan"))}, ours=True).ok
    assert not oracle.verdict({"out": torch.full_like(right, float("nan"))}, ours=False).ok


def test_what_is_wrong_outside_the_slice_is_caught_by_a_peer() -> None:
    right = {"out": torch.randn(2, 4, 8, 16)}
    wrong = {"out": right["out"].clone()}
    wrong["out"][0, 0] = 0
    assert check.compare_peers(right, right).ok
    assert not check.compare_peers(wrong, right).ok


# ---- one case ------------------------------------------------------------------------------------


class Stub:
    """A contender that runs the given function."""

    def __init__(self, name: str, ours: bool, act: Any = None, reason: str | None = None) -> None:
        self.name, self.ours, self._act, self._reason = name, ours, act, reason
        self.calls = 0

    def library(self, device: Device) -> str:
        return f"{self.name} 1.2"

    def supports(self, case: Case, device: Device) -> str | None:
        return self._reason

    def prepare(self, case: Case, device: Device) -> Prepared:
        right = Standard().prepare(case, device).attend

        def attend(*operands: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return right(*operands) if self._act is None else self._act(right(*operands))

        return Prepared(attend)


def context_in(folder: Path, device: Device | None = None, part: str = "suite") -> Context:
    return Context(
        device=device or Device(),
        writer=Writer(folder, Stamp("1", "c", "emulator", "g", "d", "v"), part),
        journal=Journal(folder / "journal.jsonl"),
        budget=Budget(1e12),
        out=folder,
        work=folder,
        run="1",
        tiny=True,
    )


def fail(out: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("no kernel\nfor this")


CASE = make("x", "causal", 1, 2, 2, 24, 24, 16)


def rows_of(folder: Path, *stubs: Stub, **options: Any) -> dict[tuple[str, str], dict[str, str]]:
    run_case(context_in(folder), CASE, stubs, seconds=0.0, **options)
    return {(row["contender"], row["pass"]): row for row in read(folder / "speed.csv")}


def test_a_wrong_kernel_is_recorded_and_never_timed(tmp_path: Path) -> None:
    wrong = Stub("flashgen wrong", True, lambda out: out * 1.5)
    right = Stub("sdpa right", False)
    rows = rows_of(tmp_path, wrong, right)
    assert wrong.calls == 1
    row = rows["flashgen wrong", "forward"]
    assert (row["status"], row["ms_p50"], row["ratio"]) == ("wrong", "", "")
    assert float(row["max_error"]) > float(row["max_allowed"])
    assert rows["sdpa right", "both"]["status"] == "ok"
    assert rows["sdpa right", "both"]["peer"] == ""
    assert rows["sdpa right", "both"]["library"] == "sdpa right 1.2"
    assert rows["sdpa right", "both"]["head_dim_v"] == "16"
    failed = [e for e in context_in(tmp_path).journal.path.read_text().splitlines() if "wrong" in e]
    assert len(failed) >= 1


def test_a_case_that_time_cuts_short_is_done_to_its_end_by_the_next_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    context = replace(context_in(tmp_path), budget=Budget(1.0, lambda: now[0]))
    write = context.writer.speed

    def slow(rows: Any) -> None:
        write(rows)
        now[0] = 2.0

    monkeypatch.setattr(context.writer, "speed", slow)
    run_case(context, CASE, [Stub("sdpa right", False)], seconds=0.0)
    assert [row["pass"] for row in read(tmp_path / "speed.csv")] == ["forward"]
    skipped = [e["what"] for e in entries(context.journal.path) if e["event"] == "skipped"]
    assert skipped == [f"{CASE.id}, backward, and what follows it in this case"]
    run_case(context_in(tmp_path), CASE, [Stub("sdpa right", False)], seconds=0.0)
    assert [row["pass"] for row in read(tmp_path / "speed.csv")] == list(PASSES)


def test_ratio_and_peer_are_of_the_fastest_that_is_not_flashgen(tmp_path: Path) -> None:
    def slow(out: torch.Tensor) -> torch.Tensor:
        import time

        time.sleep(0.02)
        return out

    rows = rows_of(
        tmp_path,
        Stub("flashgen a", True, slow),
        Stub("flashgen b", True),
        Stub("sdpa quick", False),
        Stub("standard", False, slow),
        Stub("triton", False, reason="not here"),
        passes=("forward",),
    )
    row = rows["flashgen a", "forward"]
    assert row["peer"] == "sdpa quick"
    assert float(row["ratio"]) < 0.5
    assert rows["sdpa quick", "forward"]["peer"] == "standard"
    assert float(row["ms_p20"]) <= float(row["ms_p50"]) <= float(row["ms_p80"])
    assert row["of_matmul"] == ""
    refused = rows["triton", "forward"]
    assert (refused["status"], refused["note"]) == ("unsupported", "not here")


def test_what_raises_is_recorded_and_the_others_are_timed(tmp_path: Path) -> None:
    rows = rows_of(
        tmp_path, Stub("flashgen", True, fail), Stub("sdpa x", False, fail), Stub("standard", False)
    )
    assert rows["flashgen", "forward"]["status"] == "error"
    assert rows["flashgen", "forward"]["note"] == "RuntimeError: no kernel"
    assert rows["sdpa x", "forward"]["status"] == "refused"
    assert rows["standard", "backward"]["status"] == "ok"


def test_a_peer_without_gradients_is_timed_forward_and_says_why(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, Stub("sdpa x", False, torch.Tensor.detach), Stub("standard", False))
    assert float(rows["sdpa x", "forward"]["ms_p50"]) > 0
    assert rows["sdpa x", "forward"]["note"].startswith("no gradients: RuntimeError: ")
    assert ("sdpa x", "backward") not in rows
    assert rows["standard", "backward"]["status"] == "ok"


def test_a_device_that_is_gone_ends_the_process_and_the_next_goes_on(tmp_path: Path) -> None:
    class Gone(Device):
        def failure(self) -> str | None:
            return "an illegal memory access"

    stubs = [Stub("sdpa x", False), Stub("flashgen", True, fail)]
    with pytest.raises(Unusable, match="illegal"):
        run_case(context_in(tmp_path, Gone()), CASE, stubs, seconds=0.0)
    Journal(tmp_path / "journal.jsonl").note("restart", reason="its device failed")
    rows = rows_of(tmp_path, *stubs)
    assert rows["flashgen", "forward"]["status"] == "crashed"
    assert rows["flashgen", "forward"]["note"] == "its device failed"
    assert rows["sdpa x", "forward"]["status"] == "ok"
    # And once more: everything is done.
    run_case(context_in(tmp_path), CASE, stubs, seconds=0.0)
    assert len(read(tmp_path / "speed.csv")) == 6


def test_the_fraction_of_a_matmul_is_of_the_same_run(tmp_path: Path) -> None:
    context_in(tmp_path).writer.measure("matmul bfloat16", "rate", 1e-3, "TFLOP/s")
    rows = rows_of(tmp_path, Stub("standard", False), passes=("forward",))
    row = rows["standard", "forward"]
    assert float(row["of_matmul"]) == pytest.approx(float(row["tflops"]) / 1e-3, rel=1e-4)


def test_flashgen_is_checked_and_described_on_the_emulator(tmp_path: Path) -> None:
    ours = Flashgen("sm_80")
    case = make("x", "causal", 1, 1, 1, 32, 32, 16, dtype="float16")
    run_case(context_in(tmp_path), case, [ours, Standard()], passes=("forward",), seconds=0.0)
    row = read(tmp_path / "speed.csv")[0]
    assert (row["contender"], row["status"], row["path"]) == ("flashgen sm_80", "ok", "sm_80")
    assert row["plan"].startswith("forward ")
    assert row["peer"] == "standard"


def test_windows_of_the_sparsity_part_are_specs_of_flashgen() -> None:
    case = with_share(make("x", "full", 1, 1, 1, 96, 96, 16), 0.25)
    spec = spec_of(case)
    assert isinstance(spec, fg.AttentionSpec)
    inputs = check.make_inputs(case, CPU, seed=0, learnt=False)
    exact, _ = reference.attention(spec, *inputs.learnt, scalars=dict(case.scalars))
    out = Standard().prepare(case, DEVICE).attend(*inputs.learnt)
    torch.testing.assert_close(out.double(), exact, rtol=0.1, atol=0.03)


def test_all_contenders_can_be_listed_without_a_gpu() -> None:
    names = [contender.name for contender in contenders(DEVICE)]
    assert names[0].startswith("flashgen")
    assert {"sdpa cudnn", "sdpa flash", "sdpa efficient", "sdpa math"} < set(names)
    assert {"flex", "FlashAttention-4", "cuDNN graph", "standard"} < set(names)
