"""compile: NVRTC without a GPU, resources from cubin and log, warnings, errors with lines."""

from __future__ import annotations

import os
import re
import struct
from dataclasses import replace
from pathlib import Path

import pytest

import flashgen as fg
from flashgen.calls.launch import pack
from flashgen.kernels import pipeline
from flashgen.kernels.compile import Binary, compile, cubin, forget, nvrtc, nvrtc_log
from flashgen.shared.errors import CompileError
from tests.support.compile_sources import SERIALISED, SPILLING, STACKED, TOY
from tests.support.processes import run_python
from tests.support.tiers import one_in, slow

ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_120")


def build(source: str, kernel: str, arch: str = "sm_80") -> Binary:
    return compile(source, filename=f"{kernel}.cu", kernel=kernel, arch=arch)


def reported(log: str, pattern: str) -> int:
    """A number in the compiler's report; 0 when it leaves the entry out."""
    match = re.search(pattern, log)
    return int(match[1]) if match else 0


@pytest.mark.parametrize("arch", ARCHS)
def test_one_compilation_gives_cubin_and_ptx_of_the_architecture(arch: str) -> None:
    binary = build(TOY, "toy", arch)
    assert binary.cubin.startswith(b"\x7fELF")
    assert f".target {arch}" in binary.ptx
    assert ".visible .entry toy" in binary.ptx
    assert cubin.kernels(binary.cubin) == ("toy",)


@pytest.mark.parametrize("arch", one_in(3, ARCHS, first=1))
def test_the_cubin_and_the_log_agree_about_resources(arch: str) -> None:
    for source, kernel in ((TOY, "toy"), (STACKED, "stacked"), (SPILLING, "spilling")):
        binary = build(source, kernel, arch)
        found, log = binary.resources, binary.log
        assert found.registers == reported(log, r"Used (\d+) registers")
        assert found.stack_bytes == reported(log, r"(\d+) bytes cumulative stack size")
        assert found.static_smem_bytes == reported(log, r"(\d+) bytes smem")
        assert found.barriers == reported(log, r"used (\d+) barriers")
        assert found.registers > 0
        assert found.code_bytes > 0
        assert found.code_bytes % 16 == 0


def test_a_stack_without_spills_is_not_said_to_be_spills() -> None:
    assert build(TOY, "toy").resources.local_memory == "no spills, no stack"
    assert re.fullmatch(
        r"no spills, [\d,]+ B of stack", build(STACKED, "stacked").resources.local_memory
    )
    assert build(SPILLING, "spilling").resources.local_memory.startswith("SPILLS ")


def test_resources_hold_what_the_source_declares() -> None:
    stacked = build(STACKED, "stacked").resources
    assert stacked.static_smem_bytes == 96 * 4
    assert stacked.max_threads == 128
    assert stacked.stack_bytes >= 40 * 4
    assert stacked.param_bytes == 8 + 8 + 4
    assert stacked.barriers == 1
    assert not stacked.clean
    toy = build(TOY, "toy").resources
    assert (toy.stack_bytes, toy.static_smem_bytes, toy.max_threads) == (0, 0, 64)
    assert toy.param_bytes == 24  # a structure of two pointers and an int, padded
    assert toy.clean


def test_the_parameters_of_a_kernel_with_tensor_maps_are_those_that_launches_pack() -> None:
    built = fg.build(fg.AttentionSpec(head_dim=64), "sm_90a")
    values = [bytes(128) if p.ctype == "tensormap" else 0 for p in built.source.params]
    assert built.binary.resources.param_bytes == len(pack(built.source.params, values))


def test_a_kernel_without_launch_bounds_may_have_1024_threads() -> None:
    free = build('extern "C" __global__ void free_size(int* x) { x[0] = 1; }', "free_size")
    assert free.resources.max_threads == 1024


def test_spills_are_counted_and_warned_about() -> None:
    binary = build(SPILLING, "spilling")
    assert binary.resources.spill_store_bytes > 0
    assert binary.resources.spill_load_bytes > 0
    assert not binary.resources.clean
    assert any("spilled to local memory" in warning for warning in binary.warnings)


def test_serialised_wgmma_is_a_warning() -> None:
    binary = build(SERIALISED, "hopper", "sm_90a")
    assert any("C7511" in text and "serialized" in text for text in binary.warnings)


def test_a_warning_of_the_front_end_keeps_its_line_of_source() -> None:
    source = 'extern "C" __global__ void idle() {\n  int unused = 3;\n}\n'
    (warning,) = build(source, "idle").warnings
    assert warning.startswith("idle.cu(2): warning")
    assert "int unused = 3;" in warning


def test_a_clean_kernel_has_no_warnings() -> None:
    assert build(TOY, "toy").warnings == ()


def test_line_information_names_the_emitted_file() -> None:
    binary = build(TOY, "toy")
    assert re.findall(r"^\s*\.file\s+\d+\s+(.*)$", binary.ptx, re.MULTILINE) == ['"toy.cu"']
    lines = {int(line) for line in re.findall(r"^\s*\.loc\s+1\s+(\d+)", binary.ptx, re.MULTILINE)}
    assert 9 in lines  # "p.y[i] = ..."
    assert binary.log.count("/") == 0


def test_a_profiler_finds_the_source_that_the_cubin_names(fresh_cache: Path) -> None:
    binary = build(TOY, "toy")
    assert binary.folder.parent == fresh_cache
    assert str(binary.folder).encode() in binary.cubin
    assert (binary.folder / "toy.cu").read_text() == TOY


@pytest.mark.parametrize("name", [b"\xc3\xbc", b"\xfc", b'"', b"a b"])
def test_the_cache_may_lie_in_a_folder_of_any_name(
    name: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the locale is C, an umlaut is no text, like the second name."""
    folder = os.fsdecode(bytes(tmp_path) + b"/" + name)
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", folder)
    forget()
    binary = build(TOY, "toy")
    assert str(binary.folder).startswith(folder)
    named = str(binary.folder) if name == b"a b" else "toy.cu"
    assert named.encode() in binary.cubin
    assert (bytes(tmp_path) in binary.cubin) == (name == b"a b")  # all of it or nothing
    assert re.findall(r"^\s*\.file\s+\d+\s+(.*)$", binary.ptx, re.MULTILINE) == ['"toy.cu"']
    forget()
    assert build(TOY, "toy").cubin == binary.cubin


def test_a_rejected_line_is_shown_with_its_neighbours() -> None:
    with pytest.raises(CompileError) as caught:
        build(TOY.replace("p.x[i]", "p.z[i]"), "toy")
    error = caught.value
    assert error.what == 'NVRTC rejects toy.cu: class "Params" has no member "z"'
    assert error.where.startswith("toy.cu:9\n")
    shown = error.where.splitlines()
    assert " 8 |   const int i" in error.where
    marked = shown.index(">  9 |   if (i < p.n) p.y[i] = 2.0f * p.z[i];")
    assert shown[marked + 1].index("^") == shown[marked].index("p.z") + len("p.")
    assert "1 error (NVRTC_ERROR_COMPILATION) in 10 lines, for sm_80, NVRTC 13." in error.numbers
    assert "FLASHGEN_OVERRIDE" in error.way_out


def test_a_rejected_source_without_ptx_leaves_objects_of_the_interpreter_alone() -> None:
    """NVRTC writes an end of text into a bytes object, and that of one space is shared by all."""
    with pytest.raises(nvrtc.NvrtcRejection):
        nvrtc.run("int x = ;", program="wrong.cu", arch="sm_80")
    assert list(bytes([32])) == [32]


def test_a_failed_static_assert_is_an_error_with_its_text() -> None:
    source = 'static_assert(1 + 1 == 3, "plan and code disagree");\n' + TOY
    with pytest.raises(CompileError, match="plan and code disagree") as caught:
        build(source, "toy")
    assert caught.value.where.startswith("toy.cu:1\n")


def test_an_instruction_the_assembler_refuses_is_traced_to_its_line() -> None:
    source = 'extern "C" __global__ void odd() {\n\n  asm volatile("foo.bar;");\n}\n'
    with pytest.raises(CompileError, match="foo") as caught:
        build(source, "odd")
    assert '> 3 |   asm volatile("foo.bar;");' in caught.value.where


def test_too_much_static_shared_memory_is_an_error() -> None:
    source = TOY.replace("const int i", "__shared__ int s[20000];\n  s[p.n] = 1;\n  const int i")
    with pytest.raises(CompileError, match="too much shared data"):
        build(source.replace("2.0f *", "s[p.n + 1] *"), "toy")


def test_only_the_first_of_many_errors_are_shown() -> None:
    source = TOY + "".join(f"__device__ int f{i}() {{ return missing{i}; }}\n" for i in range(9))
    with pytest.raises(CompileError) as caught:
        build(source, "toy")
    assert caught.value.numbers.startswith("9 errors, the first 5 shown")
    assert caught.value.where.count("toy.cu:") == 5


def test_an_unknown_architecture_lists_the_known_ones() -> None:
    with pytest.raises(CompileError, match="does not compile for sm_99") as caught:
        build(TOY, "toy", "sm_99")
    assert "sm_80, sm_86" in caught.value.numbers


def test_a_missing_kernel_names_those_that_are_there() -> None:
    with pytest.raises(CompileError, match="no kernel named other") as caught:
        compile(TOY, filename="toy.cu", kernel="other", arch="sm_80")
    assert caught.value.numbers == "kernels in the file: toy"


@pytest.mark.parametrize(
    ("changed", "value"),
    [("filename", "../toy.cu"), ("filename", "a b.cu"), ("kernel", "2toy"), ("arch", "90")],
)
def test_names_that_cannot_be_files_or_symbols_are_refused(changed: str, value: str) -> None:
    names = {"filename": "toy.cu", "kernel": "toy", "arch": "sm_80", changed: value}
    with pytest.raises(CompileError, match="this is not a valid") as caught:
        compile(TOY, **names)
    assert repr(value) in caught.value.numbers


def test_options_reach_the_compiler() -> None:
    source = TOY.replace("2.0f", "FACTOR")
    binary = compile(
        source, filename="toy.cu", kernel="toy", arch="sm_80", options=("-DFACTOR=8.0f",)
    )
    assert "0f41000000" in binary.ptx  # 8.0f


@pytest.mark.parametrize("cut", [0, 40, 200, 1000])
def test_a_truncated_cubin_is_an_error_and_not_a_guess(cut: int) -> None:
    whole = build(STACKED, "stacked").cubin
    with pytest.raises(CompileError, match="cannot be read as a cubin"):
        cubin.kernel_facts(whole[:cut] if cut < 200 else whole[:-cut], "stacked")


def test_a_cubin_without_its_attributes_is_an_error() -> None:
    whole = build(TOY, "toy").cubin
    # The number of the register attribute becomes one that no tool defines.
    at = whole.index(struct.pack("<BBH", 4, cubin.REGISTERS, 8))
    broken = whole[: at + 1] + b"\xee" + whole[at + 2 :]
    with pytest.raises(CompileError, match="cannot be read as a cubin"):
        cubin.kernel_facts(broken, "toy")


def test_a_log_without_the_spills_of_a_kernel_with_a_stack_is_an_error() -> None:
    binary = build(STACKED, "stacked")
    with pytest.raises(CompileError, match="does not contain the spills of the kernel"):
        nvrtc_log.resources(binary.cubin, "stacked", "a log without any known phrase")
    toy = build(TOY, "toy")
    assert nvrtc_log.resources(toy.cubin, "toy", "").spill_store_bytes == 0


def test_a_missing_compiler_library_names_the_package() -> None:
    error = nvrtc.missing("nvidia-cuda-nvrtc", RuntimeError("Failed to dlopen libnvrtc.so.13"))
    assert "nvidia-cuda-nvrtc is missing" in error.what
    assert "Failed to dlopen" in error.numbers
    assert "flashgen[cuda]" in error.way_out


def test_without_the_bindings_compile_says_what_to_install() -> None:
    program = (
        "import sys\n"
        "sys.modules['cuda.bindings'] = None\n"  # what Python does for a package that is absent
        "from flashgen.kernels.compile import compile\n"
        "from flashgen.shared.errors import CompileError\n"
        "try:\n"
        "    compile('', filename='a.cu', kernel='a', arch='sm_80')\n"
        "except CompileError as error:\n"
        "    print(error)\n"
    )
    done = run_python("-c", program)
    assert "cuda-bindings is missing" in done.stdout
    assert "flashgen[cuda]" in done.stdout


def test_an_override_file_of_the_same_name_is_compiled_instead(
    fresh_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edited = tmp_path / "toy.cu"
    edited.write_text(TOY.replace("2.0f", "4.0f"))
    monkeypatch.setenv("FLASHGEN_OVERRIDE", str(edited))
    binary = build(TOY, "toy")
    assert "4.0f" in binary.source
    assert binary.warnings == (f"compiled from FLASHGEN_OVERRIDE={edited}",)
    other = build(STACKED, "stacked")
    assert other.source == STACKED
    monkeypatch.delenv("FLASHGEN_OVERRIDE")
    assert build(TOY, "toy").source == TOY


@pytest.mark.parametrize("code", ["C7510", slow("C7519")])
def test_a_kernel_whose_wgmma_the_assembler_changes_is_not_built(
    code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = f"({code}) Potential Performance Loss: warpgroup.arrive is injected in around line 9"

    binary = replace(build(TOY, "toy", "sm_90a"), warnings=(message,))
    monkeypatch.setattr(pipeline, "compile", lambda *_, **__: binary)
    spec = fg.AttentionSpec(head_dim=64, name=f"changed_{code}")
    with pytest.raises(CompileError, match="the assembler serialises the wgmma") as caught:
        pipeline.build(spec, "sm_90a")
    assert caught.value.numbers == message
