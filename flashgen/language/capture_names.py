"""Checks of capture names, which become arguments, struct fields and C++ identifiers."""

from __future__ import annotations

import keyword
import re

from flashgen.language.user_source import refuse

# Names that mods, the operator's arguments or the emitted file already use.
BUILT_IN_NAMES = frozenset(
    """
    b h q k v o score batch heads seq_q seq_k q_lo q_hi k_lo k_hi out lse scale q_offset k_offset
    heads_q heads_kv h_offset whole whole_heads whole_seq_q whole_seq_k split_size head_dim
    head_dim_v dropout_p return_lse backend arch rng deterministic dout dlse dq dk dv
    """.split()  # noqa: SIM905
)

_RESERVED_WORDS = frozenset(
    """
    alignas alignof and and_eq asm auto bitand bitor bool break case catch char char8_t char16_t
    char32_t class compl concept const consteval constexpr constinit const_cast continue co_await
    co_return co_yield decltype default delete do double dynamic_cast else enum explicit export
    extern false float for friend goto if inline int long mutable namespace new noexcept not not_eq
    nullptr operator or or_eq private protected public register reinterpret_cast requires return
    short signed sizeof static static_assert static_cast struct switch template this thread_local
    throw true try typedef typeid typename union unsigned using virtual void volatile wchar_t while
    xor xor_eq threadIdx blockIdx blockDim gridDim warpSize half half2 float2 float4 int2 int4
    min max
    """.split()  # noqa: SIM905
)


def check_name(kind: str, name: str) -> None:
    """Raises SpecError unless a capture of this ``kind`` (Scalar or Tensor) can have the name."""
    plain = isinstance(name, str) and re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name)
    if not plain or "__" in name:
        refuse(
            f"the name of a {kind} is a C identifier",
            numbers=f"name {name!r}",
            way_out="letters, digits and single underscores, a letter first, as in 'window'",
        )
    if name in _RESERVED_WORDS or keyword.iskeyword(name):
        refuse(
            f"the name of a {kind} is a reserved word of C++, CUDA or Python",
            numbers=f"name {name!r}",
            way_out=f"another name, as in {name + '_value'!r}",
        )
    if name in BUILT_IN_NAMES or re.fullmatch(r"t[0-9]+", name):
        refuse(
            f"the name of a {kind} already has a meaning in flashgen",
            numbers=f"name {name!r}; in use: {', '.join(sorted(BUILT_IN_NAMES))}, t0, t1, ...",
            way_out="fg.batch, fg.heads, fg.seq_q and fg.seq_k for sizes, or another name",
        )
