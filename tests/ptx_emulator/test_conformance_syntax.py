"""PTX that is legal and that few compilers write: expressions, vectors, attributes, guarded jumps.

Source: PTX ISA, "Syntax" and "State Spaces, Types, and Variables".
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ptx_emulator.errors import PtxSyntaxError, UnknownInstruction
from tests.ptx_emulator.test_conformance import probe, run_ptx

LANES = np.arange(32, dtype=np.uint32)
DOUBLED = ".func (.reg .b32 r) doubled (.reg .b32 a) { add.u32 r, a, a; ret; }"


def constant(text: str) -> int:
    """The value of a constant expression as an operand."""
    return int(probe(f"mov.u32 %d, {text};", "u4", LANES[:1])[0])


def of_lanes(body: str, module: str = "", directives: str = "") -> list[int]:
    """%d of each lane of a warp, after PTX that finds the number of the lane in %t."""
    out = np.zeros(32, np.uint32)
    kernel = f"""{module}
    .visible .entry f(.param .u64 out) {directives} {{
      .reg .b64 %o, %q; .reg .b32 %t, %d; .reg .pred %p;
      ld.param.u64 %o, [out]; mov.u32 %t, %tid.x; mad.wide.u32 %o, %t, 4, %o;
      {body}
      st.global.u32 [%o], %d; ret;
    }}"""
    run_ptx(kernel, "f", 1, 32, out)
    return [int(v) for v in out]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("1<<4", 16), ("(1 << 4) | 3", 19), ("3*4+1", 13), ("1+3*4", 13), ("10 / 3", 3)),
        *(("-7 / 2", -3), ("-7 % 4", 1), ("~0", -1), ("!0", 1), ("!5", 0), ("-(-5)", 5)),
        *(("1 ? 7 : 8", 7), ("0 ? 7 : 8", 8), ("(3 > 2) && 1", 1), ("0 || 0", 0), ("5-2-1", 2)),
        *(("0x10U+1", 17), ("(.u64)7", 7), ("0377", 255), ("0b101", 5), ("WARP_SZ*2", 64)),
        *(("6 & 3 ^ 1", 3), ("1 == 1 != 0", 1), ("(.u64)-1 >> 60", 15), ("-1 >> 60", -1)),
    ],
)
def test_a_constant_may_be_an_expression(text: str, value: int) -> None:
    assert constant(text) == value & 0xFFFFFFFF


@pytest.mark.parametrize("text", ["1 / 0", "1.5 + 2.5", "~1.5", "(1", "1 +"])
def test_an_expression_without_a_value_is_refused(text: str) -> None:
    with pytest.raises(PtxSyntaxError, match="line 32 of the PTX"):
        constant(text)


@pytest.mark.parametrize(
    ("declaration", "offset", "kind", "value"),
    [
        (".const .u16 v[2][3] = {{1, 2}, {4}};", 6, "u16", 4),
        (".const .u16 v[2][2][2] = {{{1}, {2, 3}}, {{4}}};", 6, "u16", 3),
        (".const .u16 v[2][3] = {1, 2, 3, 4};", 6, "u16", 4),
        (".const .u32 v[1<<1] = {3*16, 2};", 0, "u32", 48),
        (".const .u32 v[] = {1, 2, 3};", 8, "u32", 3),
        (".const .f32 v[2] = {1, -2};", 4, "u32", 0xC0000000),
        (".visible .global .attribute(.managed) .u32 v = 5;", 0, "u32", 5),
        (".global .attribute(.unified(1, 2)) .u32 v = 6;", 0, "u32", 6),
    ],
)
def test_a_variable_has_its_initial_values(
    declaration: str, offset: int, kind: str, value: int
) -> None:
    space = "const" if ".const" in declaration else "global"
    wide = "cvt.u32.u16 %d, %h;" if kind == "u16" else ""
    to = "%h" if kind == "u16" else "%d"
    body = f".reg .b16 %h; ld.{space}.{kind} {to}, [v+{offset}]; {wide}"
    assert of_lanes(body, declaration) == [value] * 32


def test_a_pointer_in_a_variable_has_an_offset_on_either_side() -> None:
    variables = ".global .u32 v[3] = {1, 2, 3}; .global .u64 p = v + 8 - 4;"
    assert of_lanes("ld.global.u64 %q, [p]; ld.global.u32 %d, [%q+-4+8-4];", variables) == [2] * 32


@pytest.mark.parametrize(
    "declaration",
    [
        ".global .u16 v[2] = {1, 2, 3};",
        ".global .u16 v[2][2] = {{1, 2, 3}, {4}};",
        ".global .u16 v[2] = {{1}};",
        ".global .align 4 v;",
        ".global .u32 v = (1;",
        ".global .attribute(.managed .u32 v;",
    ],
)
def test_a_declaration_that_makes_no_sense_is_refused(declaration: str) -> None:
    with pytest.raises(PtxSyntaxError, match="line"):
        of_lanes("mov.u32 %d, 0;", declaration)


def test_registers_may_be_vectors() -> None:
    body = """.reg .v2 .u32 v; .reg .v4 .f32 w; .reg .v2 .u16 h;
    { .reg .u32 v; mov.u32 v, 9; mov.u32 %d, v; }
    mov.b32 h, 0x00050002; mov.u32 v.x, %t; cvt.u32.u16 v.y, h.y;
    mov.f32 w.x, 1.0; mov.f32 w.a, 4.0; add.f32 w.r, w.x, w.w; cvt.rzi.u32.f32 %d, w.x;
    add.u32 %d, %d, v.x; add.u32 %d, %d, v.g;"""
    # The inner v is another variable.
    assert of_lanes(body.replace("{ .reg .u32 v; mov.u32 v, 9; mov.u32 %d, v; }", "")) == [
        lane + 10 for lane in range(32)
    ]


@pytest.mark.parametrize(("negation", "those"), [("", range(4)), ("!", range(4, 32))])
def test_a_guard_decides_whether_a_function_is_called(negation: str, those: range) -> None:
    body = f"setp.lt.u32 %p, %t, 4; mov.u32 %d, 9; @{negation}%p call (%d), doubled, (%t);"
    want = [2 * lane if lane in those else 9 for lane in range(32)]
    assert of_lanes(body, DOUBLED) == want


def test_a_guard_decides_whether_a_table_is_used() -> None:
    body = """
    T: .branchtargets A, B;
    .reg .b32 i; mov.u32 %d, 5; and.b32 i, %t, 1; setp.lt.u32 %p, %t, 8;
    @%p brx.idx i, T;
    bra E;
    A: mov.u32 %d, 10; bra E;
    B: mov.u32 %d, 20;
    E:"""
    assert of_lanes(body) == [(10, 20)[lane % 2] if lane < 8 else 5 for lane in range(32)]


SWITCH = """.func (.reg .b32 r) switch (.reg .b32 a) {
  .reg .b32 i; and.b32 i, a, 1; brx.idx i, T;
  T: .branchtargets A, B;
  A: add.u32 r, a, 10; bra E;
  B: add.u32 r, a, 20;
  E: ret;
}
"""


def switched(number: int, by: tuple[int, int] = (10, 20)) -> int:
    return number + by[number % 2]


@pytest.mark.parametrize(
    ("body", "want"),
    [
        (
            "call (%d), switch, (%t); add.u32 %t, %d, 1; call (%d), switch, (%t);",
            [switched(switched(lane) + 1) for lane in range(32)],
        ),
        (
            "call (%d), switch, (%t); call (%d), other, (%d);",
            [switched(switched(lane), (1000, 2000)) for lane in range(32)],
        ),
        (
            """{ T: .branchtargets A, B; .reg .b32 i; and.b32 i, %t, 1; brx.idx i, T;
            A: mov.u32 %t, 4; bra E; B: mov.u32 %t, 7; E: call (%d), switch, (%t); }""",
            [switched((4, 7)[lane % 2]) for lane in range(32)],
        ),
        (
            """.reg .b32 i; and.b32 i, %t, 1;
            { T: .branchtargets A, B; brx.idx i, T;
              A: mov.u32 %d, 4; bra E; B: mov.u32 %d, 7; E: }
            { T: .branchtargets A, B; brx.idx i, T;
              A: add.u32 %d, %d, 100; bra E; B: add.u32 %d, %d, 200; E: }""",
            [(104, 207)[lane % 2] for lane in range(32)],
        ),
    ],
)
def test_a_table_belongs_to_its_scope_and_to_each_call(body: str, want: list[int]) -> None:
    other = SWITCH.replace(" switch ", " other ").replace("10;", "1000;").replace("20;", "2000;")
    assert of_lanes(body, SWITCH + other) == want


def test_calls_of_a_function_share_its_shared_variables() -> None:
    module = """.func (.reg .b32 r) counted (.reg .b32 first) {
      .shared .b32 s[32]; .reg .b32 at, i; .reg .pred p;
      mov.u32 i, %tid.x; mov.u32 at, s; mad.lo.u32 at, i, 4, at;
      setp.ne.u32 p, first, 0; @p st.shared.u32 [at], i;
      ld.shared.u32 r, [at]; add.u32 r, r, 5; st.shared.u32 [at], r; ret;
    }"""
    body = "call (%d), counted, (1); call (%d), counted, (0);"
    assert of_lanes(body, module) == [lane + 10 for lane in range(32)]


def test_an_alias_is_another_name_of_a_function() -> None:
    module = DOUBLED + ".func (.reg .b32 r) twice (.reg .b32 a); .alias twice, doubled;"
    assert of_lanes("call (%d), twice, (%t);", module) == [2 * lane for lane in range(32)]


def test_a_pragma_may_stand_before_the_body() -> None:
    directives = '.maxntid 16*2, 1, 1 .pragma "nounroll";'
    assert of_lanes("mov.u32 %d, 1;", directives=directives) == [1] * 32


def test_an_access_may_be_relaxed_memory_mapped() -> None:
    body = "st.mmio.relaxed.sys.global.u32 [%o], %t; ld.mmio.relaxed.sys.global.u32 %d, [%o];"
    assert of_lanes(body) == list(range(32))


@pytest.mark.parametrize(
    ("space", "body"),
    [
        ("const", "mov.u64 %q, k; cvta.const.u64 %q, %q;"),
        ("global", "mov.u64 %q, g; cvta.global.u64 %q, %q;"),
        ("shared", "mov.u64 %q, s; cvta.shared.u64 %q, %q;"),
        ("param", "mov.b64 %q, out; cvta.param.u64 %q, %q;"),
        ("local", "mov.u64 %q, l; cvta.local.u64 %q, %q;"),
    ],
)
def test_isspacep_knows_the_space_of_an_address(space: str, body: str) -> None:
    module = ".const .u32 k = 1; .global .u32 g = 2; "
    text = ".shared .u32 s; .local .u32 l; mov.u32 %d, 0;" + body
    spaces = ("const", "global", "shared", "param", "local")
    for place, name in enumerate(spaces):
        text += f"isspacep.{name} %p, %q; @%p add.u32 %d, %d, {1 << place};"
    assert of_lanes(text, module) == [1 << spaces.index(space)] * 32


@pytest.mark.parametrize(
    ("body", "what"),
    [
        ("call (%d), again, (%t);", "a recursive call"),
        ("call (%d), far, (%t);", "a computed address in the parameters of a call"),
    ],
)
def test_a_call_that_is_refused_is_named_with_its_line(body: str, what: str) -> None:
    module = """.func (.reg .b32 r) again (.reg .b32 a) { call (r), again, (a); ret; }
    .func (.reg .b32 r) far (.param .b32 a) {
      .reg .b64 q; mov.b64 q, a; ld.param.b32 r, [q]; ret;
    }"""
    call: Any = body if "again" in body else "{ .param .b32 a; st.param.b32 [a], %t; " + body
    call = call.replace("(%t)", "(a)") + " }" if "far" in body else call
    with pytest.raises(UnknownInstruction, match=rf"{what}(.|\n)*PTX line [46]"):
        of_lanes(call, module)


def test_a_call_of_a_function_outside_the_module_is_refused_by_name() -> None:
    declared = ".extern .func (.param .b64 r) malloc (.param .b64 a);"
    call = "{ .param .b64 a, r; st.param.b64 [a], 16; call (r), malloc, (a); } mov.b32 %d, 0;"
    with pytest.raises(UnknownInstruction, match="the external function malloc") as caught:
        of_lanes(call, declared)
    assert "isa/" not in caught.value.way_out


@pytest.mark.parametrize(
    "kernel",
    [
        ".visible .entry f(",
        ".visible .entry f(.param .u64 a) { .reg .b32 %r<",
        ".visible .entry f(.param .u64 a) { .reg .b32 %r<%x>; }",
        ".visible .entry f(.param .align ; .u64 a) { ret; }",
        ".visible .entry f(.param .u64 .ptr .align .global a) { ret; }",
        '.visible .entry f(.param .u64 a) { .pragma "x"',
        ".visible .entry f(.param .u64 a) .maxntid",
        ".visible .entry f(.param .u64 a) { bra",
        ".visible .entry f(.param .u64 a) { T: .branchtargets A,",
        ".alias f, ",
    ],
)
def test_text_that_ends_or_lacks_a_number_is_refused(kernel: str) -> None:
    with pytest.raises(PtxSyntaxError, match="line"):
        run_ptx(kernel, "f", 1, 32, LANES)


@pytest.mark.parametrize("body", ["bra %t;", "bra;", "brx.idx %t, %t;", "brx.idx %t;"])
def test_a_jump_to_no_label_is_refused(body: str) -> None:
    with pytest.raises(UnknownInstruction, match="PTX line 8"):
        of_lanes(body)
