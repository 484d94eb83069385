"""The texts of a kernel: every link is the one that .loc or the line table names."""

from __future__ import annotations

import functools
import random
import re

import pytest

import flashgen as fg
from flashgen.kernels.compile import disassembly
from flashgen.kernels.pipeline import Build, build, build_backward
from flashgen.shared.paths import PATHS
from flashgen.tools.profile.kernel_profile import Profile
from flashgen.tools.views.code import METRICS, KernelTexts, code_of
from flashgen.tools.views.python_lines import file_text
from tests.support.paths import ROOT
from tests.support.profiles import all_kernels, forward, loaded
from tests.support.tiers import slow

pytestmark = pytest.mark.usefixtures("rounded_sums")

SIZES = (1, 2, 2, 64, 64)
INSTRUCTIONS = 1000


def lines_by_loc(ptx: str) -> dict[int, tuple[str, int]]:
    """For each line of PTX with an instruction, the file and line of the last .loc before it.

    Written without the emulator's parser.
    """
    files = dict(re.findall(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', ptx, re.M))
    found, place = {}, ("", 0)
    in_body = False
    for number, line in enumerate(ptx.splitlines(), 1):
        text = line.split("//")[0].strip()
        loc = re.match(r"\.loc\s+(\d+)\s+(\d+)", text)
        if loc:
            place = (files[loc[1]], int(loc[2]))
        elif text.startswith((".visible .entry", ".entry", ".func")):
            in_body, place = False, ("", 0)
        elif text == "{":
            in_body = True
        elif text.startswith(".section"):
            in_body = False
        elif in_body and re.match(r"(?:@!?%p\d+\s+)?[a-z][\w.]*(?:\s.*)?;$", text):
            found[number] = place
    return found


@functools.cache
def code(spec: str, arch: str) -> tuple[Build, KernelTexts]:
    made = build(loaded(spec), arch)
    return made, code_of(made, None)


def check_links(made: Build, found: KernelTexts, count: int) -> None:
    by_loc = lines_by_loc(made.ptx)
    assert len(by_loc) > 100
    chosen = random.Random(0).sample(sorted(by_loc), min(count, len(by_loc)))
    assert len(chosen) == min(count, len(by_loc))
    wrong = []
    for number in chosen:
        file, line = by_loc[number]
        named = line if file == made.source.filename else 0
        if found.ptx.links[number - 1] != named:
            wrong.append((number, found.ptx.lines[number - 1], named, found.ptx.links[number - 1]))
    assert wrong == []


@pytest.mark.parametrize("arch", ["sm_80", slow("sm_90a")])
def test_the_cuda_line_of_1000_random_instructions_is_the_one_that_loc_names(arch: str) -> None:
    made, found = code("causal", arch)
    check_links(made, found, INSTRUCTIONS)


@pytest.mark.slow
@pytest.mark.parametrize("arch", PATHS)
@pytest.mark.parametrize("name", ["t5_bias", "natten_2d", "document", "block_sparse"])
def test_every_instruction_of_every_kernel_links_to_the_line_that_loc_names(name, arch):
    for made in (build(loaded(name), arch), *build_backward(loaded(name), arch)):
        check_links(made, code_of(made, None), 10**9)


def check_counts(profile: Profile) -> None:
    found = code_of(profile.build, profile.ptx)
    totals = profile.totals
    expected = {
        "warps": totals.warp_instructions,
        "sectors": totals.sectors,
        "conflicts": totals.bank_conflicts,
        "global_bytes": totals.global_bytes,
        "shared_bytes": totals.shared_bytes,
    }
    assert expected.keys() == METRICS.keys()
    for metric, total in expected.items():
        heat = found.heat.get(metric)
        if heat is None:
            assert total == 0, metric
            continue
        sums = [sum(counts.values()) for counts in (heat.cuda, heat.outer, heat.ptx)]
        assert [heat.total, *sums] == [total] * 4, metric
    by_line = {line.line: line.totals.warp_instructions for line in profile.lines}
    own = {line: count for line, count in found.heat["warps"].cuda.items() if line}
    assert own == by_line


@pytest.mark.parametrize("arch", ["sm_80", slow("sm_90a")])
def test_the_counts_of_all_lines_add_up_to_the_totals_of_the_profile(arch: str) -> None:
    check_counts(forward(loaded("causal"), SIZES, arch))


@pytest.mark.slow
@pytest.mark.parametrize("arch", PATHS)
def test_the_counts_of_backward_kernels_add_up(arch: str) -> None:
    for profile in all_kernels(loaded("causal"), SIZES, arch=arch):
        check_counts(profile)


@pytest.mark.skipif(disassembly.find_nvdisasm() is None, reason=disassembly.MISSING)
def test_a_machine_instruction_links_to_the_line_of_the_table_of_the_cubin() -> None:
    made, found = code("causal", "sm_80")
    listing = disassembly.disassembled(made.cubin, made.source.name, "sm_80", ("-c", "-g"))
    # The option -g prints one comment for an instruction: its own line.
    named, line = {}, 0
    for text in listing.splitlines():
        info = re.search(r'//## File "[^"]*", line (\d+)', text)
        line = int(info[1]) if info else line
        address = re.match(r"\s*/\*([0-9a-f]{4})\*/", text)
        if address:
            named[address[1]] = line
    links = zip(found.sass.lines, found.sass.links, strict=True)
    shown = {text[2:6]: link for text, link in links if text.startswith("/*")}
    assert shown == named
    assert sum(count for _, count in found.opcodes) == len(named)
    products = {opcode: count for opcode, count in found.opcodes if opcode == "HMMA"}
    assert products["HMMA"] > 50


def test_without_a_disassembler_the_text_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setattr("flashgen.tools.views.code.find_nvdisasm", lambda: None)
    found = code_of(code("causal", "sm_80")[0], None)
    assert found.sass.lines == ()
    assert 'pip install "flashgen[sass]"' in found.sass.note
    assert found.ptx.lines


def test_long_texts_are_cut_and_say_so(monkeypatch) -> None:
    monkeypatch.setattr("flashgen.tools.views.code.MOST_LINES", 100)
    made = code("causal", "sm_80")[0]
    found = code_of(made, None)
    assert len(found.ptx.lines) == len(found.ptx.links) == 100
    total = len(made.ptx.splitlines())
    assert found.ptx.note == f"The first 100 of {total:,} lines are shown."


# ---- Python


def mods_of(name: str) -> dict[str, tuple[str, ...]]:
    """The lines of Python that each emitted function is linked with."""
    text = file_text(name, (ROOT / "specs" / f"{name}.py").read_text(encoding="utf-8"))
    found = code_of(build(loaded(name), "sm_80"), None, text)
    for mod in found.mods:
        assert mod.name in " ".join(found.cuda.lines[line - 1] for line in mod.cuda)
    return {mod.name: tuple(text.lines[n - 1] for n in mod.python) for mod in found.mods}


def test_a_mod_is_linked_with_the_functions_that_are_made_of_it() -> None:
    mods = mods_of("causal")
    assert set(mods) == {"row_keys", "tile_reach", "tile_full"}
    assert set(mods.values()) == {("def causal(b, h, q, k):", "    return q >= k")}


@pytest.mark.slow
def test_functions_and_constants_that_a_mod_uses_are_linked_too() -> None:
    mods = mods_of("t5_bias")
    lines = mods["score_mod"]
    named = ("table = ", "STARTS = ", "def bucket(distance):", "def t5_bias(")
    assert [any(line.startswith(start) for line in lines) for start in named] == [True] * 4
    assert "import flashgen as fg" not in lines
    assert mods["read_table"][-1] == "    return score + table[h, bucket(k - q)]"


def test_a_lambda_has_the_lines_that_the_emitted_file_quotes() -> None:
    spec = fg.AttentionSpec(mask_mod=lambda b, h, q, k: q >= k, head_dim=16)
    found = code_of(build(spec, "sm_80"), None)
    assert any("q >= k" in line for line in found.python.lines)
    assert found.mods[0].python == found.python.numbers


def test_a_spec_without_mods_has_no_python_and_says_so() -> None:
    found = code_of(build(fg.AttentionSpec(head_dim=16), "sm_80"), None)
    assert found.python.lines == ()
    assert found.python.note == "The kernel has neither a mask_mod nor a score_mod."
