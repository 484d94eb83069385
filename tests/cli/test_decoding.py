"""``--decode``, ``--page`` and ``--split-size`` of `run`, `profile` and `plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import flashgen as fg
from flashgen.calls.ops import run_forward
from flashgen.kernels.planner import invariant_splits, plan_splits
from flashgen.kernels.planner.formulas import evaluate
from flashgen.tools.cli.arguments import RunArguments
from flashgen.tools.cli.call import random_call
from flashgen.tools.cli.decoding import OTHER_PAGES, served_call, sizes_of
from flashgen.tools.cli.inputs import Shape, changed_spec
from tests.support.commands import CAUSAL, flashgen, rows
from tests.support.examples import spec_path
from tests.support.profiles import loaded
from tests.support.tiers import slow


@pytest.mark.parametrize(
    ("spec", "options"),
    [
        ("causal", ["--page", "16", "--split-size", "64", "--shape", "2,4,2,1,150"]),
        slow("causal", ["--split-size", "64", "--shape", "2,4,2,3,150", "--arch", "sm_90a"]),
        slow("causal", ["--page", "3", "--shape", "1,4,2,1,50", "--dtype", "bfloat16"]),
        slow("causal", ["--page", "64", "--split-size", "0", "--shape", "2,2,70"]),
        slow("sink", ["--page", "16", "--split-size", "64", "--shape", "2,4,2,1,150"]),
        slow("document", ["--page", "16", "--split-size", "64", "--shape", "2,4,2,2,150"]),
        slow("relative_bias", ["--page", "32", "--shape", "1,4,2,1,90", "--arch", "sm_90a"]),
        slow("block_sparse", ["--page", "16", "--split-size", "96", "--shape", "1,4,2,1,150"]),
    ],
)
def test_a_decoding_call_matches_the_oracle(spec: str, options: list[str]) -> None:
    command = ["run", str(spec_path(spec)), "--decode", *options, "--backend", "emulator"]
    result = flashgen(*command)
    assert result.exit_code == 0, result.output
    table = rows(result.stdout)
    assert table["result"] == "pass"
    assert table["out"].startswith("pass")
    assert ("pages" in table) == ("--page" in options)
    none = table["split"].startswith("none")
    assert none == (options[-4:-2] == ["--split-size", "0"])
    assert ("merge" in table) == (not none and "_folded_" not in table["kernel"])


@pytest.mark.slow
def test_the_table_says_how_keys_are_paged_and_split() -> None:
    command = ["run", CAUSAL, "--decode", "--page", "16", "--shape", "1,2,60", "--no-check"]
    table = rows(flashgen(*command, "--backend", "emulator").stdout)
    assert table["shape"].startswith("batch 1, heads 2, seq 1 x 60")
    assert table["pages"].startswith("16 keys each, 7 in the caches, shuffled")
    assert table["split"].endswith(" keys, the plan's choice")
    assert table["kernel"].startswith("causal_folded_forward_")  # one split, which a block joins
    assert "merge" not in table
    table = rows(flashgen(*command, "--split-size", "32", "--backend", "emulator").stdout)
    assert table["kernel"].startswith("causal_split_forward_")
    assert table["merge"].startswith("merge_splits_fp16_d64: 1 row, 1 warp, ")
    assert " B read, " in table["merge"]


@pytest.mark.slow
@pytest.mark.parametrize("options", [("--decode",), ("--backward",)])
def test_calls_are_batch_invariant_where_the_variable_says_so(
    options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHGEN_BATCH_INVARIANT", "1")
    command = [CAUSAL, *options, "--shape", "1,2,100"]
    table = rows(flashgen("run", *command, "--backend", "emulator").stdout)
    size = invariant_splits(loaded("causal"), "sm_80").size
    assert table["split"] == f"{size:,} keys, that of batch-invariant calls"
    assert table["result"] == "pass"
    if "--backward" in options:
        assert "_dq_" in table["backward"], "gradients in a fixed order have a kernel of dQ"
    done = flashgen("profile", *command)
    assert done.exit_code == 0, done.output + done.stderr


def test_keys_are_copied_to_shuffled_pages_between_slots_of_nan() -> None:
    arguments = RunArguments(path=CAUSAL, decode=True, page=8, split_size=32)
    call = random_call(loaded("causal"), arguments, Shape(2, 4, 2, 1, 30), q_offset=29)
    served = served_call(loaded("causal"), call, arguments)
    assert served.spec.paged
    q, *caches = served.operands
    assert q is call.operands[0]
    assert served.pages == 2 * 4 + OTHER_PAGES
    tables = served.options["tensors"]
    assert tables["cache_seqlens"].tolist() == [30, 30]
    pages = tables["page_table"]
    assert pages.flatten().tolist() != sorted(pages.flatten().tolist())
    for cache, rows_ in zip(caches, call.operands[1:], strict=True):
        found = cache[pages].transpose(1, 2).flatten(2, 3)
        assert torch.equal(found[:, :, :30], rows_)
        assert int(cache.isnan().sum()) == cache.numel() - rows_.numel()


def test_the_plan_of_a_decoding_call_prints_its_bytes_and_its_time() -> None:
    result = flashgen("plan", CAUSAL, "--decode", "--page", "16", "--arch", "sm_90a")
    assert result.exit_code == 0, result.output
    text = result.stdout
    for part in (
        "split_size = ",
        "heads     4 per tile",
        " times those of the HBM bound\n",
        "predicted forward: ",
        "predicted merge: ",
        "slots have work for ",
        "for batch 1, heads 32 over 8, seq 1 x 131072, float16\n",
    ):
        assert part in text, part
    (line,) = [line for line in text.splitlines() if line.strip().startswith("k_read = ")]
    _, _, numbers, value = line.split(" = ")
    assert evaluate(numbers) == int(value.removesuffix(" B").replace(",", "")) == 8 * 131_072 * 128


def test_the_plan_of_a_decoding_call_takes_captured_values_and_a_split_size() -> None:
    window = str(spec_path("sliding_window"))
    shape = ["--shape", "2,8,2,1,5000", "--split-size", "480"]
    result = flashgen("plan", window, "--decode", *shape, "--scalar", "window=100")
    assert result.exit_code == 0, result.output
    assert "given instead: split_size = 480" in result.stdout
    assert "splits    11 of 480 keys" in result.stdout
    result = flashgen("plan", str(spec_path("relative_bias")), "--decode", *shape)
    assert result.exit_code == 0, result.output


def test_the_profile_of_a_decoding_call_compares_both_launches() -> None:
    options = ["--page", "16", "--split-size", "32", "--shape", "1,2,1,1,60", "--lines", "0"]
    result = flashgen("profile", CAUSAL, "--decode", *options)
    assert result.exit_code == 0, result.output
    assert result.stdout.count("\nkernel ") == 2
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("call ")]
    words = line.split()
    assert words[1] == words[words.index("predicted:") - 1]
    assert "times the " in line
    assert "a prediction, against" in line


@pytest.mark.parametrize("codes", ["int8", "float8_e4m3fn", "float8_e5m2"])
def test_codes_stand_for_the_keys_that_the_oracle_has(codes: str) -> None:
    options: dict[str, Any] = {"shape": "2,4,2,3,40", "decode": True, "page": 16}
    arguments = RunArguments(path=CAUSAL, **options, kv_dtype=codes)
    spec = changed_spec(CAUSAL, arguments)
    sizes = sizes_of(arguments, arguments.shape, spec)
    call = random_call(spec, arguments, sizes, q_offset=37, capacity=48)
    served = served_call(spec, call, arguments)
    assert served.spec.kv_dtype == codes
    assert served.operands[1].dtype == getattr(torch, codes)
    found = run_forward(served.spec, *served.operands, **served.options, backend="tiled")
    same = served.contiguous
    expected = run_forward(spec, *same.operands, **same.options, backend="tiled")
    assert torch.equal(found.out, expected.out)
    assert (same.operands[1] - call.operands[1]).abs().max() < 0.5
    assert not torch.equal(same.operands[1], call.operands[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("run", "result     pass"),
        ("profile", "int8"),
        ("report", "errors  2 results within the error rule"),
    ],
)
def test_commands_compute_calls_on_codes(command: str, says: str, tmp_path: Path) -> None:
    how = ["--decode", "--page", "16", "--kv-dtype", "int8", "--shape", "1,2,1,1,60"]
    how += ["--output", str(tmp_path / "report.html")] if command == "report" else []
    result = flashgen(command, CAUSAL, *how)
    assert result.exit_code == 0, result.output
    assert says in result.stdout


@pytest.mark.parametrize(
    ("command", "options", "what"),
    [
        ("run", ["--page", "16"], "--page has no effect without --decode"),
        ("plan", ["--split-size", "64"], "--split-size has no effect without --decode"),
        ("run", ["--decode", "--q-offset", "3"], "a forward pass alone"),
        ("run", ["--decode", "--backward"], "a forward pass alone"),
        ("profile", ["--decode", "--backward"], "a forward pass alone"),
        ("profile", ["--decode", "--tangent"], "a forward pass alone"),
        ("plan", ["--decode", "--policy", "paper"], "a derived plan"),
        ("plan", ["--decode", "--certify"], "a derived plan"),
        ("plan", ["--kv-dtype", "int8", "--decode"], "no effect without --decode and --page"),
        ("run", ["--kv-dtype", "int8"], "no effect without --decode and --page"),
        ("plan", ["--map", "ranks.png"], "--map has no effect without --world"),
        ("plan", ["--scalar", "a=1"], "--scalar has no effect without --shape or --decode"),
        ("run", ["--deterministic"], "--deterministic has no effect without --backward"),
        ("plan", ["--backward", "--tangent"], "one pass at a time"),
        ("tune", ["--backward", "--tangent"], "one pass at a time"),
        ("run", ["--decode", "--shape", "1,3,2,1,40"], "not the shape of a decoding call"),
        ("run", ["--decode", "--shape", "1,2,2,9,4"], "not the shape of a decoding call"),
        ("plan", ["--decode", "--split-size", "100"], "split_size is not a number of keys"),
        ("run", ["--decode", "--split-size", "100"], "split_size is not a number of keys"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    command: str, options: list[str], what: str
) -> None:
    result = flashgen(command, CAUSAL, *options)
    assert result.exit_code == 2
    assert what in result.stderr
    assert result.stdout == ""


def test_a_spec_with_a_paged_cache_needs_a_size_of_its_pages(tmp_path: Path) -> None:
    file = tmp_path / "served.py"
    file.write_text(
        "import flashgen as fg\n"
        "spec = fg.AttentionSpec(mask_mod=lambda b, h, q, k: k <= q, paged=True)\n"
    )
    decode = ["--decode", "--shape", "2,4,2,1,150"]
    options = [*decode, "--page", "16", "--split-size", "64", "--backend", "emulator"]
    result = flashgen("run", str(file), *options)
    assert result.exit_code == 0, result.output
    table = rows(result.stdout)
    assert table["result"] == "pass"
    assert table["pages"].startswith("16 keys each, 23 in the caches")
    for command in (["run"], ["run", *decode], ["profile"], ["report"], ["plan", *decode]):
        refused = flashgen(command[0], str(file), *command[1:])
        assert refused.exit_code == 2
        assert "--decode --page 16" in refused.stderr


def test_packed_sequences_are_refused() -> None:
    packed = str(spec_path("variable_length"))
    for options in ([], ["--page", "16"]):
        result = flashgen("plan", packed, "--decode", *options)
        assert result.exit_code == 2
        assert "packed" in result.stderr


def test_calls_with_few_query_rows_have_the_plan_of_split_keys_in_every_command() -> None:
    few = ["--shape", "1,4,1,1,700"]
    size = plan_splits(fg.load(CAUSAL), "sm_80", 1).size
    assert f"\nsplit_size  {size}, by the plan" in flashgen("plan", CAUSAL, *few).stdout
    assert "split_size" not in flashgen("plan", CAUSAL, "--shape", "1,4,1,70,700").stdout
    assert (
        "tuned tiles do not apply to calls with split keys" in flashgen("tune", CAUSAL, *few).stderr
    )
    run = ["--q-offset", "699", "--backend", "emulator", "--no-check"]
    table = rows(flashgen("run", CAUSAL, *few, *run).stdout)
    assert table["split"] == f"{size} keys, the plan's choice"
    assert "merge" in table
    profile = flashgen("profile", CAUSAL, *few, "--lines", "0").stdout
    assert profile.count("\nkernel ") == 2
