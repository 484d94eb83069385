"""What is emitted: a file, its kernel, and the fields of the kernel's one parameter."""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.plan import Plan
from flashgen.spec import AttentionSpec

DTYPE_SHORT = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}


@dataclass(frozen=True)
class Param:
    """One field of the kernel's ``struct Params``, in order.

    ``ctype`` is "pointer", "int64", "int32", "float32", or "tensormap" for what TMA knows of the
    tensor of that name, 128 bytes.
    """

    name: str
    ctype: str
    declaration: str
    what: str

    @property
    def comment(self) -> str:
        """Behind the declaration: a shape, or what the number counts."""
        return f"  // {self.what}" if self.what else ""


@dataclass(frozen=True)
class Source:
    """One emitted file, and what it takes to launch its kernel.

    Attributes:
        name: of the ``extern "C"`` kernel.
        filename: of the file, without folders.
        text: CUDA C++, self-contained.
        params: fields of the one by-value ``struct Params``, in order.
        plan: block size, shared memory and grid of the launch.
    """

    name: str
    filename: str
    text: str
    params: tuple[Param, ...]
    plan: Plan

    @property
    def role(self) -> str:
        """What the kernel computes: "forward", or a part of backward, as `Plan.kernel` has it."""
        return self.plan.kernel


@dataclass(frozen=True)
class Element:
    """Names that the operand type has in PTX."""

    mma: str
    bits: str
    constraint: str


ELEMENTS = {
    "float16": Element("f16", "b16", "h"),
    "bfloat16": Element("bf16", "b16", "h"),
    "float32": Element("tf32", "f32", "f"),
}


def kernel_name(spec: AttentionSpec, role: str, heads_per_tile: int = 1) -> str:
    """``causal_forward_fp16_d64``: what profiles, symbols and files are called by."""
    dims = f"d{spec.head_dim}"
    if spec.head_dim_v != spec.head_dim:
        dims += f"v{spec.head_dim_v}"
    place = role if role == "forward" else f"backward_{role}"
    heads = f"_heads{heads_per_tile}" if heads_per_tile > 1 else ""
    return f"{spec.name}_{place}_{DTYPE_SHORT[spec.dtype]}_{dims}{heads}"


def tidy(text: str) -> str:
    """The text without trailing spaces and blank lines in a row; directives begin at the left."""
    lines: list[str] = []
    for line in (raw.rstrip() for raw in text.splitlines()):
        if line.lstrip().startswith("#"):
            line = line.lstrip()
        if not line and (not lines or not lines[-1]):
            continue
        lines.append(line)
    return "\n".join(lines).rstrip() + "\n"
