"""An emitted file, its kernel, and the fields of the kernel's parameter struct."""

from __future__ import annotations

from dataclasses import dataclass, field

from flashgen.kernels.codegen.integer_ranges import AssumedBlock, beyond_int32
from flashgen.kernels.planner import Plan
from flashgen.shared.call import CallRanges
from flashgen.shared.dtypes import CACHE_DTYPES, OPERANDS
from flashgen.shared.launch_facts import APPEND_KERNELS, CONVERT_KERNELS
from flashgen.spec.language.spec import AttentionSpec

_CTYPES = {"long long": "int64", "int": "int32", "float": "float32", "TensorMap": "tensormap"}


@dataclass(frozen=True)
class Param:
    """One field of the kernel's ``struct Params``.

    Attributes:
        name: its name among the arguments of a launch.
        cpp_type: its type in C++.
        meaning: a shape, or the meaning of a number; "" where the name says it.
        cpp_name: its name in C++, where it differs.
    """

    name: str
    cpp_type: str
    meaning: str = ""
    cpp_name: str = ""

    @property
    def ctype(self) -> str:
        """ "pointer", "int64", "int32", "float32", or "tensormap" for a descriptor of TMA."""
        return _CTYPES.get(self.cpp_type, "pointer")

    @property
    def field(self) -> str:
        """The name of the field in C++."""
        return self.cpp_name or self.name

    @property
    def declaration(self) -> str:
        """The field in the struct, without its comment."""
        return f"{self.cpp_type} {self.field};"

    @property
    def line(self) -> str:
        """The line of the struct."""
        return f"  {self.declaration}" + (f"  // {self.meaning}" if self.meaning else "")


@dataclass(frozen=True)
class Source:
    """One emitted file, with the data for the launch of its kernel.

    Attributes:
        name: the name of the ``extern "C"`` kernel.
        filename: the name of the file, without folders.
        text: self-contained CUDA C++.
        params: the fields of ``struct Params``, the kernel's only parameter, in order.
        plan: the plan of the kernel, which has the block size and shared memory of the launch.
        spec_section: the functions of ``text`` that are made from the spec's mask, score and
            tensors, one string each, in the order of ``text``.
        outlined: the functions of the spec that are too large to be inlined, by name, with their
            instructions. Calling them takes a stack, on which registers are kept.
        assumptions: what must be within int32 in calls of the kernel without wide integers.
    """

    name: str
    filename: str
    text: str
    params: tuple[Param, ...]
    plan: Plan
    spec_section: tuple[str, ...] = ()
    outlined: tuple[tuple[str, int], ...] = ()
    assumptions: tuple[AssumedBlock, ...] = field(default=(), repr=False, compare=False)

    @property
    def calls(self) -> str:
        """The functions that are not inlined, in words; "" where there are none."""
        return "; ".join(
            f"{name}, about {count:,} instructions: too large to be inlined"
            for name, count in self.outlined
        )

    @property
    def role(self) -> str:
        """The kernel's part of the computation, `Plan.kernel`: "forward", "dq" or another."""
        return self.plan.kernel

    def integers(self, ranges: CallRanges) -> str:
        """The width of integers in words, with the reason in a call; "" for the only width."""
        if not any(block.assumes for block in self.assumptions):
            return ""
        if self.plan.integer_bits == 64:
            reason = beyond_int32(self.assumptions, ranges)
            return f"64-bit: {reason or 'another kernel of the pass needs it'}"
        return "32-bit: the sizes, offsets and scalars of the call keep all values within int32"

    @property
    def options(self) -> tuple[str, ...]:
        """The options of the compiler for this file besides those for all files."""
        return options(self.plan)


def options(plan: Plan) -> tuple[str, ...]:
    """The options of the compiler for a kernel of this plan besides those for all kernels.

    Kernels that multiply operands in parts are assembled at level 1 of optimisation. From level 2
    on, ptxas loads and splits operands far ahead of their products, until it has taken all 255
    registers, and spills; level 1 takes 10 to 70 registers less, for about as many instructions.
    """
    return ("--ptxas-options=-O1",) if OPERANDS[plan.dtype].parts > 1 and not plan.streams else ()


WITHOUT_SPEC = ("delta", *CONVERT_KERNELS, "merge", "add_rows", *APPEND_KERNELS)
"""The kernels that read neither mask nor score: specs share their names and their text."""


def kernel_name(spec: AttentionSpec, plan: Plan) -> str:
    """``causal_forward_fp16_d64``: the name in profiles, symbols and file names.

    The delta kernel has the same name and the same text for all specs of one dtype and one head dim
    of v, apart from those with a sink or another divisor than the softmax's. A kernel that converts
    sums has the same text for all specs of one dtype and one head dim, packed or not, whose sums
    have tiles of equal size.
    """
    role, heads_per_tile = plan.kernel, plan.heads_per_tile
    if role == "delta":
        variant = f"{_sink_of_delta(spec)}{_divisor(spec)}"
        return f"delta{variant}_{OPERANDS[spec.dtype].short}_d{spec.head_dim_v}"
    if role in CONVERT_KERNELS:
        packed = "_packed" if spec.packed else ""
        dtype = OPERANDS[spec.dtype].short
        dim = plan.head_dim_v if role == "convert_dv" else plan.head_dim
        rows = f"q{plan.block_q}" if role == "convert_dq" else f"k{plan.block_k}"
        return f"{role}{packed}_{dtype}_d{dim}_{rows}"
    if role == "merge":
        splits = "_splits" if plan.merges_splits else ""
        return f"merge{splits}{_divisor(spec)}_{OPERANDS[spec.dtype].short}_d{spec.head_dim_v}"
    codes = "" if spec.kv_dtype is None else f"_{CACHE_DTYPES[spec.kv_dtype].short}"
    dims = f"d{spec.head_dim}"
    if spec.head_dim_v != spec.head_dim:
        dims += f"v{spec.head_dim_v}"
    dims += "_shared_kv" if plan.one_tensor else ""
    pass_name = role if role in ("forward", "tangent") else f"backward_{role}"
    pass_name += "".join(f"_{name}" for name in plan.tangents)
    pass_name += "_parts" if plan.in_parts else ""
    pass_name += "_max_scores" if plan.returns_maxima else ""
    heads = f"_heads{heads_per_tile}" if heads_per_tile > 1 else ""
    wide = "_int64" if plan.integer_bits == 64 else ""
    return f"{spec.name}_{pass_name}_{OPERANDS[spec.dtype].short}{codes}_{dims}{heads}{wide}"


def _sink_of_delta(spec: AttentionSpec) -> str:
    """A sink changes how the delta kernel recognises empty rows; a learned one has a gradient."""
    if spec.sink is None:
        return ""
    return f"_{spec.sink.name}" if spec.sums_sink else "_fixed_sink"


def _divisor(spec: AttentionSpec) -> str:
    return "" if spec.is_softmax else f"_{spec.normalizer}"
