"""The forms that instructions have in PTX: which modifiers go together, and how many operands.

Emitters take the modifiers that they know and compute something in any case; what a missing one
means is not theirs to guess. So an instruction of one of these opcodes is first compared with the
forms of its opcode. Opcodes that are not listed check their modifiers themselves.
"""

from __future__ import annotations

import functools

_WORDS = {
    "INT": "u16/u32/u64/s16/s32/s64",
    "WIDE": "u32/u64/s32/s64",
    "BITS": "b16/b32/b64",
    "F16": "f16/f16x2",
    "BF16": "bf16/bf16x2",
    "RND": "rn/rz/rm/rp",
    "ORDERED": "eq/ne/lt/le/gt/ge",
    "UNSIGNED": "lo/ls/hi/hs",
    "FLOAT": "eq/ne/lt/le/gt/ge/equ/neu/ltu/leu/gtu/geu/num/nan",
    "ASYNC": "async relaxed? cluster? shared::cluster? mbarrier::complete_tx::bytes",
    "AT": "relaxed/acquire/release/acq_rel? cta/cluster/gpu/sys? "
    "global/shared/shared::cta/shared::cluster/local? L2::cache_hint?",
}
# Opcodes, the numbers of their operands, and their forms. A form is modifiers in any order, of
# which those with "?" may be missing and "a/b" is one of several; capitals are those of `_WORDS`.
_TABLE = """
add sub: 3: INT; u16x2/s16x2; sat s32; cc WIDE; RND? ftz? sat? f32; RND? f64; rn? ftz? sat? F16;
    rn? BF16; RND? ftz? f32x2
addc subc: 3: cc? WIDE
mul: 3: lo/hi INT; wide u16/u32/s16/s32; RND? ftz? sat? f32; RND? f64; rn? ftz? sat? F16; rn? BF16;
    RND? ftz? f32x2
mad: 4: lo/hi INT; wide u16/u32/s16/s32; hi sat s32; lo/hi cc WIDE; RND ftz? sat? f32; RND f64
madc: 4: lo/hi cc? WIDE
mul24: 3: lo/hi u32/s32
mad24: 4: lo/hi u32/s32; hi sat s32
fma: 4: RND ftz? sat? f32; RND f64; rn ftz? sat? F16; rn ftz? relu F16; rn relu? BF16;
    rn oob relu? F16; rn oob relu? BF16; RND ftz? f32x2
div: 3: INT; RND/approx/full ftz? f32; RND f64
rem: 3: INT
sad: 4: INT
abs neg: 2: s16/s32/s64; ftz? f32; f64; ftz? F16; BF16
min max: 3: INT; u16x2/s16x2; relu s32/s16x2; ftz? NaN? f32; ftz? NaN? xorsign abs f32; f64;
    ftz? NaN? F16; ftz? NaN? xorsign abs F16; NaN? BF16; NaN? xorsign abs BF16
rcp: 2: RND/approx ftz? f32; RND f64; approx ftz f64
sqrt: 2: RND/approx ftz? f32; RND f64
rsqrt: 2: approx ftz? f32/f64
sin cos lg2: 2: approx ftz? f32
ex2: 2: approx ftz? f32; approx F16; approx ftz BF16
tanh: 2: approx f32/f16/f16x2/bf16/bf16x2
copysign: 3: f32/f64
and or xor: 3: pred/b16/b32/b64
not: 2: pred/b16/b32/b64
cnot: 2: BITS
shl: 3: BITS
shr: 3: BITS; INT
shf: 4: l/r wrap/clamp b32
popc clz brev: 2: b32/b64
bfind: 2: shiftamt? WIDE
bfe: 4: WIDE
bfi: 5: b32/b64
bmsk: 3: wrap/clamp b32
szext: 3: wrap/clamp u32/s32
fns: 4: b32
prmt: 4: b32 f4e/b4e/rc8/ecl/ecr/rc16?
lop3: 5: b32
lop3: 6: and/or b32
dp4a: 4: u32/s32 u32/s32
dp2a: 4: lo/hi u32/s32 u32/s32
setp: 3 4: ORDERED INT and/or/xor?; eq/ne BITS and/or/xor?; UNSIGNED u16/u32/u64 and/or/xor?;
    FLOAT ftz? f32 and/or/xor?; FLOAT f64 and/or/xor?; FLOAT ftz? F16 and/or/xor?;
    FLOAT BF16 and/or/xor?
selp: 4: BITS; INT; f32/f64
slct: 4: b16/b32/b64/u16/u32/u64/s16/s32/s64/f32/f64 s32;
    ftz? b16/b32/b64/u16/u32/u64/s16/s32/s64/f32/f64 f32
testp: 2: finite/infinite/number/notanumber/normal/subnormal f32/f64
vote: 3: sync all/any/uni pred; sync ballot b32
match: 3: any/all sync b32/b64
shfl: 5: sync up/down/bfly/idx b32
redux: 3: sync add/min/max u32/s32; sync and/or/xor b32; sync min/max abs? NaN? f32
activemask: 1: b32
elect: 2: sync
nanosleep: 1: u32
bar barrier: 1: warp sync; cta? sync aligned?
bar barrier: 2: cta? sync/arrive aligned?
bar barrier: 3 4: cta? red aligned? popc u32; cta? red aligned? and/or pred
barrier: 0: cluster arrive release/relaxed? aligned?; cluster wait acquire? aligned?
atom: 3 4: AT add/min/max u32/s32/u64; AT min/max s64; AT add f32/f64; AT inc/dec u32;
    AT and/or/xor/exch b32/b64; AT exch b128; AT add/min/max noftz F16; AT add/min/max noftz BF16;
    AT v2/v4 add f32; AT v2/v4 add/min/max noftz F16; AT v2/v4 add/min/max noftz BF16;
    AT v8 add/min/max noftz f16/bf16
atom: 4 5: AT cas b16/b32/b64/b128
red: 2 3: AT add/min/max u32/s32/u64; AT min/max s64; AT add f32/f64; AT inc/dec u32;
    AT and/or/xor b32/b64; AT add/min/max noftz F16; AT add/min/max noftz BF16; AT v2/v4 add f32;
    AT v2/v4 add/min/max noftz F16; AT v2/v4 add/min/max noftz BF16;
    AT v8 add/min/max noftz f16/bf16
red: 3: ASYNC inc/dec u32; ASYNC add/min/max u32/s32; ASYNC and/or/xor b32; ASYNC add u64
"""
Form = tuple[tuple[frozenset[str], bool], ...]
"""The words of each modifier, and whether it may be missing."""


def _form(text: str) -> Form:
    modifiers = []
    for word in " ".join(_WORDS.get(word, word) for word in text.split()).split():
        ones = word.removesuffix("?").split("/")
        parts = {part for one in ones for part in _WORDS.get(one, one).split("/")}
        modifiers.append((frozenset(parts), word.endswith("?")))
    return tuple(modifiers)


@functools.cache
def _forms() -> dict[str, list[tuple[frozenset[int], tuple[Form, ...]]]]:
    """The table, read when the first instruction is looked up."""
    table: dict[str, list[tuple[frozenset[int], tuple[Form, ...]]]] = {}
    for line in _TABLE.strip().replace("\n    ", " ").splitlines():
        opcodes, counts, forms = line.split(": ", 2)
        entry = (
            frozenset(map(int, counts.split())),
            tuple(_form(form) for form in forms.split(";")),
        )
        for opcode in opcodes.split():
            table.setdefault(opcode, []).append(entry)
    return table


def _has(form: Form, modifiers: tuple[str, ...]) -> bool:
    left = list(modifiers)
    for words, optional in form:
        word = next((w for w in left if w in words), "")
        if word:
            left.remove(word)
        elif not optional:
            return False
    return not left


def are_listed(opcode: str) -> bool:
    """Whether `problem` compares instructions of this opcode with its forms."""
    return opcode in _forms()


@functools.cache
def problem(opcode: str, modifiers: tuple[str, ...], operands: int) -> str:
    """Why an instruction has none of the forms of its opcode; '' if it has one."""
    entries = _forms().get(opcode, ())
    fitting = [counts for counts, forms in entries if any(_has(form, modifiers) for form in forms)]
    if entries and not fitting:
        possible = {w for _, forms in entries for form in forms for words, _ in form for w in words}
        if strange := [word for word in modifiers if word not in possible]:
            return "the modifier ." + " .".join(strange)
        return "PTX has no form with these modifiers: one is missing, or they exclude each other"
    if entries and not any(operands in counts for counts in fitting):
        return "another number of operands"
    return ""
