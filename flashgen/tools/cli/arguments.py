"""The arguments of the commands: each option is declared once, with its default and its help.

A command is a function of one of these values; `tools.cli.program` makes the command line from
the fields, and its help from the docstring. An option is its help, after the name of its value
where it has one, and before its limits; or typer's own value, where its flags are not its name.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from flashgen.shared.arch import KNOWN
from flashgen.shared.dtypes import OPERAND_DTYPES

DECODING_SHAPE = "1,32,8,1,131072"
"""The shape of ``flashgen plan --decode`` where none is given."""

Scalars = Annotated[
    tuple[str, ...], Option("--scalar", metavar="NAME=VALUE", help="A run-time scalar; repeatable.")
]
InsteadOfForward = Annotated[bool, "The backward kernels instead of the forward kernel."]
TangentInstead = Annotated[bool, "The kernel of forward mode, along all operands, instead."]
Deterministic = Annotated[bool, "With --backward: sums in a fixed order, bitwise reproducible."]
Sram = Annotated[int | None, "Bytes of shared memory per block to plan for, not the arch's own."]
Shape = Annotated[str, "B,H,N or B,Hq,Hkv,Nq,Nk."]
SpecFile = Annotated[
    str, Argument(metavar="SPEC", help="A file that defines spec, or path.py:name.")
]
Arch = Annotated[str | None, "ARCH", f"{KNOWN}."]
QOffset = Annotated[int, "Global position of the first query."]
KOffset = Annotated[int, "Global position of the first key."]
AT_LEAST_0, AT_LEAST_1 = {"min": 0}, {"min": 1}


@dataclass(frozen=True, kw_only=True)
class SpecChanges:
    """What a spec gets instead of its own."""

    dtype: Annotated[str | None, "DTYPE", f"Instead: {', '.join(OPERAND_DTYPES)}."] = None
    head_dim: Annotated[int | None, "Another head dim: a multiple of 8 up to 576."] = None
    head_dim_v: Annotated[int | None, "Another head dim of v and the output."] = None


@dataclass(frozen=True, kw_only=True)
class SpecArguments(SpecChanges):
    """A spec, changes to it, and the target."""

    path: SpecFile
    arch: Arch = None
    sram: Sram = None


@dataclass(frozen=True, kw_only=True)
class DecodingArguments(SpecArguments):
    """A spec, and whether its queries are the last positions of a sequence."""

    decode: Annotated[bool, "Queries at the last positions: one, or the Nq of --shape."] = False
    page: Annotated[int | None, "N", "With --decode: a cache with pages of N keys.", AT_LEAST_1] = (
        None
    )
    split_size: Annotated[
        int | None,
        "N",
        "With --decode: keys of a split, instead of the plan's; 0: none.",
        AT_LEAST_0,
    ] = None
    kv_dtype: Annotated[
        str | None,
        "With --decode and --page: 8-bit codes in the cache, float8_e4m3fn, float8_e5m2 or int8.",
    ] = None


@dataclass(frozen=True, kw_only=True)
class CallArguments(SpecArguments):
    """A spec and a call of it on random operands."""

    shape: Shape = "1,4,256"
    scalars: Scalars = ()
    backward: Annotated[bool, "The backward kernels too."] = False
    deterministic: Deterministic = False
    tangent: Annotated[bool, "The kernel of forward mode too, along all operands."] = False
    dropout: Annotated[float, "P", "Probability of dropping an element of P."] = 0.0
    seed: Annotated[
        int, "Seed of the random operands and of dropout.", {"min": 0, "max": 2**62}
    ] = 0


@dataclass(frozen=True, kw_only=True)
class RunArguments(CallArguments, DecodingArguments):
    """Analyse, plan, emit, compile, execute and compare with the float64 oracle."""

    q_offset: QOffset = 0
    k_offset: KOffset = 0
    backend: Annotated[str | None, "gpu or emulator; by default a GPU where there is one."] = None
    check: Annotated[bool, "Compare with the oracle in float64."] = True
    checkers: Annotated[bool, "The emulator's checkers of memory and races."] = True
    order_seed: Annotated[
        tuple[int, ...],
        "SEED",
        "Run in the emulator in an order of blocks and warps drawn from SEED; repeatable.",
        {"min": 0, "max": (1 << 32) - 1},
    ] = ()


@dataclass(frozen=True, kw_only=True)
class CountedArguments(CallArguments, DecodingArguments):
    """A call that the emulator executes and counts."""


@dataclass(frozen=True, kw_only=True)
class ProfileArguments(CountedArguments):
    """Count the work of kernels in the emulator, beside the plan's predictions and the roofline."""

    lines: Annotated[int, "Number of lines of the source to show.", AT_LEAST_0] = 8
    plot: Annotated[Path | None, "FILE.png", "Draw the roofline (matplotlib)."] = None


@dataclass(frozen=True, kw_only=True)
class ReportArguments(CountedArguments):
    """Write a page with a kernel's code line by line, its counts, plan, tiles and errors.

    Two SPECS, or two values of --arch or --tile, are compared side by side:
    flashgen report SPEC --arch sm_80,sm_90a.
    """

    shape: Shape = "1,2,320"
    other: Annotated[
        str | None, Argument(metavar="[SPEC]", help="A second spec, to compare with the first.")
    ] = None
    arch: Annotated[str | None, "ARCH[,ARCH]", f"One or two of {KNOWN}."] = None
    predict: Annotated[
        str | None, "SHAPE", "Another shape for the predicted durations and schedules."
    ] = None
    tile: Annotated[
        str | None,
        "QxK[,QxK]",
        "Tiles of the forward kernel, such as 64x32; plan for the plan's own.",
    ] = None
    output: Annotated[Path, Option("-o", "--output", metavar="FILE.html", help="The page.")] = Path(
        "report.html"
    )


@dataclass(frozen=True, kw_only=True)
class TuneArguments(CallArguments):
    """Rank the tiles for a shape; on a GPU measure the best and remember the winner."""

    shape: Shape = "4,16,4096"
    backward: InsteadOfForward = False
    tangent: TangentInstead = False
    most: Annotated[int, "Number of the best choices to measure on a GPU.", AT_LEAST_1] = 8
    show: Annotated[int, "Number of ranked choices to show without a GPU.", AT_LEAST_1] = 10


@dataclass(frozen=True, kw_only=True)
class PlanArguments(DecodingArguments):
    """Print the tiles, warps and shared memory, and how they are derived."""

    shape: Annotated[
        str | None,
        "B,H,N or B,Hq,Hkv,Nq,Nk: predict the time of its launches. With --decode "
        f"{DECODING_SHAPE} by default.",
    ] = None
    scalars: Annotated[
        tuple[str, ...],
        Option(
            "--scalar",
            metavar="NAME=VALUE",
            help="With --shape or --decode: a run-time scalar; repeatable.",
        ),
    ] = ()
    backward: InsteadOfForward = False
    deterministic: Deterministic = False
    tangent: TangentInstead = False
    policy: Annotated[str, "derived, or paper for Algorithm 1's block sizes."] = "derived"
    world: Annotated[
        int | None, "W", "With --shape: the ranks of a distributed call.", AT_LEAST_1
    ] = None
    method: Annotated[str, "With --world: ring, all_gather or all_to_all."] = "ring"
    shard: Annotated[str, "With --world: head_tail, contiguous or balance."] = "head_tail"
    link: Annotated[float | None, "GB/s", "With --world: what a GPU can send."] = None
    map: Annotated[
        Path | None, "FILE.png", "With --world: draw which rank computes which tile."
    ] = None
    certify: Annotated[bool, "Prove the claims on which plans and kernels rest."] = False


@dataclass(frozen=True, kw_only=True)
class InspectArguments(SpecArguments):
    """Compile a spec and look at the result."""

    kernel: Annotated[
        str, "forward, tangent, or of the backward: delta, fused, convert_dq, dkdv or dq."
    ] = "forward"
    cuda: Annotated[bool, "The emitted CUDA."] = False
    ptx: Annotated[bool, "The PTX."] = False
    sass: Annotated[bool, "The machine code."] = False
    resources: Annotated[bool, "Registers, memory, code size (the default)."] = False
    log: Annotated[bool, "The compiler's messages."] = False


@dataclass(frozen=True, kw_only=True)
class EmitArguments:
    """Write the CUDA files of specs, or check that they are up to date.

    With SPECS, every kernel of these specs is a file of the folder.

    Without SPECS, the folder gets three parts, made from every file in specs/ for sm_80 and sm_90a:
    gallery/, the whole files that its README.md links to; specs/, the functions made from each
    spec; and DIGESTS, a digest of each kernel.
    """

    specs: Annotated[
        tuple[str, ...],
        Argument(metavar="[SPECS]...", help="Spec files whose kernels are emitted as whole files."),
    ] = ()
    output: Annotated[Path, Option("-o", "--output", help="Folder.")] = Path("generated")
    check: Annotated[bool, "Write nothing; exit 1 if a file differs."] = False
    archs: Annotated[
        tuple[str, ...],
        Option("--arch", metavar="ARCH", help=f"With SPECS: {KNOWN}; repeatable."),
    ] = ()
    sram: Sram = None


@dataclass(frozen=True, kw_only=True)
class ExportArguments(SpecChanges):
    """Compile specs ahead of time: cubins, PTX, C sources and a manifest, for fg.load_export.

    One spec is written to the folder itself, several to a folder each, of the spec's name.
    """

    specs: Annotated[tuple[str, ...], Argument(metavar="SPECS...", help="Spec files to export.")]
    output: Annotated[Path, Option("-o", "--output", metavar="DIR", help="Folder.")]
    archs: Annotated[
        tuple[str, ...],
        Option("--arch", metavar="A,B", help=f"{KNOWN}; several joined by commas."),
    ] = ()
    backward: Annotated[bool, "The backward kernels too."] = False
    dropout: Annotated[bool, "Kernels that can drop too."] = False
    calls: Annotated[
        tuple[str, ...],
        Option(
            "--call",
            metavar="ARGS",
            help="Kernels for calls with split_size, whole, q_offset:int32, k_offset:int32 or "
            "cu_seqlens_q too, joined by + where a call has several; repeatable.",
        ),
    ] = ()
    heads_per_tile: Annotated[str, "1,4", "Numbers of query heads that may share a tile."] = "1"
    positions: Annotated[
        int, "Positions up to which a block layout that is a function is stored.", AT_LEAST_1
    ] = 16_384


@dataclass(frozen=True, kw_only=True)
class CacheListArguments:
    """Show every compiled kernel on disk, the last used first."""


@dataclass(frozen=True, kw_only=True)
class CachePruneArguments:
    """Remove damaged kernels, and those beyond the limits."""

    max_megabytes: Annotated[int, "Keep at most this much, the last used first.", AT_LEAST_0] = 1000
    max_days: Annotated[float, "Keep what was used within these days.", AT_LEAST_0] = 90.0


@dataclass(frozen=True, kw_only=True)
class CacheClearArguments:
    """Remove every kernel, measured tile and verdict."""


@dataclass(frozen=True, kw_only=True)
class BuildNativeArguments:
    """Compile the native part of calls into the cache: calls then spend less time on the host.

    It needs a C++ compiler (CXX, or g++), about half a minute, and the headers of Python. Without
    it, calls are made in Python.
    """


@dataclass(frozen=True, kw_only=True)
class DoctorArguments:
    """Check versions, the compiler and each code path of a GPU: the screen for a bug report.

    Exit status: 0 all well, 1 something is wrong, 2 all well but for a GPU, which is missing.
    """

    device: Annotated[int, "N", "Number of the CUDA device to try.", AT_LEAST_0] = 0
    json: Annotated[bool, "All of it as JSON."] = False


@dataclass(frozen=True, kw_only=True)
class VisualizeArguments(SpecChanges):
    """Show which tiles of the scores a kernel skips, and in which it evaluates the mask."""

    path: SpecFile
    output: Annotated[
        Path | None,
        Option(
            "-o",
            "--output",
            metavar="FILE",
            help="A picture: .svg, .html, .png (matplotlib) or .txt; without it, text.",
        ),
    ] = None
    shape: Shape = "1,1,1024"
    scalars: Scalars = ()
    arch: Arch = None
    kernel: Annotated[str, "forward, or of the backward pass: fused, dkdv or dq."] = "forward"
    tile: Annotated[str | None, "QxK", "Another tile than the plan's, such as 64x32."] = None
    batch: Annotated[int | None, "One batch entry; all without it."] = None
    head: Annotated[int | None, "One query head; all without it."] = None
    q_offset: QOffset = 0
    k_offset: KOffset = 0


COMMANDS = (
    RunArguments,
    ProfileArguments,
    ReportArguments,
    PlanArguments,
    VisualizeArguments,
    TuneArguments,
    EmitArguments,
    ExportArguments,
    InspectArguments,
    CacheListArguments,
    CachePruneArguments,
    CacheClearArguments,
    BuildNativeArguments,
    DoctorArguments,
)
"""The commands in the order of the help."""

EXAMPLES = {
    "--backward": "--backward",
    "--decode": "--decode",
    "--decode and --page": "--decode --page 16",
    "--shape": "--shape 1,32,8192",
    "--world": "--shape 1,32,8192 --world 4",
}
"""The options that others need, with values: what the help of these has before its colon."""

ARGUMENTS = {"archs": "arch", "dropout": "dropout_p", "output": "path"}
"""The arguments of functions that have other names than the options that give them."""

GROUPS = {"cache": "List or remove compiled kernels."}
"""The help of the first words of commands of two words."""
