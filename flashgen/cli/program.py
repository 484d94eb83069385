"""The commands: each is one stage of the pipeline, or all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flashgen.cli.console import busy, command, say, write
from flashgen.version import __version__

DEFAULT_SHAPE = "1,4,256"

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="A compiler for attention kernels: a few lines of Python become a verified CUDA kernel.",
    epilog="Environment: FLASHGEN_ARCH, FLASHGEN_BACKEND, FLASHGEN_CACHE_DIR, FLASHGEN_DEBUG, "
    "FLASHGEN_OVERRIDE. Exit status: 0 done, 1 a result is wrong or a file differs, 2 refused.",
)

SpecPath = Annotated[
    str, typer.Argument(metavar="SPEC", help="A file that defines spec, or path.py:name.")
]
Dtype = Annotated[
    str | None, typer.Option(metavar="DTYPE", help="float16, bfloat16 or float32 instead.")
]
HeadDim = Annotated[int | None, typer.Option(help="Another head dim: a multiple of 8 up to 256.")]
HeadDimV = Annotated[int | None, typer.Option(help="Another head dim of v and the output.")]
Arch = Annotated[
    str | None, typer.Option(metavar="ARCH", help="sm_80, sm_86, sm_89, sm_90, sm_100 or sm_120.")
]
Sram = Annotated[
    int | None, typer.Option(help="Bytes of shared memory to plan for, not the arch's own.")
]


def _version(wanted: bool) -> None:
    if wanted:
        say(__version__)
        raise typer.Exit


@app.callback()
def program(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """What all commands share: nothing but --version."""


@app.command()
@command
def run(
    spec: SpecPath,
    shape: Annotated[str, typer.Option(help="B,H,N or B,Hq,Hkv,Nq,Nk.")] = DEFAULT_SHAPE,
    dtype: Dtype = None,
    head_dim: HeadDim = None,
    head_dim_v: HeadDimV = None,
    arch: Arch = None,
    sram: Sram = None,
    scalar: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="A run-time scalar; repeatable.")
    ] = None,
    q_offset: Annotated[int, typer.Option(help="Global position of the first query.")] = 0,
    k_offset: Annotated[int, typer.Option(help="Global position of the first key.")] = 0,
    backend: Annotated[
        str | None, typer.Option(help="gpu or emulator; a GPU if there is one, by default.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the random operands, and of dropout.")] = 0,
    backward: Annotated[
        bool, typer.Option("--backward", help="The backward kernels too, and their gradients.")
    ] = False,
    dropout: Annotated[
        float, typer.Option(metavar="P", help="Probability of dropping an element of P.")
    ] = 0.0,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Gradients that are the same bits each time.")
    ] = False,
    check: Annotated[bool, typer.Option(help="Compare with the oracle in float64.")] = True,
    checkers: Annotated[
        bool, typer.Option(help="The emulator's checkers of memory and races.")
    ] = True,
) -> None:
    """Analyse, plan, emit, compile, execute and compare with the float64 oracle."""
    from flashgen.cli.run import Request
    from flashgen.cli.run import run as run_spec

    run_spec(
        Request(
            path=spec,
            shape=shape,
            dtype=dtype,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            arch=arch,
            sram=sram,
            scalars=tuple(scalar or ()),
            q_offset=q_offset,
            k_offset=k_offset,
            backend=backend,
            seed=seed,
            backward=backward,
            dropout=dropout,
            deterministic=deterministic,
            check=check,
            checkers=checkers,
        )
    )


@app.command()
@command
def profile(
    spec: SpecPath,
    shape: Annotated[str, typer.Option(help="B,H,N or B,Hq,Hkv,Nq,Nk.")] = DEFAULT_SHAPE,
    dtype: Dtype = None,
    head_dim: HeadDim = None,
    head_dim_v: HeadDimV = None,
    arch: Arch = None,
    sram: Sram = None,
    scalar: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="A run-time scalar; repeatable.")
    ] = None,
    backward: Annotated[bool, typer.Option("--backward", help="The backward kernels too.")] = False,
    dropout: Annotated[
        float, typer.Option(metavar="P", help="Probability of dropping an element of P.")
    ] = 0.0,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="With --backward: sums in a fixed order.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of the random operands, and of dropout.")] = 0,
    lines: Annotated[int, typer.Option(help="How many lines of the source to show.")] = 8,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Draw the roofline (matplotlib).")
    ] = None,
) -> None:
    """Count what kernels do in the emulator, beside what the plan predicts, and the roofline."""
    from flashgen.cli.profile import Request
    from flashgen.cli.profile import profile as profile_spec

    profile_spec(
        Request(
            path=spec,
            shape=shape,
            dtype=dtype,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            arch=arch,
            sram=sram,
            scalars=tuple(scalar or ()),
            backward=backward,
            dropout=dropout,
            deterministic=deterministic,
            seed=seed,
            lines=lines,
            plot=plot,
        )
    )


@app.command()
@command
def plan(
    spec: SpecPath,
    dtype: Dtype = None,
    head_dim: HeadDim = None,
    head_dim_v: HeadDimV = None,
    arch: Arch = None,
    sram: Sram = None,
    shape: Annotated[
        str | None, typer.Option(help="B,H,N or B,Hq,Hkv,Nq,Nk: predict the time of its launches.")
    ] = None,
    scalar: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="With --shape: a scalar.")
    ] = None,
    policy: Annotated[
        str, typer.Option(help="derived, or paper for Algorithm 1's block sizes.")
    ] = "derived",
    backward: Annotated[
        bool, typer.Option("--backward", help="The backward kernels instead of the forward.")
    ] = False,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="With --backward: sums in a fixed order.")
    ] = False,
    certify: Annotated[
        bool, typer.Option("--certify", help="Prove what the plans and kernels rest on.")
    ] = False,
) -> None:
    """Print the tiles, warps and shared memory, and how they are derived."""
    from flashgen.cli.plan import Request
    from flashgen.cli.plan import plan as plan_spec

    plan_spec(
        Request(
            path=spec,
            dtype=dtype,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            arch=arch,
            sram=sram,
            shape=shape,
            scalars=tuple(scalar or ()),
            policy=policy,
            backward=backward,
            deterministic=deterministic,
            certify=certify,
        )
    )


@app.command()
@command
def tune(
    spec: SpecPath,
    shape: Annotated[str, typer.Option(help="B,H,N or B,Hq,Hkv,Nq,Nk.")] = "4,16,4096",
    dtype: Dtype = None,
    head_dim: HeadDim = None,
    head_dim_v: HeadDimV = None,
    arch: Arch = None,
    sram: Sram = None,
    scalar: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="A run-time scalar; repeatable.")
    ] = None,
    backward: Annotated[
        bool, typer.Option("--backward", help="The backward pass instead of the forward.")
    ] = False,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="With --backward: sums in a fixed order.")
    ] = False,
    dropout: Annotated[
        float, typer.Option(metavar="P", help="Probability of dropping an element of P.")
    ] = 0.0,
    most: Annotated[int, typer.Option(help="How many of the best to measure on a GPU.")] = 8,
    show: Annotated[int, typer.Option(help="How many of the ranking to show without one.")] = 10,
    seed: Annotated[int, typer.Option(help="Of the random operands, and of dropout.")] = 0,
) -> None:
    """Rank the tiles for a shape; on a GPU measure the best and remember the winner."""
    from flashgen.cli.tune import Request
    from flashgen.cli.tune import tune as tune_spec

    tune_spec(
        Request(
            path=spec,
            shape=shape,
            dtype=dtype,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            arch=arch,
            sram=sram,
            scalars=tuple(scalar or ()),
            backward=backward,
            deterministic=deterministic,
            dropout=dropout,
            most=most,
            show=show,
            seed=seed,
        )
    )


@app.command()
@command
def emit(
    specs: Annotated[
        list[str] | None, typer.Argument(metavar="[SPECS]...", help="All of specs/ by default.")
    ] = None,
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder.")] = Path("generated"),
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; exit 1 if any byte differs.")
    ] = False,
    arch: Annotated[
        list[str] | None, typer.Option(metavar="ARCH", help="sm_80, ...; repeatable.")
    ] = None,
    sram: Sram = None,
) -> None:
    """Write the CUDA files of specs, or check that they are up to date."""
    from flashgen.cli.emit import emit as emit_specs

    emit_specs(specs or [], output, arch or [], sram=sram, check=check)


@app.command()
@command
def inspect(
    spec: SpecPath,
    dtype: Dtype = None,
    head_dim: HeadDim = None,
    head_dim_v: HeadDimV = None,
    arch: Arch = None,
    sram: Sram = None,
    kernel: Annotated[
        str, typer.Option(help="forward, or of the backward: delta, fused, dkdv or dq.")
    ] = "forward",
    cuda: Annotated[bool, typer.Option("--cuda", help="The emitted CUDA.")] = False,
    ptx: Annotated[bool, typer.Option("--ptx", help="The PTX.")] = False,
    sass: Annotated[bool, typer.Option("--sass", help="The machine code.")] = False,
    resources: Annotated[
        bool, typer.Option("--resources", help="Registers, memory, code size (the default).")
    ] = False,
    log: Annotated[bool, typer.Option("--log", help="The compiler's messages.")] = False,
) -> None:
    """Compile a spec and look at the result."""
    from flashgen import config
    from flashgen.cli import inspect as show
    from flashgen.cli.inputs import load_spec

    loaded = load_spec(spec, dtype=dtype, head_dim=head_dim, head_dim_v=head_dim_v)
    with busy(f"compiling {loaded.name}"):
        built = show.kernel_of(loaded, arch or config.arch() or "sm_80", kernel, sram)
    if cuda:
        write(built.source.text)
    if ptx:
        write(built.ptx)
    if sass:
        show.sass(built)
    if log:
        write(built.binary.log or "NVRTC had nothing to say.")
    if resources or not (cuda or ptx or sass or log):
        show.resources(built)


@app.command()
@command
def cache(
    show: Annotated[bool, typer.Option("--list", help="What is kept (the default).")] = False,
    clear: Annotated[
        bool, typer.Option("--clear", help="Remove every kernel and measured tile.")
    ] = False,
    prune: Annotated[
        bool, typer.Option("--prune", help="Remove damaged kernels, and by the limits below.")
    ] = False,
    max_megabytes: Annotated[
        int | None, typer.Option(help="With --prune: keep at most this much, last used first.")
    ] = 1000,
    max_days: Annotated[
        float | None, typer.Option(help="With --prune: keep what was used within these days.")
    ] = 90.0,
) -> None:
    """List or remove compiled kernels."""
    from flashgen.cli import cache as kept

    if clear:
        kept.clear()
    if prune:
        kept.prune(max_megabytes, max_days)
    if show or not (clear or prune):
        kept.show()


def main() -> None:
    """Entry of the program."""
    app()
