"""The part "models": what it accepts as equal, and what becomes of backends that are not."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.suite import model_lines, speed_table, summary
from benchmarks.suite.journal import Journal, entries
from benchmarks.suite.parts import models
from benchmarks.suite.parts.models import BACKENDS, Backend, curve_verdict, verdict_on
from benchmarks.suite.records import Stamp, Writer, read
from benchmarks.suite.supervisor import Budget
from benchmarks.suite.whole_models import DECODE, Problem, Result, problems
from tests.benchmarks.test_contenders import context_in
from tests.support.tiers import slow

pytest.importorskip("transformers")

TRAINING = {problem.name: problem for problem in problems(tiny=True)}
DROPOUT = TRAINING["train gpt2-like with dropout 0.1 B2 N64"]
GPT2, GPT_OSS = TRAINING["train gpt2-like B2 N64"], TRAINING["train gpt-oss-like B2 N64"]
GEMMA = TRAINING["train gemma-like B2 N64"]
DECODING = TRAINING["decode gpt2-like B1 N64"]

Change = Callable[[tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]


def result(*losses: float, spread: float = 1.0, **options: Any) -> Result:
    tensor = torch.ones(8, dtype=torch.bfloat16)
    return Result([1.0], 1, tensor, losses=list(losses), spreads=[spread] * len(losses), **options)


def test_losses_are_equal_within_a_quarter_of_the_epsilon_of_bfloat16() -> None:
    reference = result(8.0, 4.0)
    assert curve_verdict(GPT2, result(8.0, 4.0), reference).ok
    assert curve_verdict(GPT2, result(8.0, 4.0 * (1 + 1.9 / 1024)), reference).ok
    verdict = curve_verdict(GPT2, result(8.0, 4.0 * (1 + 2.1 / 1024)), reference)
    assert not verdict.ok
    assert "at step 1" in verdict.text
    assert not curve_verdict(GPT2, result(float("nan"), 4.0), reference).ok


def test_dropout_allows_standard_errors_of_a_mean_over_the_tokens() -> None:
    # 4 standard errors of the difference of two means of 128 losses: 4 * sqrt(2 / 128) = 0.5.
    reference = result(8.0, drops=True)
    assert verdict_on(DROPOUT, result(8.5, drops=True), reference).ok
    assert not verdict_on(DROPOUT, result(8.52, drops=True), reference).ok
    tight = result(8.0, spread=0.1, drops=True)
    assert not verdict_on(DROPOUT, result(8.5, drops=True), tight).ok
    assert not verdict_on(DROPOUT, result(8.0, drops=False), reference).ok


def test_the_first_gradient_may_be_further_away_in_a_deeper_model() -> None:
    reference = result(8.0)
    apart = replace(reference, tensor=reference.tensor * 1.0625)
    assert not verdict_on(GPT2, apart, reference).ok
    deep = replace(GPT2, model=replace(GPT2.model, options={"n_layer": 12}))
    assert verdict_on(deep, apart, reference).ok


def rows_of(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    problem: Problem,
    *backends: Backend,
    change: Change | None = None,
) -> dict[str, dict[str, str]]:
    """The rows of three steps of one problem; ``change``: to the arguments of "fg"'s attention."""
    from transformers import AttentionInterface

    from flashgen.frontends.transformers.attention import attention

    def registered(real: Callable[[], None] = models.register) -> None:
        real()
        if change is not None:

            def altered(*given: Any, **options: Any) -> Any:
                given, options = change(given, options)
                return attention(*given, **options)

            AttentionInterface.register("fg", altered)

    count = 8 if problem.mode == DECODE else 3
    short = replace(problem, count=count, warm_up=1)
    monkeypatch.setattr(models, "problems", lambda tiny: [short])
    monkeypatch.setattr(models, "BACKENDS", backends or (models.FLASHGEN,))
    monkeypatch.setattr(models, "register", registered)
    try:
        models.run(context_in(folder, part="models"))
    finally:
        AttentionInterface.register("fg", attention)
    return {row["backend"]: row for row in read(folder / "models.csv")}


def failures(folder: Path) -> list[str]:
    return [e["what"] for e in entries(folder / "journal.jsonl") if e["event"] == "failed"]


@pytest.mark.parametrize("problem", [GPT_OSS, slow(GEMMA), slow(GPT2), slow(DROPOUT)])
def test_flashgen_and_the_reference_train_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: Problem
) -> None:
    rows = rows_of(tmp_path, monkeypatch, problem)
    ours, reference = rows["flashgen"], rows["eager"]
    assert (ours["status"], reference["status"]) == ("ok", "ok")
    assert len(ours["losses"].split()) == 3
    assert float(ours["ms_p50"]) > 0
    assert reference["ms_p50"] == ""
    assert "ran on tiled" in ours["note"]
    assert failures(tmp_path) == []


def scaled(given: tuple[Any, ...], options: dict[str, Any]) -> Any:
    return given, options | {"scaling": options["scaling"] * 1.1}


def weaker_sink(given: tuple[Any, ...], options: dict[str, Any]) -> Any:
    return given, options | {"s_aux": options["s_aux"] * 0.8}


def uncapped(given: tuple[Any, ...], options: dict[str, Any]) -> Any:
    return given, options | {"softcap": None}


def moved(given: tuple[Any, ...], options: dict[str, Any]) -> Any:
    module, query, key, value, mask = given
    return (module, query, key.roll(1, 2), value.roll(1, 2), mask), options


def undropped(given: tuple[Any, ...], options: dict[str, Any]) -> Any:
    return given, options | {"dropout": 0.0}


@pytest.mark.parametrize(
    ("problem", "change"),
    [
        (GPT_OSS, weaker_sink),
        slow(GPT_OSS, scaled),
        slow(GPT_OSS, moved),
        slow(GEMMA, uncapped),
        slow(GEMMA, moved),
        slow(GPT2, moved),
        slow(DROPOUT, undropped),
        (DECODING, moved),
    ],
)
def test_a_backend_that_computes_something_else_is_a_failed_row_without_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: Problem, change: Change
) -> None:
    row = rows_of(tmp_path, monkeypatch, problem, change=change)["flashgen"]
    assert (row["status"], row["ms_p50"], row["tokens_per_s"]) == ("wrong", "", "")
    assert len(failures(tmp_path)) == 1
    assert row["note"] in failures(tmp_path)[0]


def test_a_peer_that_cannot_is_a_row_with_its_reason_and_flashgen_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(given: tuple[Any, ...], options: dict[str, Any]) -> Any:
        raise ValueError("no such thing\nhere")

    peers = (Backend("peer", "fg", "torch"), Backend("sdpa", "sdpa", "torch"))
    rows = rows_of(tmp_path, monkeypatch, DECODING, models.FLASHGEN, *peers, change=broken)
    assert rows["peer"]["status"] == "unsupported"
    assert rows["peer"]["note"] == "ValueError: no such thing"
    assert rows["flashgen"]["status"] == "error"
    assert (rows["sdpa"]["status"], rows["sdpa"]["library"]) == ("ok", f"torch {torch.__version__}")
    assert len(failures(tmp_path)) == 1


def test_what_a_backend_cannot_compute_is_said_without_a_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = rows_of(tmp_path, monkeypatch, GPT_OSS, Backend("sdpa", "sdpa", "torch", ("sinks",)))
    assert (rows["sdpa"]["status"], rows["sdpa"]["note"]) == ("unsupported", "it has no sinks")
    lacking = {
        b.name: {p.name for p in problems(True) if {*p.needs} & {*b.lacks}} for b in BACKENDS
    }
    assert lacking["flashgen"] == set()
    assert lacking["flex"] == lacking["flash_attention_4"] == {DROPOUT.name}
    assert lacking["sdpa"] == {p.name for p in problems(True) if p.model.name != GPT2.model.name}


def test_without_transformers_all_of_it_is_left_out_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    models.run(context_in(tmp_path, part="models"))
    (entry,) = entries(tmp_path / "journal.jsonl")
    assert entry["what"] == "all models: the package transformers is not installed"


def test_what_the_time_is_too_short_for_is_named_and_a_crash_is_a_row(tmp_path: Path) -> None:
    crashed = f"{GPT_OSS.name}, flashgen"
    journal = Journal(tmp_path / "journal.jsonl")
    journal.note("begin", step=crashed)
    journal.note("restart", reason="ended by SIGSEGV")
    context = context_in(tmp_path, part="models")
    models.run(replace(context, budget=Budget(0.0)))
    skipped = [e["what"] for e in entries(journal.path) if e["event"] == "skipped"]
    assert skipped[0] == "train gpt2-like with dropout 0.1 B2 N64, flashgen"
    assert len(skipped) == len(problems(tiny=True)) * len(BACKENDS) - 1
    assert crashed not in skipped
    (row,) = read(tmp_path / "models.csv")
    assert (row["status"], row["note"]) == ("crashed", "ended by SIGSEGV")


def model_row(backend: str, ms: float | None, **changes: Any) -> dict[str, Any]:
    row: dict[str, Any] = {
        "model": "gpt2-like", "mode": "train", "dropout": 0.0, "batch": 16, "positions": 1024,
        "backend": backend, "library": "torch 9", "status": "ok", "ms_p50": ms,
        "tokens_per_s": None if ms is None else 16384e3 / ms, "peak_bytes": 3 << 30,
        "losses": "9 8 7 6 5 4", "allowed": 1.0, "note": "n",
    }  # fmt: skip
    return row | changes


def test_every_peer_has_a_ratio_and_the_one_furthest_ahead_is_first(tmp_path: Path) -> None:
    stamp = Stamp("20260101T000000Z", "abc", "gpu", "NVIDIA Test", "580.1", "torch 9")
    writer = Writer(tmp_path, stamp, "models")
    writer.models(
        [
            model_row("eager", None, allowed=None),
            model_row("flashgen", 10.0),
            model_row("sdpa", 20.0),
            model_row("flex", 5.0),
            model_row("flashgen", 2.0, mode="decode", losses=""),
            model_row("sdpa", None, mode="decode", status="unsupported", losses=""),
        ]
    )
    rows = read(tmp_path / "models.csv")
    lines = model_lines.compared(rows)
    assert [line.split("   ")[-1].split(":")[0] for line in lines] == [
        "0.50 x flex (torch 9)",
        "2.00 x sdpa (torch 9)",
        "no peer",
    ]
    assert model_lines.not_timed(rows) == [
        "sdpa (torch 9): unsupported, n   (decode gpt2-like B16 N1024)"
    ]
    assert [line.split()[4] for line in model_lines.losses(rows)] == [
        "eager", "flashgen", "sdpa", "flex",
    ]  # fmt: skip
    table = model_lines.table(rows)
    assert len(table) == 4
    assert table[2].endswith("| 3276800 | 3.0 | 0.50 |")
    assert speed_table.block(tmp_path) == speed_table.NONE
    digest = summary.digest("20260101T000000Z", [], tmp_path)
    assert "whole models: 1 slower than a peer, 1 not" in digest
    assert "nothing is slower" not in summary.text("20260101T000000Z", [], tmp_path)
