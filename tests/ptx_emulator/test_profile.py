"""The counters of profiled launches, against numbers computed by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ptx_emulator as emulator
from flashgen.shared.errors import EmulatorError
from ptx_emulator.counters.recorder import ATOMIC, READ, WRITE
from ptx_emulator.counters.work import CLASSES, class_of, multiply_adds
from ptx_emulator.ptx.instructions import OPCODES
from ptx_emulator.ptx.syntax import Instruction
from tests.ptx_emulator.test_conformance import run_ptx
from tests.support.nvrtc_helper import compile_ptx

Array = np.ndarray[Any, Any]
LANES = np.arange(32)

# Each thread takes an offset from `at` and uses it with one instruction.
HEAD = """.visible .entry probe(.param .u64 p_at, .param .u64 p_data) {
    .reg .b64 %at, %data, %place; .reg .b32 %s, %w<4>; .reg .b64 %q<2>; .reg .b16 %h;
    .reg .f32 %f; .reg .pred %p;
    .shared .align 128 .b8 room[16384];
    ld.param.u64 %at, [p_at]; ld.param.u64 %data, [p_data];
    mov.u32 %s, %ctaid.x; mov.u32 %w0, %ntid.x; mov.u32 %w1, %tid.x;
    mad.lo.u32 %s, %s, %w0, %w1; mul.wide.u32 %place, %s, 4; add.u64 %at, %at, %place;
    ld.global.u32 %s, [%at];
    setp.lt.u32 %p, %s, 0x80000000;
    cvt.u64.u32 %place, %s; add.u64 %place, %data, %place;
"""


def probed(instruction: str, offsets: Array, data: Array | None = None, blocks: int = 1) -> Any:
    """Counters of a launch in which each lane runs an instruction at its offset, and its Totals."""
    data = np.zeros(4096, np.uint32) if data is None else data
    text = f"{HEAD} {instruction} ret; }}"
    given = np.ascontiguousarray(np.broadcast_to(offsets, (blocks, 32)), np.uint32).reshape(-1)
    counters = run_ptx(text, "probe", blocks, 32, given, data, check=False, profile=True)
    last = instruction.split(";")[-2].strip()
    return counters, dict(counters.by_instruction())[last]


@pytest.mark.parametrize(
    ("what", "offsets", "wavefronts"),
    [
        ("each lane its word", 4 * LANES, 1),
        ("all lanes one word", 0 * LANES, 1),
        ("words of one bank", 128 * LANES, 32),
        ("every second word", 8 * LANES, 2),
        ("two rows of 16 words", 4 * (LANES % 16) + 128 * (LANES // 16), 2),
        ("two words of one bank, shared by halves", 128 * (LANES // 16), 2),
        ("an odd stride", 4 * 33 * LANES, 1),
    ],
)
@pytest.mark.parametrize("store", [False, True])
def test_words_of_one_bank_conflict_unless_they_are_the_same(
    what: str, offsets: Array, wavefronts: int, store: bool
) -> None:
    use = "st.shared.b32 [%s], %w0;" if store else "ld.shared.b32 %w2, [%s];"
    _, totals = probed(use, offsets)
    assert (totals.wavefronts, totals.wavefronts_least) == (wavefronts, 1), what
    assert totals.bank_conflicts == wavefronts - 1
    assert totals.shared_bytes == 32 * 4


@pytest.mark.parametrize(
    ("use", "stride", "wavefronts", "least"),
    [
        ("ld.shared.b16 %h, [%s];", 2, 1, 1),  # two lanes a word
        ("ld.shared.b64 %q0, [%s];", 8, 2, 2),
        ("ld.shared.b64 %q0, [%s];", 16, 4, 2),
        ("ld.shared.v4.b32 {%w0, %w1, %w2, %w3}, [%s];", 16, 4, 4),
        ("ld.shared.v4.b32 {%w0, %w1, %w2, %w3}, [%s];", 128, 32, 4),
        ("st.shared.v4.b32 [%s], {%w0, %w1, %w2, %w3};", 32, 8, 4),
        ("cp.async.cg.shared.global [%s], [%data], 16;", 16, 4, 4),
        ("cp.async.cg.shared.global [%s], [%data], 16;", 64, 16, 4),
        ("cp.async.ca.shared.global [%s], [%data], 4;", 8, 2, 1),
        ("red.shared.add.u32 [%s], %w0;", 4, 1, 1),
        ("red.shared.add.u32 [%s], %w0;", 0, 32, 1),  # lanes take turns
    ],
)
def test_wide_accesses_are_served_in_halves_and_quarters(
    use: str, stride: int, wavefronts: int, least: int
) -> None:
    _, totals = probed(use, stride * LANES)
    assert (totals.wavefronts, totals.wavefronts_least) == (wavefronts, least)


@pytest.mark.parametrize(
    ("what", "offsets", "wavefronts"),
    [
        ("rows of 128 bytes as they lie", 128 * (LANES % 8) + 16 * (LANES // 8), 32),
        ("swizzled", 128 * (LANES % 8) + 16 * ((LANES // 8) ^ (LANES % 8)), 4),
        ("rows of 64 bytes", 64 * (LANES % 8) + 16 * (LANES // 8), 16),
        ("rows one behind the other", 16 * LANES, 4),
    ],
)
def test_ldmatrix_reads_each_matrix_in_one_wavefront_when_its_rows_differ_in_banks(
    what: str, offsets: Array, wavefronts: int
) -> None:
    use = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%w0, %w1, %w2, %w3}, [%s];"
    _, totals = probed(use, offsets)
    assert (totals.wavefronts, totals.wavefronts_least) == (wavefronts, 4), what
    assert totals.shared_bytes == 512


def test_lanes_that_are_switched_off_want_nothing() -> None:
    offsets = np.where(LANES < 8, 128 * LANES, 0x80000000)
    counters, totals = probed("@%p ld.shared.b32 %w2, [%s];", offsets)
    assert (totals.wavefronts, totals.wavefronts_least) == (8, 1)
    assert totals.shared_bytes == 8 * 4
    assert totals.warps == {"memory": 1}
    assert totals.lanes == {"memory": 8}
    _, none = probed("@%p ld.shared.v4.b32 {%w0, %w1, %w2, %w3}, [%s];", 0 * LANES + 0x80000000)
    assert (none.wavefronts, none.wavefronts_least) == (0, 0)
    assert counters.total().lanes["integer"] == 4 * 32  # mad, mul, and two add


@pytest.mark.parametrize(
    ("use", "offsets", "sectors", "least"),
    [
        ("ld.global.b32 %w2, [%place];", 4 * LANES, 4, 4),
        ("ld.global.b32 %w2, [%place];", 4 * LANES[::-1], 4, 4),
        ("ld.global.b32 %w2, [%place];", 4 * LANES + 16, 5, 4),
        ("ld.global.b32 %w2, [%place];", 32 * LANES, 32, 4),
        ("ld.global.b32 %w2, [%place];", 0 * LANES, 1, 1),
        ("ld.global.b32 %w2, [%place];", 4 * (LANES // 4), 1, 1),
        ("ld.global.v4.b32 {%w0, %w1, %w2, %w3}, [%place];", 16 * LANES, 16, 16),
        ("ld.global.v4.b32 {%w0, %w1, %w2, %w3}, [%place];", 32 * LANES, 32, 16),
        ("st.global.b16 [%place], %h;", 2 * LANES, 2, 2),
        ("st.global.b16 [%place], %h;", 4 * LANES, 4, 2),
        ("cp.async.cg.shared.global [room], [%place], 16;", 16 * LANES, 16, 16),
        ("red.global.add.u32 [%place], %w0;", 4 * LANES, 4, 4),
    ],
)
def test_an_access_takes_the_sectors_that_its_lanes_touch(
    use: str, offsets: Array, sectors: int, least: int
) -> None:
    _, totals = probed(use, offsets)
    assert (totals.sectors, totals.sectors_least) == (sectors, least)


def test_different_bytes_are_told_apart_from_issued_ones() -> None:
    data = np.zeros(64, np.uint32)
    counters, _ = probed("ld.global.b32 %w2, [%place];", 4 * (LANES % 8), data, blocks=3)
    at, given = sorted(counters.recorded.buffers, key=lambda buffer: buffer.label)
    assert (at.label, given.label) == ("argument 0", "argument 1")
    assert given.issued == (3 * 32 * 4, 0, 0)
    assert given.sectors == (3, 0, 0)
    assert (given.read, given.written) == (8 * 4, 0)
    assert (at.read, at.issued[READ]) == (3 * 32 * 4, 3 * 32 * 4)

    counters, _ = probed("red.global.add.u32 [%place], %w0;", 0 * LANES, data)
    given = max(counters.recorded.buffers, key=lambda buffer: buffer.label)
    assert given.issued == (0, 0, 32 * 4)
    assert (given.read, given.written) == (4, 4)


def test_each_block_has_its_accesses_in_order_by_lines() -> None:
    use = (
        "ld.global.b32 %w2, [%place]; st.global.b32 [%place], %w2; red.global.add.u32 [%place], 1;"
    )
    # Block 0 touches sectors 0 and 1 of a line, block 1 the last sector of one and the next line.
    offsets = np.stack([4 * (LANES % 16), 96 + 4 * (LANES % 16)])
    counters, _ = probed(use, offsets, np.zeros(64, np.uint32), blocks=2)
    trace = counters.recorded.trace
    assert trace.starts.tolist() == [0, 4, 11]  # the load of the offset, then one or two lines each
    first = trace.line[1]
    assert (trace.line[1:4] - first).tolist() == [0, 0, 0]
    assert trace.sectors[1:4].tolist() == [0b0011] * 3
    assert trace.kind[:4].tolist() == [READ, READ, WRITE, ATOMIC]
    assert (trace.line[5:] - first).tolist() == [0, 1] * 3
    assert trace.sectors[5:].tolist() == [0b1000, 0b0001] * 3
    assert trace.kind[5:].tolist() == [READ, READ, WRITE, WRITE, ATOMIC, ATOMIC]


def test_work_is_reported_by_class_and_multiply_adds_by_shape() -> None:
    use = """.reg .f32 %c<4>;
        mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%c0, %c1, %c2, %c3},
          {%w0, %w1, %w2, %w3}, {%w0, %w1}, {%c0, %c1, %c2, %c3};
        mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%c0, %c1, %c2, %c3},
          {%w0, %w1, %w2, %w3}, {%w0, %w1}, {%c0, %c1, %c2, %c3};
        ex2.approx.ftz.f32 %f, %f; fma.rn.f32 %f, %f, %f, %f; bar.sync 0;
        bar.warp.sync 0xffffffff; cvt.rn.f16.f32 %h, %f;"""
    counters, _ = probed(use, 0 * LANES, blocks=2)
    totals = counters.total()
    assert totals.multiply_adds == {
        "m16n8k16 f32 f16 f16 f32": 2 * 16 * 8 * 16,
        "m16n8k8 f32 tf32 tf32 f32": 2 * 16 * 8 * 8,
    }
    assert totals.tensor_multiply_adds == 2 * 16 * 8 * 24
    assert totals.warps["tensor"] == 2 * 2
    assert totals.warps["special"] == 2
    assert totals.warps["float"] == 2
    assert totals.warps["convert"] == 2 * 2  # to float16, and the offset to 64 bits
    assert totals.warps["barrier"] == 2 * 2
    assert totals.barriers == 2
    assert totals.lanes["special"] == 2 * 32
    assert totals.warp_instructions == counters.warp_instructions


def test_every_opcode_that_the_emulator_knows_is_some_kind_of_work() -> None:
    kinds = {class_of(Instruction(op, ("f32",), [])) for op in OPCODES}
    assert kinds <= set(CLASSES)
    assert kinds | {"integer", "double"} == set(CLASSES)
    with pytest.raises(EmulatorError, match="tcgen05 belongs to no class"):
        class_of(Instruction("tcgen05", (), []))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("add.s32", "integer"),
        ("add.rn.f16x2", "float"),
        ("fma.rn.f64", "double"),
        ("div.full.f32", "special"),
        ("div.s32", "integer"),
        ("setp.lt.f32", "compare"),
        ("max.s32", "compare"),
        ("rcp.rn.f64", "double"),
        ("cvt.rn.f16x2.f32", "convert"),
    ],
)
def test_the_kind_of_work_depends_on_the_types(name: str, kind: str) -> None:
    op, *mods = name.split(".")
    assert class_of(Instruction(op, tuple(mods), [])) == kind


def test_multiply_adds_are_those_of_the_shape() -> None:
    name = ("sync", "aligned", "m16n8k8", "row", "col", "f32", "tf32", "tf32", "f32")
    assert multiply_adds(Instruction("mma", name, [])) == 16 * 8 * 8
    assert multiply_adds(Instruction("fma", ("rn", "f32"), [])) == 0


INLINED = """
__device__ __forceinline__ float inner(float x) { return x * 3.0f + 1.0f; }
__device__ __forceinline__ float outer(float x) {
  return inner(x) * inner(x + 2.0f);
}
extern "C" __global__ void lines(const float* a, float* b) {
  const int i = threadIdx.x;
  const float x = a[i];
  b[i] = outer(x);
  b[i + 32] =
      outer(x + 7.0f);
}
"""


def test_inlined_code_counts_for_the_line_of_the_kernel_that_called_it() -> None:
    a, b = np.ones(32, np.float32), np.zeros(64, np.float32)
    counters = emulator.launch(compile_ptx(INLINED), "lines", 1, 32, [a, b], profile=True)
    own = {line: totals for (_, line), totals in counters.by_line().items()}
    outer = {line: totals for (_, line), totals in counters.by_line(outermost=True).items()}
    assert 2 in own
    assert min(line for line in outer if line) >= 6
    floats = {line: totals.warps.get("float", 0) for line, totals in outer.items()}
    calls = floats[9], floats.get(10, 0) + floats.get(11, 0)
    assert calls[1] == calls[0] + 1  # x + 7
    assert sum(calls) == sum(totals.warps.get("float", 0) for totals in own.values())
    assert sum(t.warp_instructions for t in own.values()) == counters.warp_instructions
    assert sum(t.warp_instructions for t in outer.values()) == counters.warp_instructions


def test_a_called_function_counts_for_the_line_that_calls_it() -> None:
    source = INLINED.replace("__forceinline__ float outer", "__noinline__ float outer")
    a, b = np.ones(32, np.float32), np.zeros(64, np.float32)
    ptx = compile_ptx(source)
    assert "call.uni" in ptx
    counters = emulator.launch(ptx, "lines", 1, 32, [a, b], profile=True)
    lines = [line for (_, line), totals in counters.by_line(outermost=True).items() if line]
    assert min(lines) >= 6
    floats = {
        line: totals.warps.get("float", 0)
        for (_, line), totals in counters.by_line(outermost=True).items()
    }
    assert floats[9] == floats.get(10, 0) + floats.get(11, 0) - 1 > 0


def test_a_place_that_was_inlined_twice_is_that_of_the_nearest_call() -> None:
    text = """.file 1 "a.cu"
        .visible .entry chain(.param .u64 p) { .reg .b32 %t;
        .loc 1 50 1
        .loc 1 20 2, function_name LABEL7, inlined_at 1 50 1
        .loc 1 10 3, function_name LABEL8+9, inlined_at 1 20 2
        add.u32 %t, %t, 1;
        .loc 1 60 1
        .loc 1 20 2, function_name LABEL7, inlined_at 1 60 1
        .loc 1 10 3, function_name LABEL8+9, inlined_at 1 20 2
        add.u32 %t, %t, 1; add.u32 %t, %t, 1;
        .loc 1 70 1
        ret; }"""
    counters = run_ptx(text, "chain", 1, 32, np.zeros(1, np.uint64), check=False, profile=True)
    own, outer = (counters.by_line(outermost=wanted) for wanted in (False, True))
    assert {line: t.warps["integer"] for (_, line), t in own.items() if line == 10} == {10: 3}
    counted = [(line, t.warp_instructions) for (_, line), t in outer.items()]
    assert counted == [(50, 1), (60, 2), (70, 1)]


def test_a_launch_that_was_not_profiled_has_no_totals() -> None:
    a, b = np.ones(32, np.float32), np.zeros(64, np.float32)
    ptx = compile_ptx(INLINED)
    counters = emulator.launch(ptx, "lines", 1, 32, [a, b])
    assert counters.recorded is None
    with pytest.raises(EmulatorError, match="was not profiled"):
        counters.total()
    with emulator.profiling() as launches:
        emulator.launch(ptx, "lines", 1, 32, [a, b])
        emulator.launch(ptx, "lines", 2, 32, [a, b], check=False)
    assert [each.total().warps["memory"] for each in launches] == [
        launches[0].total().warps["memory"],
        2 * launches[0].total().warps["memory"],
    ]
    assert emulator.launch(ptx, "lines", 1, 32, [a, b]).recorded is None


def test_a_warp_that_waits_for_its_lanes_has_executed_nothing_yet() -> None:
    text = """.visible .entry vote(.param .u64 p) { .reg .b32 %t, %v; .reg .pred %odd;
        mov.u32 %t, %tid.x; and.b32 %v, %t, 1; setp.eq.u32 %odd, %v, 1; @%odd bra ODD;
        add.u32 %t, %t, 5;
        ODD: vote.sync.ballot.b32 %v, %odd, 0xffffffff; ret; }"""
    counters = run_ptx(text, "vote", 1, 32, np.zeros(1, np.uint64), profile=True)
    counts = {text.split()[0]: t for text, t in counters.by_instruction()}
    assert counts["add.u32"].lanes == {"integer": 16}
    assert counts["vote.sync.ballot.b32"].warps == {"exchange": 1}
    assert counts["vote.sync.ballot.b32"].lanes == {"exchange": 32}
