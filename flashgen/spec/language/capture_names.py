"""Checks of capture names, which become arguments of calls, and of names of kernels.

What the name of a capture means in C++ or CUDA does not matter: emitted files have it behind a
prefix.
"""

from __future__ import annotations

import keyword
import re

from flashgen.spec.language.user_source import refuse

# Arguments of mods and of the operator, and symbols of their expressions.
BUILT_IN_NAMES = frozenset(
    """
    b h q k v o score batch heads seq_q seq_k q_lo q_hi k_lo k_hi out lse scale q_offset k_offset
    heads_q heads_kv h_offset whole whole_heads whole_seq_q whole_seq_k split_size head_dim
    head_dim_v dropout_p return_lse return_aux backend arch rng random_state deterministic dout dlse
    dq dk dv _needed _self batch_invariant first_row row_lse row_slope owned_block listed_blocks
    choice_first choice_batch choice_heads choice_seq_q choice_seq_k choice_group
    choice_rows choice_lengths choice_q_offset choice_sink choice_lse
    """.split()  # noqa: SIM905
)


MOST_LETTERS = 80
"""Of the name of a spec, and of a statistic: a file in the kernel cache is named after both, what
the kernel does and a digest, in at most 255 bytes."""


def is_part_of_names(name: object) -> bool:
    """Whether kernels, files and operators of torch can be named after it."""
    return _is_ascii_identifier(name) and len(str(name)) <= MOST_LETTERS


def _is_ascii_identifier(name: object) -> bool:
    return isinstance(name, str) and name.isidentifier() and name.isascii()


def check_name(kind: str, name: str) -> None:
    """Raises SpecError unless a capture of this ``kind`` (Scalar or Tensor) can have the name."""
    if not _is_ascii_identifier(name):
        refuse(
            f"the name of a {kind} is an identifier",
            numbers=f"name {name!r}",
            way_out="ASCII letters, digits and underscores, no digit first, as in 'window'",
        )
    if keyword.iskeyword(name):
        refuse(
            f"the name of a {kind} is a keyword of Python, which no argument of a call can be",
            numbers=f"name {name!r}",
            way_out=f"another name, as in {name + '_value'!r}",
        )
    if name in BUILT_IN_NAMES or re.fullmatch(r"t[0-9]+", name):
        refuse(
            f"the name of a {kind} already has a meaning in flashgen",
            numbers=f"name {name!r}; in use: {', '.join(sorted(BUILT_IN_NAMES))}, t0, t1, ...",
            way_out="fg.batch, fg.heads, fg.seq_q and fg.seq_k for sizes, or another name",
        )
