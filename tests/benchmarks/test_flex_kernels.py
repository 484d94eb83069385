"""benchmarks/flex_kernels.py: the same functions for both compilers, and the loops it counts."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest
import torch

import flashgen as fg
from benchmarks import flex_kernels, flex_mods, invented
from benchmarks.flex_mods import MODS
from benchmarks.instructions import work_of
from benchmarks.sass import main_loop
from flashgen import reference
from flashgen.kernels.compile.disassembly import find_nvdisasm
from tests.support.flex_mods import noise, torch_answer
from tests.support.paths import ROOT
from tests.support.processes import run_python

LENGTH = 48
SPECS = sorted(name for name in MODS if flex_kernels.spec_of(name) is not None)

needs_nvdisasm = pytest.mark.skipif(
    find_nvdisasm() is None, reason='nvdisasm is missing: pip install "flashgen[sass]"'
)
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason='triton is missing: pip install "flashgen[flex]"',
)


def listing(loops: list[tuple[int, int]]) -> str:
    """A disassembly with one loop for each (source line, instructions)."""
    text, address = ["\t.section\t.text.kernel"], 0

    def add(instruction: str) -> None:
        nonlocal address
        text.append(f"        /*{address:04x}*/                   {instruction} ;")
        address += 16

    for number, (line, length) in enumerate(loops):
        text.append(f".L_x_{number}:")
        text.append(f'\t//## File "kernel.py", line 9 inlined at "kernel.py", line {line}')
        text.append(f'\t//## File "kernel.py", line {line}')
        add("HMMA.16816.F32 R4, R8, R12, R4")
        for _ in range(length - 2):
            add("FADD R1, R1, R2")
        add(f"@P0 BRA `(.L_x_{number})")
    add("EXIT")
    return "\n".join(text)


def test_the_loops_of_flex_attention_are_told_apart_by_the_call_they_are_inlined_from() -> None:
    source = f"def kernel():\n    {flex_kernels.LOOPS}\n    )\n    {flex_kernels.LOOPS}\n    )\n"
    for loops in ([(2, 30), (4, 20)], [(4, 20), (2, 30)]):
        found = flex_kernels.flex_loops(listing(loops), source)
        assert {kind: len(loop.always) for kind, loop in found.items()} == {"mixed": 30, "full": 20}
    (kind,) = flex_kernels.flex_loops(listing([(2, 30)]), source)
    assert kind == "full"
    with pytest.raises(ValueError, match="two loops over mixed blocks"):
        flex_kernels.flex_loops(listing([(2, 30), (2, 20)]), source)


LEFT_BY_CALL = """
	.section	.text.kernel
.L_x_0:
        /*0000*/                   HMMA.16816.F32 R4, R8, R12, R4 ;
.L_x_1:
        /*0010*/                   FADD R1, R1, R2 ;
        /*0020*/              @P0  CALL.REL.NOINC `(.L_x_2) ;
        /*0030*/                   BRA `(.L_x_1) ;
.L_x_2:
        /*0040*/                   FADD R1, R1, R2 ;
        /*0050*/              @P1  BRA `(.L_x_0) ;
        /*0060*/                   EXIT ;
"""


def test_a_loop_that_ptxas_leaves_by_a_call_is_a_loop_inside_the_main_loop() -> None:
    loop = main_loop(LEFT_BY_CALL)
    assert [[i.base for i in inner] for inner in loop.inner] == [["FADD", "CALL", "BRA"]]
    assert [i.base for i in loop.always] == ["HMMA", "FADD", "BRA"]


@pytest.mark.slow
@needs_nvdisasm
def test_branches_of_the_score_function_count_in_every_tile() -> None:
    work = work_of(fg.build(fg.load(ROOT / "specs" / "t5_bias.py"), "sm_80"))
    assert not work.search  # there is no mask, hence no search for live tiles
    assert work.per_score(work.full) > 40


@pytest.mark.parametrize("name", SPECS)
def test_the_functions_that_are_compared_are_those_of_the_specs(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flex_mods, "LENGTH", LENGTH)
    batch, heads = flex_mods.BATCH, flex_mods.HEADS
    captured: dict[str, torch.Tensor] = {}

    def tensors(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        values = noise(*shape)
        captured[name] = values if dtype.is_floating_point else (2 * values).round().to(dtype)
        return captured[name]

    mask_mod, score_mod = MODS[name](tensors)
    q, k, v = (noise(batch, heads, LENGTH, 16, seed=seed) for seed in range(3))
    wanted, _ = torch_answer(q, k, v, mask_mod, score_mod)
    form = flex_mods.ALL_FORMS.get(name)
    scalars = form.scalars(LENGTH) if form else {}
    spec = flex_kernels.spec_of(name)
    assert spec is not None
    spec = spec.replace(head_dim=16, head_dim_v=16, dtype="float32")
    out, _ = reference.attention(spec, q, k, v, scalars=scalars, tensors=captured)
    torch.testing.assert_close(out.float(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", flex_mods.DIVIDED)
def test_numbers_in_tensors_are_those_of_the_form(name: str) -> None:
    numbers = flex_mods.ALL_FORMS[name].scalars(flex_mods.LENGTH)
    given = lambda name, shape, dtype: torch.tensor(numbers[name])  # noqa: E731
    place, zero = torch.arange(300), torch.tensor(0)
    found = []
    for mods in (MODS[name], MODS[name + flex_mods.IN_TENSORS]):
        mask, _ = mods(given)
        assert mask is not None
        found.append(mask(zero, zero, place[:, None] + 900, place[None] + 800))
    assert torch.equal(*found)


def test_shares_of_scores_are_those_of_tiles_and_of_a_block_mask(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(flex_kernels, "POSITIONS", 1024)
    visited, in_mixed = flex_kernels.flex_shares("causal")
    assert (visited, in_mixed) == (36 / 64, 8 / 64)
    assert flex_kernels.flex_shares("t5_bias") == (1.0, 0.0)
    assert flex_kernels.flex_shares("fire") == flex_kernels.flex_shares("causal")
    live = torch.tensor([[invented.crossing(i, j) for j in range(8)] for i in range(64)])
    spec = flex_kernels.spec_of("crossing")
    assert spec is not None
    own, in_mixed = flex_kernels.shares_of("crossing", spec, fg.plan(spec, "sm_90a"))
    assert float(live.float().mean()) <= own < 0.3
    assert in_mixed <= own


def test_without_triton_the_error_names_it_and_the_way_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["flex_kernels.py", "causal"])
    assert flex_kernels.main() == 1
    what, where, numbers, way_out = capsys.readouterr().err.strip().splitlines()
    assert what.startswith("CompileError: Triton")
    assert "flashgen[flex]" in way_out
    assert (where.split()[0], numbers.split()[0]) == ("where", "numbers")


@pytest.mark.slow
@needs_nvdisasm
@needs_triton
def test_the_kernels_of_flex_attention_are_compiled_and_counted(tmp_path: Path) -> None:
    file = tmp_path / "flex.json"
    arguments = ["document", "--arch", "sm_90", "--output", str(file)]
    folders = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    done = run_python("benchmarks/flex_kernels.py", *arguments, PYTHONPATH=folders)
    assert "FlexAttention" in done.stdout
    ours, same, theirs = json.loads(file.read_text(encoding="utf-8"))["kernels"]
    assert theirs["kernel"] == "FlexAttention"
    assert theirs["tile"] == [128, 128]  # Inductor's choice for an H100
    assert 5 < theirs["full"] < theirs["mixed"] < 30
    assert ours["full"] == pytest.approx(same["full"], rel=0.05)
