"""``flashgen inspect``: what a spec was compiled to, without running it."""

from __future__ import annotations

from flashgen.kernels.compile.disassembly import disassembled
from flashgen.kernels.pipeline import Build, build, build_backward, build_tangent
from flashgen.shared.errors import InputError
from flashgen.spec.language.spec import AttentionSpec
from flashgen.tools.cli.arguments import InspectArguments
from flashgen.tools.cli.console import busy, plural, print_rows, seconds, write
from flashgen.tools.cli.inputs import arch_of, changed_spec


def inspect(arguments: InspectArguments) -> None:
    """Compiles one kernel and prints the parts of the result that the options name."""
    spec = changed_spec(arguments.path, arguments)
    arch = arch_of(arguments.arch)
    with busy(f"compiling {spec.name}"):
        built = _kernel(spec, arch, arguments.kernel, arguments.sram)
    if arguments.cuda:
        write(built.source.text)
    if arguments.ptx:
        write(built.ptx)
    if arguments.sass:
        write(disassembled(built.cubin, built.binary.kernel, built.binary.arch))
    if arguments.log:
        write(built.binary.log or "NVRTC printed no messages.")
    others = arguments.cuda or arguments.ptx or arguments.sass or arguments.log
    if arguments.resources or not others:
        _resources(built)


def _kernel(spec: AttentionSpec, arch: str, role: str, sram: int | None) -> Build:
    """The compiled kernel of that role: "forward", "tangent", or one of the backward pass.

    Raises:
        InputError: the backward pass of this spec has no such kernel.
    """
    if role == "forward":
        return build(spec, arch, sram=sram)
    if role == "tangent":
        return build_tangent(spec, arch, sram=sram)
    kernels: dict[str, Build] = {}
    for deterministic in (False, True):
        for kernel in build_backward(spec, arch, sram=sram, deterministic=deterministic):
            kernels.setdefault(kernel.source.role, kernel)
    if role not in kernels:
        raise InputError(
            "there is no such kernel",
            where="option --kernel",
            numbers=f"given {role!r}; kernels of {spec.name}: forward, tangent, "
            f"{', '.join(kernels)}",
            way_out="--kernel forward, or leave it out",
        )
    return kernels[role]


def _resources(kernel: Build) -> None:
    """Registers, memory and code size, as a table."""
    binary, plan = kernel.binary, kernel.plan
    used = binary.resources
    print_rows(
        [
            ("kernel", binary.kernel),
            ("file", binary.filename),
            ("arch", binary.arch),
            (
                "tile",
                f"block_q {plan.block_q} x block_k {plan.block_k}, {plural(plan.warps, 'warp')}",
            ),
            ("registers", f"{used.registers} a thread"),
            ("stack", f"{used.stack_bytes:,} B"),
            ("spills", f"{used.spill_store_bytes:,} B stored, {used.spill_load_bytes:,} B loaded"),
            ("calls", kernel.source.calls or "none: all functions are inlined"),
            ("shared", f"{plan.smem_bytes:,} B dynamic, {used.static_smem_bytes:,} B static"),
            ("threads", f"{plan.threads} a block, {used.max_threads} at most"),
            ("code", f"{used.code_bytes:,} B"),
            ("parameters", f"{used.param_bytes:,} B"),
            ("warnings", "\n".join(binary.warnings) or "none"),
            ("build", seconds(binary.seconds) + (", from the cache" if binary.from_cache else "")),
            ("cached in", f"{binary.folder}" if binary.folder else "nowhere: caching is off"),
        ]
    )
