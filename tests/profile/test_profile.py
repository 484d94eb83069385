"""The profile of a kernel: its parts add up, its steps are the file's, its bound is arithmetic."""

from __future__ import annotations

import importlib.util
import re
import string
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import flashgen as fg
from flashgen.kernels.codegen import Source
from flashgen.kernels.planner.models.fitted_time import CONSTANTS
from flashgen.kernels.planner.models.spec_terms import special_functions
from flashgen.shared.arch import facts
from flashgen.shared.errors import InputError
from flashgen.tools.cli import app
from flashgen.tools.profile.kernel_profile import Quantity
from flashgen.tools.profile.kernel_steps import lines_of, phases_of, steps_of
from flashgen.tools.profile.roofline import check_plot, plot, roofline
from flashgen.tools.profile.run import profile_backward, profile_forward
from ptx_emulator import Totals
from ptx_emulator.counters.l2 import L2Traffic
from ptx_emulator.counters.totals import added
from tests.support.profiles import ROOT, all_kernels, forward, loaded, random_operands
from tests.support.tiers import one_in, slow

pytestmark = pytest.mark.usefixtures("rounded_sums")

SIZES = (1, 2, 2, 200, 200)
FILE = """// 1. Not a step: it stands before the kernel.
__device__ float helper(float x) { return x; }
extern "C" __global__ void __launch_bounds__(128)
kernel(const Params p) {
  int a;
  // 1. Where the block is.
  int b;
  // 2. Main loop.
  while (b) {
    // 2a. S = Q K^T
    b = helper(a);
    // 3 is no step, nor is 4.
  }
  // 10. Out.
  // 11. The rows of a tile, whose
  //     columns follow. Then more.
  // 12. Done. What is left is
  //     elsewhere.
}
"""


def source_of(text: str) -> Source:
    plan = forward(loaded("causal"), SIZES).plan
    return Source("kernel", "kernel.cu", text, (), plan)


def test_steps_are_the_numbered_comments_of_the_kernel():
    steps = [(step.number, step.title, step.line) for step in steps_of(FILE)]
    assert steps == [
        ("1", "Where the block is.", 6),
        ("2", "Main loop.", 8),
        ("2a", "S = Q K^T", 10),
        ("10", "Out.", 14),
        ("11", "The rows of a tile, whose columns follow.", 15),
        ("12", "Done.", 17),
    ]
    assert steps_of("int x;  // 1. no kernel\n") == ()


@pytest.mark.parametrize("path", sorted((ROOT / "generated/gallery").glob("causal_*.cu")), ids=str)
def test_every_emitted_kernel_has_steps_in_order(path: Path):
    numbers = [step.number for step in steps_of(path.read_text())]
    assert numbers[0] == "1"
    assert len(numbers) == len(set(numbers)) >= 4
    assert numbers == sorted(numbers, key=lambda n: (int(n.rstrip(string.ascii_lowercase)), n))


def test_lines_belong_to_the_step_that_they_stand_in():
    one = {line: Totals(warps={"move": 1 << place}) for place, line in enumerate((0, 5, 7, 9, 11))}
    places = {("kernel.cu", line): totals for line, totals in one.items()}
    places["other.cu", 7] = Totals(warps={"move": 64})
    phases = phases_of(source_of(FILE), places)
    found = [(phase.number, phase.totals.warp_instructions) for phase in phases]
    # Line 5 is the kernel's head; line 0, and the line of another file, are of no step.
    assert found == [("", 2), ("1", 4), ("2", 8), ("2a", 16), ("", 64 + 1)]
    assert phases[0].title == "before the first step"
    assert phases[-1].title.startswith("of no line")


def test_lines_are_ranked_with_their_text():
    places = {
        ("kernel.cu", 0): Totals(warps={"move": 99}),
        ("kernel.cu", 11): Totals(warps={"move": 3, "float": 4}),
        ("kernel.cu", 7): Totals(warps={"move": 1}),
        ("kernel.cu", 5): Totals(warps={"move": 1}),
    }
    found = [(each.line, each.text) for each in lines_of(source_of(FILE), places)]
    assert found == [(11, "b = helper(a);"), (5, "int a;"), (7, "int b;")]


def test_totals_add_up_part_by_part():
    a = Totals({"move": 1}, {"move": 32}, {"m16n8k8 f32": 7}, 1, 2, 3, 4, 5, 6, 7)
    b = Totals({"move": 2, "float": 5}, {"move": 3}, {}, 10, 20, 30, 40, 50, 60, 70)
    assert added([a, b]) == Totals(
        {"move": 3, "float": 5}, {"move": 35}, {"m16n8k8 f32": 7}, 11, 22, 33, 44, 55, 66, 77
    )
    assert added([]) == Totals()


def test_phases_and_lines_add_up_to_the_kernel():
    for profile in all_kernels(loaded("causal"), SIZES):
        assert added(phase.totals for phase in profile.phases) == profile.totals
        assert profile.issued.counted == sum(t.issued.counted for t in profile.tensors)
        assert profile.totals.sectors == sum(t.sectors for t in profile.tensors)
        assert profile.totals.sectors_least == sum(t.sectors_least for t in profile.tensors)
        assert profile.l2.requested == profile.totals.sectors * 32
        ranked = [line.totals.warp_instructions for line in profile.lines]
        assert ranked == sorted(ranked, reverse=True)


def test_a_ratio_is_counted_to_predicted():
    assert Quantity("x", "B", 30, 20).ratio == 1.5
    assert Quantity("x", "B", 30).ratio is None
    assert Quantity("x", "B", 30, 0).ratio is None


def test_the_bound_is_the_resource_that_is_busy_longest():
    arch = facts("sm_80")
    chip = arch.sms * arch.clock_hz
    totals = Totals(
        warps={"tensor": 500, "special": 500},
        lanes={"special": 1600, "float": 640},
        multiply_adds={"m16n8k16 f32 f16 f16 f32": 1024 * 1000},
        sectors=1000,
        wavefronts=300,
    )
    l2 = L2Traffic(arch.l2_bytes, 1, 32000, 1000, 600, 0, 0)
    line = roofline(arch, totals, 8000, l2, "sm_80")
    seconds = {bound.name: bound.seconds for bound in line.bounds}
    assert seconds["tensor cores"] == pytest.approx(1000 / chip)
    assert seconds["shared memory"] == pytest.approx(300 / chip)
    assert seconds["special functions"] == pytest.approx(1600 / 16 / chip)
    assert seconds["FMA pipe"] == pytest.approx(640 / 64 / chip)
    assert seconds["instruction issue"] == pytest.approx(1000 / 4 / chip)
    assert seconds["L2"] == pytest.approx(24000 / arch.l2_bytes_per_clock / chip)
    assert seconds["atomic additions in L2"] == pytest.approx(
        8000 / (CONSTANTS["sm_80"]["atomic_share"] * arch.l2_bytes_per_clock) / chip
    )
    assert seconds["HBM"] == pytest.approx(1600 / arch.hbm_bytes_per_s)
    assert line.bound.name == "tensor cores"
    assert line.attainable == pytest.approx(2 * 1024 * chip)
    assert line.intensity == pytest.approx(2 * 1024 * 1000 / 1600)
    assert line.intensity_l2 == pytest.approx(2 * 1024 * 1000 / 32000)
    assert line.ridge == pytest.approx(2 * 1024 * chip / arch.hbm_bytes_per_s)


def test_the_cost_terms_of_the_plan_stand_beside_what_was_counted():
    profile = forward(loaded("causal"), SIZES)
    work = {quantity.name: quantity for quantity in profile.work}
    assert list(work) == ["multiply-adds", "tensor", "shared", "l2", "special", "issue"]
    tiles = work["multiply-adds"].counted / (64 + 64)
    assert work["special"].predicted == pytest.approx(profile.plan.quantities["special"] * tiles)
    assert work["shared"].counted == profile.totals.wavefronts
    # PTX has what the assembler fuses or drops; what is beyond the main loop is not predicted.
    assert 1 <= work["shared"].ratio < 1.3
    assert 1 <= work["special"].ratio < 1.1


SCORES = {
    "tanh": fg.tanh,
    "power by a score": lambda s: (fg.abs(s) + 1) ** s,
    "sigmoid": fg.sigmoid,
    "erf": fg.erf,
    "erfc": fg.erfc,
    "log1p": lambda s: fg.log1p(fg.abs(s)),
    "expm1": fg.expm1,
    "atan2": lambda s: fg.atan2(s, 2.0),
    "sin": fg.sin,
    "log": lambda s: fg.log(fg.abs(s) + 1),
    "root": lambda s: fg.sqrt(fg.abs(s) + 1),
    "reciprocal root": lambda s: fg.rsqrt(fg.abs(s) + 1),
    "quotient": lambda s: s / (fg.abs(s) + 1),
    "product": lambda s: s**3,
    "power of a number": lambda s: 1.5**s,
    "power by a fraction": lambda s: (fg.abs(s) + 1) ** -1.3,
}


@pytest.mark.parametrize(
    ("dtype", "name"),
    [*one_in(5, [("float16", name) for name in SCORES]), *(slow("float32", x) for x in SCORES)],
)
def test_plans_count_the_special_functions_of_a_score_and_of_its_slope(dtype, name):
    spec = fg.AttentionSpec(
        score_mod=lambda s, b, h, q, k: SCORES[name](s), head_dim=16, dtype=dtype, name="special"
    )
    kernels = all_kernels(spec, (1, 1, 1, 64, 128))
    for profile in (each for each in kernels if each.plan.kernel in ("forward", "fused")):
        work = {quantity.name: quantity for quantity in profile.work}["special"]
        # Of erf and pow, a score computes one of several branches; a row has a few of its own.
        assert 0.6 <= work.ratio < 1.3


@pytest.mark.parametrize(
    ("power", "function", "count"),
    [
        (lambda s, q: fg.abs(s) ** -1.3, "fast_power(", 2),
        (lambda s, q: fg.abs(s) ** 64.5, "powf(", 1),
        (lambda s, q: s * (q + 1) ** 0.3, "powf(", 1),
        (lambda s, q: fg.abs(s) ** -3, "fast_quotient(", 1),
    ],
)
def test_special_functions_are_those_of_the_power_that_is_emitted(power, function, count):
    spec = fg.AttentionSpec(score_mod=lambda s, b, h, q, k: power(s, k + q), head_dim=16)
    found = re.search(r"float score_mod\(.*?return (.*?);", fg.emit(spec).forward.text, re.DOTALL)
    assert found is not None
    assert function in found[1]
    assert special_functions(spec, "forward") == count


def test_tensors_that_lie_in_one_are_one():
    spec = loaded("causal")
    qkv = torch.randn(2, 3, 2, 200, 64).half()  # each batch entry has all three
    q, k, v = qkv.unbind(1)
    (profile,) = profile_forward(spec, q, k, v)[1]
    whole, o, lse = profile.tensors
    assert [each.name for each in (whole, o, lse)] == ["q, k, v", "o", "lse"]
    assert whole.issued.counted == whole.issued.predicted
    assert whole.distinct == qkv.numel() * 2


@pytest.mark.slow
def test_what_is_not_predicted_says_so():
    ids = torch.arange(200).div(50, rounding_mode="floor")[None].int()
    spec = loaded("document")
    q, k, v = random_operands(spec, SIZES)
    tensors = {tensor.name: ids for tensor in spec.tensors}
    table, kernel = profile_forward(spec, q, k, v, tensors=tensors)[1]
    assert table.plan.kernel == "minmax_table"
    assert [t.issued.predicted for t in table.tensors] == [None, None]
    assert table.issued.predicted is None
    by_name = {tensor.name: tensor.issued for tensor in kernel.tensors}
    assert by_name["k"].counted == by_name["k"].predicted
    assert by_name["c_ids"].predicted is None
    assert kernel.issued.predicted is None


@pytest.mark.slow
def test_masks_that_differ_between_heads_are_predicted_head_by_head():
    def mask_mod(b, h, q, k):
        return (k <= q) & (q - k < 32 * (h + 1))

    spec = fg.AttentionSpec(mask_mod=mask_mod, head_dim=32)
    # The last queries of the second size reach no key.
    for profile in (p for n in (150, 60) for p in all_kernels(spec, (2, 2, 2, 150, n))):
        assert profile.issued.counted == profile.issued.predicted, profile.kernel
        if profile.plan.kernel == "forward":
            assert profile.distinct.counted == profile.distinct.predicted
    # K and V of a group are read once for all of its heads, where any of them reaches the tile.
    for profile in all_kernels(spec, (1, 4, 2, 100, 180)):
        assert profile.issued.counted == profile.issued.predicted, profile.kernel
        # Heads may share K and V, so that the number of distinct bytes is not predicted.
        assert profile.distinct.predicted is None


def test_a_size_of_0_has_no_profile():
    q, k, v = random_operands(loaded("causal"), (1, 2, 2, 0, 5))
    run, profiles = profile_forward(loaded("causal"), q, k, v)
    assert profiles == ()
    backward = profile_backward(loaded("causal"), q, k, v, run.out, run.lse, run.out)
    assert backward[1] == ()


def test_the_roofline_is_drawn(tmp_path: Path):
    pytest.importorskip("matplotlib", reason="draws the roofline: pip install matplotlib")
    profiles = all_kernels(loaded("causal"), SIZES)
    plot(profiles, tmp_path / "roofline.png")
    assert (tmp_path / "roofline.png").read_bytes().startswith(b"\x89PNG")
    plot(profiles[1:2], tmp_path / "delta.png")  # nothing on the tensor cores
    assert (tmp_path / "delta.png").stat().st_size > 1000


def without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "matplotlib" else find(name)
    )


def test_a_missing_matplotlib_is_refused_before_anything_runs(monkeypatch: pytest.MonkeyPatch):
    without_matplotlib(monkeypatch)
    with pytest.raises(InputError, match="not installed"):
        check_plot(Path("roofline.png"))
    command = ["profile", str(ROOT / "specs/causal.py"), "--plot", "never.png"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2
    assert "pip install matplotlib" in result.stderr
    assert result.stdout == ""
    assert not Path("never.png").exists()


def test_the_command_prints_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("matplotlib", reason="draws the roofline: pip install matplotlib")
    monkeypatch.chdir(tmp_path)
    command = ["profile", str(ROOT / "specs/causal.py"), "--shape", "1,2,200", "--backward"]
    done = CliRunner().invoke(app, [*command, "--lines", "3", "--plot", "roof.png"])
    assert done.exit_code == 0, done.output
    text = done.stdout
    assert text.count("\nkernel ") == 4  # forward, delta, fused, convert_dq
    for word in ("prediction", "distinct B", "bank conflicts", "HBM ", "FLOP per byte", "barriers"):
        assert word in text, word
    assert "forward" in text.split("kernel ")[1]
    (row,) = [line for line in text.split("kernel ")[1].splitlines() if line.startswith("k ")]
    name, issued, predicted, ratio, *_ = row.split()
    assert (name, issued, ratio) == ("k", predicted, "1.000")
    assert "5g " in text
    assert "P = exp2(S - max)" in text
    assert "roofline written to roof.png" in text
    assert (tmp_path / "roof.png").is_file()


@pytest.mark.slow
def test_the_command_counts_with_dropout():
    command = ["profile", str(ROOT / "specs/causal.py"), "--shape", "1,2,1,100,100"]
    plain, dropped = (
        CliRunner().invoke(app, [*command, *more]) for more in ([], ["--dropout", "0.25"])
    )
    for result in (plain, dropped):
        assert result.exit_code == 0, result.output
        assert result.stdout.count("\nkernel ") == 1
    assert "dropout p 0.25" in dropped.stdout.splitlines()[0]
    assert "dropout" not in plain.stdout
    forward = dropped.stdout.split("\nkernel ")[1]
    (row,) = [line.split() for line in forward.splitlines() if line.startswith("rng ")]
    # Every thread of each of the blocks reads seed and offset.
    (launch,) = [line for line in forward.splitlines() if line.startswith("launch ")]
    blocks, warps = (int(n) for n in re.findall(r"(\d+) (?:blocks|warps)", launch))
    assert row[1:5] == [
        f"{16 * 32 * blocks * warps:,}",
        f"{16 * 32 * blocks * warps:,}",
        "1.000",
        "16",
    ]


def test_the_command_refuses_a_probability_that_is_none():
    command = ["profile", str(ROOT / "specs/causal.py"), "--shape", "1,1,5", "--dropout", "1.5"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2
    assert "1.5" in result.stderr


def test_the_command_says_when_nothing_is_launched():
    result = CliRunner().invoke(app, ["profile", str(ROOT / "specs/causal.py"), "--shape", "1,2,0"])
    assert result.exit_code == 0, result.output
    assert "no kernel was launched" in result.stdout
