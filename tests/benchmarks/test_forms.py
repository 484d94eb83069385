"""The part "forms": tiles and edited kernels beside the plan, checked before they are timed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import flashgen as fg
from benchmarks.suite import records
from benchmarks.suite.check import make_inputs
from benchmarks.suite.contenders.ours import spec_of
from benchmarks.suite.journal import entries
from benchmarks.suite.parts import forms
from benchmarks.suite.parts.forms import COMPARISONS, PLAN, Comparison, compared
from benchmarks.suite.records import read
from flashgen.kernels.planner import feasible
from tests.benchmarks.test_contenders import context_in

SMALL = compared("forward", "full", 2, (1, 1), 64, 32)
"""`forms.shrunk` gives it one batch entry of 140 positions."""


def rows_of(folder: Path) -> dict[str, dict[str, str]]:
    return {row["setting"]: row for row in read(folder / "measures.csv")}


def emitted(comparison: Comparison) -> tuple[str, str]:
    source = fg.emit(spec_of(comparison.case), arch=forms.ARCH).forward
    return source.filename, source.text


def test_every_form_of_the_table_has_a_tile_that_exists_and_no_two_comparisons_are_one() -> None:
    subjects = [comparison.subject for comparison in COMPARISONS]
    assert len(set(subjects)) == len(subjects)
    assert "backward causal b2 h16/16 8192x8192 d128" in subjects
    known: dict[tuple[str, int, str], set[tuple[int, int, int]]] = {}
    for comparison in COMPARISONS:
        assert comparison.forms[0] is PLAN
        assert len({form.name for form in comparison.forms}) == len(comparison.forms)
        case = comparison.case
        for form in comparison.forms:
            for kernel, tile in form.tiles.items():
                at = case.spec, case.head_dim, kernel
                if at not in known:
                    plans = feasible(spec_of(case), forms.ARCH, kernel=kernel)
                    known[at] = {(plan.block_q, plan.block_k, plan.warps) for plan in plans}
                owned = 16 * tile.warps
                shape = (tile.step, owned) if kernel == "fused" else (owned, tile.step)
                assert (*shape, tile.warps) in known[at]


def test_an_edited_kernel_of_a_folder_is_a_form_and_a_wrong_one_is_not_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, text = emitted(SMALL)
    right, wrong, other = (
        tmp_path / "overrides" / folder for folder in ("plan", "doubled", "elsewhere")
    )
    for folder in (right, wrong, other):
        folder.mkdir(parents=True)
    (right / name).write_text(text + "// edited\n")
    scaled = text.replace("exp2_approx(", "1.0f + exp2_approx(", 1)
    assert scaled != text
    (wrong / name).write_text(scaled)
    (other / "no_such_kernel.cu").write_text(text)
    monkeypatch.setattr(forms, "OVERRIDES", tmp_path / "overrides")
    monkeypatch.delenv("FLASHGEN_OVERRIDE", raising=False)
    context = context_in(tmp_path, part="forms")
    forms.run(context, [SMALL])
    rows = rows_of(tmp_path)
    assert rows["plan"]["metric"] == rows[f"plan/{name}"]["metric"] == "time"
    assert rows["plan"]["unit"] == "ms"
    assert rows["plan"]["note"].startswith("p20 ")
    assert rows["plan"]["subject"] == "forward full b1 h1/1 140x140 d32"
    assert (rows["doubled"]["metric"], rows["doubled"]["value"]) == ("right", "0")
    logged = entries(context.journal.path)
    (failed,) = (entry["what"] for entry in logged if entry["event"] == "failed")
    assert "doubled is wrong: out is" in failed
    (skipped,) = (entry["what"] for entry in logged if entry["event"] == "skipped")
    assert "no_such_kernel.cu" in skipped
    # What is timed is the edited kernel, although the environment names it no more.
    small = forms.shrunk(SMALL)
    inputs = make_inputs(small.case, context.device.torch, seed=0, learnt=False)
    call = forms.Prepared(small, forms.Form("", override=wrong / name), inputs, context.device)
    out, *_ = call.run()
    assert torch.equal(out, call.results["out"])
    assert not torch.equal(out, forms.Prepared(small, PLAN, inputs, context.device).results["out"])


def test_without_a_folder_and_with_a_tile_that_does_not_fit_the_others_are_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forms, "OVERRIDES", tmp_path / "none")
    forms.run(context_in(tmp_path), [Comparison("forward", SMALL.case, (PLAN, forms.rows(128, 7)))])
    rows = rows_of(tmp_path)
    assert rows["plan"]["metric"] == "time"
    assert (rows["128x7"]["metric"], rows["128x7"]["value"]) == ("compiles", "0")
    assert "PlanError" in rows["128x7"]["note"]


def test_a_call_that_fails_is_told_and_the_next_comparison_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        def __init__(self, *_: object) -> None:
            raise MemoryError("90 GiB")

    monkeypatch.setattr(forms, "Prepared", Broken)
    context = context_in(tmp_path)
    forms.run(context, [SMALL, compared("backward", "full", 2, (1, 1), 64, 32)])
    failed = [e["what"] for e in entries(context.journal.path) if e["event"] == "failed"]
    assert failed == [
        f"forms of {pass_} full b1 h1/1 140x140 d32: MemoryError: 90 GiB"
        for pass_ in ("forward", "backward")
    ]


def test_a_form_is_named_in_the_records_as_before() -> None:
    subjects = {row["subject"] for row in read(records.RESULTS / "measures.csv")}
    assert {comparison.subject for comparison in COMPARISONS} & subjects
