"""Writes the .ptx files and launches.json of this folder from kernels.py.

Needs Triton but no GPU: ``python build.py``. Each kernel is compiled for sm_80; what a launch
needs (threads, shared memory, parameters, the hidden ones included) goes to launches.json.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import kernels
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

HERE = Path(__file__).parent
FLASH = {"q": "*{0}", "k": "*{0}", "v": "*{0}", "out": "*{0}", "lse": "*fp32", "n": "i32"}
MATMUL = {"a": "*{0}", "b": "*{0}", "c": "*fp32", "m": "i32", "n": "i32", "k": "i32",
          "stride_a": "i32", "stride_b": "i32", "stride_c": "i32"}  # fmt: skip

# name: kernel, argument types, constants, warps, stages, arguments that are multiples of 16
VARIANTS = {
    "vector_add": ("vector_add", {"x": "*fp32", "y": "*fp32", "out": "*fp32", "n": "i32"},
                   {"BLOCK": 1024}, 4, 1, ()),
    "vector_add_wide": ("vector_add", {"x": "*fp32", "y": "*fp32", "out": "*fp32", "n": "i32"},
                        {"BLOCK": 1024}, 4, 1, ("x", "y", "out", "n")),
    "softmax": ("softmax", {"x": "*fp32", "out": "*fp32", "columns": "i32", "stride": "i32"},
                {"BLOCK": 1024}, 4, 1, ()),
    "softmax_bf16": ("softmax", {"x": "*bf16", "out": "*bf16", "columns": "i32", "stride": "i32"},
                     {"BLOCK": 512}, 2, 1, ("x", "out", "stride")),
    "matmul_fp16": ("matmul", {k: t.format("fp16") for k, t in MATMUL.items()},
                    {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 32}, 4, 3,
                    ("a", "b", "c", "k", "stride_a", "stride_b", "stride_c")),
    "matmul_tf32": ("matmul", {k: t.format("fp32") for k, t in MATMUL.items()},
                    {"BLOCK_M": 32, "BLOCK_N": 32, "BLOCK_K": 32}, 2, 2,
                    ("a", "b", "c", "k", "stride_a", "stride_b", "stride_c")),
    "flash_fp16": ("flash", {**{k: t.format("fp16") for k, t in FLASH.items()}, "scale": "fp32"},
                   {"D": 64, "BLOCK_Q": 64, "BLOCK_K": 32}, 4, 3, ("q", "k", "v", "out", "lse")),
    "flash_bf16": ("flash", {**{k: t.format("bf16") for k, t in FLASH.items()}, "scale": "fp32"},
                   {"D": 32, "BLOCK_Q": 32, "BLOCK_K": 32}, 2, 2, ("q", "k", "v", "out", "lse")),
    "running_sums": ("running_sums", {"x": "*i32", "out": "*i32", "columns": "i32"},
                     {"BLOCK": 256}, 4, 1, ()),
    "histogram": ("histogram", {"x": "*i32", "out": "*i32", "n": "i32"}, {"BLOCK": 256}, 2, 1, ()),
}  # fmt: skip


def neutral(ptx: str) -> str:
    """The text without the folder it was compiled in (.file, and DWARF's compilation directory)."""
    ptx = re.sub(r'(\.file\s+\d+\s+)"[^"]*/([^"/]+)"', r'\1"\2"', ptx)
    return re.sub(r"\.b8 \d+( +// DW_AT_comp_dir\n)(?:\.b8 [1-9]\d*\n)*", r".b8 46\1", ptx)


def build(name: str) -> dict[str, object]:
    kernel, types, constants, warps, stages, aligned = VARIANTS[name]
    names = [*types]
    source = ASTSource(
        fn=getattr(kernels, kernel),
        signature={**types, **dict.fromkeys(constants, "constexpr")},
        constexprs=constants,
        attrs={(names.index(a),): [["tt.divisibility", 16]] for a in aligned},
    )
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}
    compiled = triton.compile(source, target=GPUTarget("cuda", 80, 32), options=options)
    ptx = neutral(compiled.asm["ptx"])
    (HERE / f"{name}.ptx").write_text(ptx)
    head = ptx[ptx.index(".entry") :]
    given = head[: head.index(")")].count(".param ")
    return {
        "kernel": kernel,
        "arguments": types,
        "constants": constants,
        "hidden_pointers": given - len(types),
        "threads": 32 * compiled.metadata.num_warps,
        "shared_bytes": compiled.metadata.shared,
        "triton": triton.__version__,
    }


if __name__ == "__main__":
    facts = {name: build(name) for name in VARIANTS}
    (HERE / "launches.json").write_text(json.dumps(facts, indent=1) + "\n")
