"""Random mistakes of users: arguments of a call, texts of spec files, command lines."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from tests.support.commands import CAUSAL
from tests.support.paths import ROOT

SIZES = (2, 4, 5, 7)
"""Batch, heads, queries and keys of the call that is right."""

HEAD_DIM = 16


def right_call() -> dict[str, Any]:
    """The arguments of a call that is right, by name."""
    batch, heads, seq_q, seq_k = SIZES
    return {
        "q": torch.ones(batch, heads, seq_q, HEAD_DIM),
        "k": torch.ones(batch, heads // 2, seq_k, HEAD_DIM),
        "v": torch.ones(batch, heads // 2, seq_k, HEAD_DIM),
        "bias": torch.ones(heads),
        "ids": torch.ones(batch, seq_k, dtype=torch.int32),
        "window": 3,
        "slope": 0.5,
        "on": True,
    }


NAMES = (
    *right_call(),
    *("scale", "q_offset", "k_offset", "return_lse", "dropout_p", "rng", "arch", "deterministic"),
    *("backend", "bais", "windo", "dropout", "attn_mask", "is_causal", "layout", "self", "kwargs"),
)

_NUMBERS = (
    *(0, 1, -1, 3, True, 2**31, -(2**31), 2**63, 2**70, -(2**70), 0.0, 0.5, -0.5, 1.0, 1e39, 1e-50),
    *(math.nan, math.inf, -math.inf, 1j, Decimal("0.5"), Fraction(1, 3)),
    *(np.float32(0.5), np.int64(3), np.bool_(True), np.float16("nan")),
)
_OBJECTS = (None, "", "x", "cpu", "gpu", "sm_99", "sm_90a", b"q", (), [], {}, [1.0], (1, 2), set())


def _tensors() -> list[Any]:
    ordinary = torch.ones(2, 4, 5, HEAD_DIM)
    return [
        torch.tensor(3),
        torch.tensor(math.nan),
        torch.tensor([1, 2]),
        torch.ones(0),
        torch.ones(4, requires_grad=True),
        torch.ones(2, 4, 5),
        torch.ones(2, 4, 5, HEAD_DIM, 1),
        torch.ones(0, 4, 5, HEAD_DIM),
        torch.ones(2, 0, 5, HEAD_DIM),
        torch.ones(2, 4, 0, HEAD_DIM),
        torch.ones(2, 4, 5, 0),
        torch.ones(2, 3, 5, HEAD_DIM),
        torch.ones(1, 1, 1, 1).expand(2, 4, 5, HEAD_DIM),
        ordinary.transpose(2, 3).contiguous().transpose(2, 3),
        ordinary[..., ::2],
        *(ordinary.to(dtype) for dtype in (torch.float16, torch.float64, torch.int32, torch.bool)),
        *(ordinary.to(dtype) for dtype in (torch.complex64, torch.float8_e4m3fn, torch.uint8)),
        ordinary.to_sparse(),
        ordinary.to("meta"),
        torch.nested.nested_tensor([torch.ones(4, 5, HEAD_DIM), torch.ones(4, 6, HEAD_DIM)]),
        torch.quantize_per_tensor(ordinary, 0.1, 0, torch.qint8),
        torch.nn.Parameter(ordinary),
        torch.ones(2, 7, dtype=torch.int64),
        np.ones((2, 4, 5, HEAD_DIM)),
        np.zeros(3),
    ]


VALUES = st.one_of(
    st.sampled_from(_NUMBERS),
    st.sampled_from(_OBJECTS),
    st.sampled_from(_tensors()),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
)

CHANGES = st.lists(
    st.one_of(
        st.tuples(st.just("set"), st.sampled_from(NAMES), VALUES),
        st.tuples(st.just("drop"), st.sampled_from(tuple(right_call())), st.none()),
    ),
    min_size=1,
    max_size=3,
)
"""Changes to the right call: a value for an argument, or an argument that is left out."""


def changed_call(changes: list[tuple[str, str, Any]]) -> dict[str, Any]:
    call = right_call()
    for kind, name, value in changes:
        if kind == "set":
            call[name] = value
        else:
            call.pop(name, None)
    return call


OPTIONS_OF: dict[str, tuple[str, ...]] = {
    "AttentionSpec": (
        *("mask_mod", "score_mod", "head_dim", "head_dim_v", "dtype", "scale", "dropout", "sink"),
        *("packed", "block_sparse", "name", "no_such"),
    ),
    "Scalar": ("name", "dtype", "minimum", "no_such"),
    "Tensor": ("name", "dims", "dtype", "grad", "no_such"),
    "BlockSparse": ("mod", "block_q", "block_k", "block_size", "no_such"),
    "Layout": ("blocks", "no_such"),
    "attention": ("spec",),
    "load": ("path",),
    "plan": ("spec", "arch", "sram", "policy", "tile", "heads_per_tile", "no_such"),
    "emit": ("spec", "arch", "sram", "tile", "tiles", "access_bytes", "deterministic"),
    "flex_attention": (
        *("query", "key", "value", "score_mod", "block_mask", "scale", "enable_gqa", "return_lse"),
        *("return_aux", "kernel_options"),
    ),
}
"""Names of the public functions, and options of each."""

_MODS = (lambda: 1, lambda *x: x, lambda b, h, q, k: q >= k, lambda s, b, h, q, k: s, print, int)

PUBLIC_CALLS = st.sampled_from(sorted(OPTIONS_OF)).flatmap(
    lambda name: st.tuples(
        st.just(name),
        st.dictionaries(
            st.sampled_from(OPTIONS_OF[name]),
            st.one_of(VALUES, st.sampled_from(_MODS)),
            max_size=4,
        ),
    )
)
"""The name of a public function, and arguments for it."""

_SPECS = [path.read_bytes() for path in sorted((ROOT / "specs").glob("*.py"))]

_SNIPPETS = [
    *(b"\0", b"\xff\xfe", b"# -*- coding: rot13 -*-\n", b"# -*- coding: none -*-\n", b"(" * 500),
    *(b"\nraise SystemExit(0)\n", b"\nexit()\n", b"\n1 / 0\n", b"\nraise ValueError('\\n' * 9)\n"),
    *(b"\nimport no_such_module\n", b"\nspec = None\n", b"\nspec = spec.replace(head_dim='x')\n"),
    *(b"\nexample_scalars = 3\n", b"\ndef f(): return f()\nf()\n", b"\ninput()\n"),
    *(b"\nclass E(BaseException): pass\nraise E()\n", b"\nspec = [spec]\n", b"\ndel spec\n"),
    *(b" % 0 ", b" // 0 ", b" ** 99 ", b" and ", b" not ", b"~", b"math.inf", b"[0]", b"None"),
    *(b"score", b"q", b"k", b"1e400", b"-1", b"'x'", b"lambda: 0", b"fg.", b".item()", b"()"),
]


@st.composite
def spec_files(draw: Any) -> bytes:
    """The text of a file in specs/, cut off, with other bytes, or with other code in it."""
    text: bytes = draw(st.sampled_from(_SPECS))
    for _ in range(draw(st.integers(1, 3))):
        at, length = draw(st.integers(0, len(text))), draw(st.integers(0, 12))
        kind = draw(st.sampled_from(("cut", "bytes", "code", "remove", "end")))
        if kind == "cut":
            text = text[:at]
        elif kind == "bytes":
            text = text[:at] + draw(st.binary(max_size=8)) + text[at:]
        elif kind == "code":
            text = text[:at] + draw(st.sampled_from(_SNIPPETS)) + text[at + length :]
        elif kind == "remove":
            text = text[:at] + text[at + length :]
        else:
            text += draw(st.sampled_from(_SNIPPETS))
    return text


_COMMANDS = (
    *("run", "plan", "profile", "report", "tune", "inspect", "emit", "doctor"),
    *("cache list", "cache prune"),
    *("cache", "cach", "help", "", "--version", "--help", "-x"),
)
_OPTIONS = (
    *("--dtype", "--head-dim", "--head-dim-v", "--arch", "--sram", "--shape", "--scalar", "--seed"),
    *("--backward", "--deterministic", "--dropout", "--q-offset", "--backend", "--policy", "-o"),
    *(
        "--lines",
        "--plot",
        "--tile",
        "--predict",
        "--most",
        "--show",
        "--kernel",
        "--certify",
        "--check",
        "--device",
    ),
    *("--max-days", "--max-megabytes", "--no-check", "--ptx", "--no-such", "-h"),
)
_WORDS = (
    *("", "0", "-1", "1", "3", "8", "12", "64", "2.5", "nan", "inf", "-inf", "1e999", "9" * 30),
    *("9" * 5000, "a" * 300, "x", "spec", ":", "=", "window=", "window=3", "=3", "\udcff", "\0"),
    *("1,1,16", "1,2", "0,0,0", "1,3,2,16,16", "1,1,1,1,1,1", "a,b,c", "100000,100000,100000"),
    *("float16", "float64", "torch.float16", "sm_80", "sm_90a", "sm_7", "forward", "dq", "paper"),
    *("gpu", "emulator", "tiled", "/dev/null", "/dev/full", "/no/such/x.png", "/", ".", "..", "~"),
    *(CAUSAL, f"{CAUSAL}:spec", f"{CAUSAL}:none", str(ROOT / "specs" / "alibi.py")),
)

COMMAND_LINES = st.builds(
    lambda command, path, rest: [*command.split(), *path, *rest],
    st.sampled_from(_COMMANDS),
    st.lists(st.sampled_from((CAUSAL, *_WORDS)), max_size=2),
    st.lists(
        st.one_of(st.sampled_from(_OPTIONS), st.sampled_from(_WORDS), st.text(max_size=6)),
        max_size=5,
    ),
)
