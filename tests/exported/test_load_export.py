"""fg.load_export: the callable of fg.attention without the compiler, and what it refuses."""

from __future__ import annotations

import copy
import json
import pickle
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import flashgen as fg
from flashgen.calls.export import ExportRequest, export
from flashgen.calls.exported import folder as folders
from flashgen.calls.exported.folder import open_folder
from flashgen.calls.exported.manifest import FORMAT, Pass, PathRecord, digest_of
from flashgen.calls.exported.program import ExportedProgram
from flashgen.calls.launch import gpu_facts
from flashgen.calls.runtime.backends import Target
from flashgen.calls.runtime.programs import SpecProgram
from flashgen.kernels.visits.layout_path import paths_of_layout
from flashgen.shared.arch import runs_on
from flashgen.shared.call import CallRanges, CheckedCall
from flashgen.shared.errors import FlashgenError, InputError, LaunchError, SpecError
from flashgen.shared.paths import PATHS
from flashgen.shared.signature import SPLIT
from flashgen.shared.split_choice import ALL_SPLITS, RUNS
from tests.support.examples import spec_path, values_of
from tests.support.exports import exported, spec_of, with_portable_path
from tests.support.fake_driver import FakeDriver
from tests.support.judged import Call
from tests.support.processes import run_python
from tests.support.shapes import Case
from tests.support.tiers import slow

CASE = Case(24, 40, 1, 4, 2, "float16", 16)
BLOCKED = """
import importlib.abc, sys

class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("sympy", "jinja2", "mpmath") or "bindings.nvrtc" in name:
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocked())
import torch
import flashgen as fg
"""


def captures_of(name: str, case: Case = CASE) -> dict[str, Any]:
    found = values_of(spec_path(name), case)
    return {**found["scalars"], **found["tensors"]}


def copied(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to / "copy"))


def assert_four_lines(error: FlashgenError) -> None:
    assert len(str(error).splitlines()) == 4, error
    assert all((error.where, error.numbers, error.way_out))


@pytest.mark.slow
@pytest.mark.parametrize("arch", PATHS)
def test_a_call_needs_neither_sympy_nor_jinja2_nor_nvrtc(arch: str, tmp_path: Path) -> None:
    folder = exported("sliding_window", (arch,))
    q, k, v = CASE.tensors(3)
    torch.save((q, k, v), tmp_path / "operands.pt")
    program = f"""{BLOCKED}
q, k, v = torch.load({str(tmp_path / "operands.pt")!r})
op = fg.load_export({str(folder)!r})
out, lse = op(q, k, v, **{captures_of("sliding_window")!r}, return_lse=True)
torch.save((out, lse), {str(tmp_path / "results.pt")!r})
print(op.name, op.report.backend, op.report.arch)
try:
    fg.attention(fg.AttentionSpec())
except ImportError as error:
    print(error)
print([m for m in sys.modules if m.split(".")[0] in ("sympy", "jinja2") or "bindings.nvrtc" in m])
"""
    done = run_python("-c", program)
    assert done.stdout.splitlines() == [
        f"sliding_window emulator {arch}",
        "sympy is blocked",
        "[]",
    ]
    out, lse = torch.load(tmp_path / "results.pt")
    call = Call(spec_of("sliding_window"), (q, k, v), values_of(spec_path("sliding_window"), CASE))
    run = call.forward(arch=arch)
    assert torch.equal(out, run.out)
    assert torch.equal(lse, run.lse)
    call.check(run)


def draws(score, b, h, q, k):
    return fg.where(fg.rand(b, h, q, k) < 0.2, -1.0, score)


OPEN = {
    "sum": {"weight_mod": lambda s, b, h, q, k: fg.maximum(s, 0.0) ** 2, "normalize": "sum"},
    "none": {"weight_mod": lambda s, b, h, q, k: s * fg.rand(b, h, q, k), "normalize": "none"},
    "rows": {
        "weight_mod": lambda s, b, h, q, k: s,
        "normalize": fg.Tensor("rows", ("batch", "heads", "seq_q"), "float32", grad=True),
    },
    "sink": {"sink": fg.Tensor("rows", ("heads", "seq_q"), "float32", grad=True)},
    "draws": {
        "score_mod": draws,
        "sink": fg.Tensor("rows", ("heads", "seq_q"), "float32", grad=True),
    },
    # The smallest kernel with random numbers: each takes more of the compiler than a whole kernel.
    "drops": {"mask_mod": lambda b, h, q, k: fg.rand(b, h, q, k) >= 0.2},
}


@pytest.mark.parametrize(
    ("name", "arch"),
    [
        ("sum", "sm_80"),
        ("sink", "sm_80"),
        ("drops", "sm_80"),
        slow("sum", "sm_90a"),
        slow("none", "sm_80"),
        slow("rows", "sm_90a"),
        slow("draws", "sm_80"),
        slow("draws", "sm_90a"),
    ],
)
def test_weights_row_sinks_and_random_numbers_have_the_bits_of_the_compiled_operator(
    name: str, arch: str, tmp_path: Path
) -> None:
    spec = fg.AttentionSpec(**OPEN[name], head_dim=16, name=f"exported_{name}")
    backward = name != "drops"
    export(ExportRequest(spec=spec, archs=(arch,), backward=backward), tmp_path / name)
    learned = [tensor for tensor in spec.tensors if tensor.grad]
    found = []
    for op in (fg.load_export(tmp_path / name), fg.attention(spec)):
        qkv = [x.requires_grad_(backward) for x in CASE.tensors(3)]
        rows = torch.linspace(0.5, 1.5, 4 * CASE.seq_q).reshape(1, 4, -1)
        given = {t.name: rows[0] if t is spec.sink else rows for t in learned}
        given = {n: x.clone().requires_grad_() for n, x in given.items()}
        rng = {"rng": torch.tensor([3, 5])} if name in ("none", "draws", "drops") else {}
        out = op(*qkv, **given, **rng, backend="emulator", arch=arch, split_size=0)
        dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
        inputs = (*qkv, *given.values()) if backward else ()
        found.append((out, *(torch.autograd.grad(out, inputs, dout) if inputs else ())))
    assert all(map(torch.equal, *found))


@pytest.mark.slow
@pytest.mark.parametrize("arch", PATHS)
@pytest.mark.parametrize("paged", [False, True])
def test_all_runs_of_splits_have_the_bits_of_the_compiled_operator(
    paged: bool, arch: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In tiles of few rows, as the operator has them."""
    spec = spec_of("causal", paged=paged)
    request = ExportRequest(spec=spec, archs=(arch,), calls=("split_size",))
    export(replace(request, heads_per_tile=(1, 2)), tmp_path / "export")
    case = replace(CASE, seq_q=3, seq_k=200)
    q, k, v = case.tensors(4)
    given = {"backend": "emulator", "arch": arch, "return_lse": True}
    if paged:
        k, v = (x.reshape(2, 25, 8, 16).permute(1, 0, 2, 3).contiguous() for x in (k, v))
        pages = torch.arange(25, dtype=torch.int32)[None]
        given |= {"page_table": pages, "cache_seqlens": torch.tensor([200], dtype=torch.int32)}
    else:
        given |= {"q_offset": 197}
    kinds = ("_split_", 1), ("_runs_", 4), ("_folded_", ALL_SPLITS)
    for size, (kind, run) in enumerate(kinds, 1):  # prepared calls are kept by their arguments
        for program in (ExportedProgram, SpecProgram):
            monkeypatch.setattr(program, "run_of", lambda *_, run=run: run)
        found, rows = [], []
        for op in (fg.load_export(tmp_path / "export"), fg.attention(spec)):
            found.append(op(q, k, v, **given, split_size=16 * size))
            assert kind in op.report.kernel.facts.name
            rows.append(op.report.kernel.facts.block_q)
        assert all(map(torch.equal, *found))
        assert rows == [{"sm_80": 16, "sm_90a": 64}[arch]] * 2


@pytest.mark.slow
@pytest.mark.parametrize("arch", PATHS)
def test_calls_of_an_export_have_the_runs_of_the_compiled_operator(
    arch: str, tmp_path: Path
) -> None:
    spec = spec_of("causal", dtype="bfloat16").replace(head_dim=128)
    request = ExportRequest(spec=spec, archs=(arch,), calls=("split_size",))
    export(replace(request, heads_per_tile=(1, 4)), tmp_path / "export")
    op = fg.load_export(tmp_path / "export")
    target = Target("emulator", arch, torch.device("cpu"), 0)
    programs = op.spec.split(), SpecProgram(spec).split()
    found = []
    for batch, heads, rows, keys in (
        *((1, 32, 8192, 8192), (16, 4, 2048, 2048), (1, 32, 1, 131_072), (8, 32, 1, 4096)),
        *((1, 32, 64, 131_072), (8, 32, 5, 4096), (1, 32, 12, 131_072), (64, 32, 1, 4096)),
        *((1, 4, 2048, 131_072), (64, 32, 64, 4096), (4, 32, 512, 16_384)),
    ):
        sizes = batch, heads, heads // 4, rows, keys
        scalars, splits = {SPLIT: 1120}, -(-keys // 1120)
        call = CheckedCall(*sizes, 128, 128, keys - rows, 0, 1.0, scalars, splits=splits)
        found.append([program.run_of(target, call) for program in programs])
    assert all(exported == compiled for exported, compiled in found), found
    assert {ALL_SPLITS, *RUNS[1:]} & {run for run, _ in found} > {ALL_SPLITS}, found


def test_an_export_names_what_has_tangents() -> None:
    op = fg.load_export(exported("causal", backward=True))
    q, k, v = CASE.tensors(3)
    with pytest.raises(InputError, match="an export has no kernel of tangents") as caught:
        torch.func.jvp(lambda q: op(q, k, v), (q,), (q,))
    assert_four_lines(caught.value)


SPECS = ("causal", "dense_bias", "document", "sink", "block_diagonal", "variable_length", "bigbird")


@pytest.mark.parametrize("arch", PATHS)
@pytest.mark.parametrize("name", [slow(name) for name in SPECS])
@pytest.mark.parametrize("deterministic", [False, True])
def test_forward_and_backward_give_the_bits_of_the_compiled_operator(
    name: str, arch: str, deterministic: bool
) -> None:
    op = fg.load_export(exported(name, (arch,), backward=True, dropout=True))
    own = fg.attention(spec_of(name, dropout=True))
    learned = [tensor.name for tensor in own._operator.signature.learned]
    for p in (0.0, 0.25):
        found = []
        for each in (op, own):
            inputs = [x.requires_grad_() for x in CASE.tensors(3)]
            captures = captures_of(name)
            inputs += [captures[key].requires_grad_() for key in learned]
            rng = torch.tensor([7, 16]) if p else None
            how = {"backend": "emulator", "arch": arch, "deterministic": deterministic}
            out, lse = each(*inputs[:3], **captures, **how, dropout_p=p, rng=rng, return_lse=True)
            loss = out.float().square().sum() + torch.where(lse.isinf(), 0, lse).sum()
            found.append((out, lse, *torch.autograd.grad(loss, inputs)))
        for mine, other in zip(*found, strict=True):
            assert torch.equal(mine, other)
            assert mine.stride() == other.stride()


@pytest.mark.parametrize("p", [slow(0.25)])
def test_only_needed_gradients_of_learned_tensors_are_returned(p: float) -> None:
    op = fg.load_export(exported("qk_offset", backward=True))
    own = fg.attention(spec_of("qk_offset"))
    captures = captures_of("qk_offset")
    captures["a"].requires_grad_()
    inputs = CASE.tensors(3)
    grads = []
    for each in (op, own):
        out = each(*inputs, **captures, backend="emulator", deterministic=True)
        grads.append(torch.autograd.grad(out.float().sum(), captures["a"])[0])
    torch.testing.assert_close(*grads)


def test_statistics_are_refused_but_the_lse_of_the_call_itself() -> None:
    op = fg.load_export(exported("sliding_window"))
    q, k, v = CASE.tensors(3)
    captures = captures_of("sliding_window")
    _, aux = op(q, k, v, **captures, return_aux=fg.AuxRequest(lse=True))
    assert torch.equal(aux.lse, op(q, k, v, **captures, return_lse=True)[1])
    for request in (fg.AuxRequest(), fg.AuxRequest(lse=True, max_scores=True)):
        with pytest.raises(InputError, match="no kernels of statistics"):
            op(q, k, v, **captures, return_aux=request)


def test_a_gradient_without_backward_kernels_is_refused() -> None:
    op = fg.load_export(exported("sliding_window"))
    q, k, v = (x.requires_grad_() for x in CASE.tensors(3))
    out = op(q, k, v, **captures_of("sliding_window"))
    with pytest.raises(SpecError, match="no backward kernels") as error:
        out.sum().backward()
    assert "--backward" in error.value.way_out


# ---- what is refused


@pytest.mark.parametrize("kind", ["cubin", "ptx", "cu", "c"])
def test_a_changed_byte_is_refused(kind: str, tmp_path: Path) -> None:
    folder = copied(exported("sliding_window"), tmp_path)
    file = next(path for path in sorted(folder.rglob(f"*.{kind}")))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(LaunchError, match="damaged") as error:
        fg.load_export(folder)
    assert_four_lines(error.value)
    assert error.value.where == str(file)
    assert "sha256" in error.value.numbers
    assert "flashgen export" in error.value.way_out


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    folder = copied(exported("sliding_window"), tmp_path)
    file = next(folder.rglob("*.cubin"))
    file.unlink()
    with pytest.raises(LaunchError, match="damaged") as error:
        fg.load_export(folder)
    assert "No such file" in error.value.numbers
    assert_four_lines(error.value)


def test_another_version_of_the_manifest_is_refused_with_the_way_out(tmp_path: Path) -> None:
    folder = copied(exported("sliding_window"), tmp_path)
    file = folder / "manifest.json"
    data = json.loads(file.read_text())
    file.write_text(json.dumps(data | {"format": FORMAT - 1, "flashgen": "0.0.1"}))
    with pytest.raises(LaunchError, match="another version") as error:
        fg.load_export(folder)
    assert_four_lines(error.value)
    assert f"format {FORMAT - 1}, of flashgen '0.0.1'" in error.value.numbers
    assert "flashgen export specs/sliding_window.py" in error.value.way_out


@pytest.mark.parametrize("form", ["edited", "not json", "unknown field", "absent"])
def test_a_changed_manifest_is_refused(form: str, tmp_path: Path) -> None:
    folder = copied(exported("sliding_window"), tmp_path)
    file = folder / "manifest.json"
    data = json.loads(file.read_text())
    if form == "edited":
        data["kernels"][0]["facts"]["smem_bytes"] += 16
    if form == "unknown field":
        del data["sha256"]
        version = data.pop("format")
        data["kernels"][0]["more"] = 1
        data = {**data, "format": version, "sha256": digest_of(data)}
    file.write_text("{" if form == "not json" else json.dumps(data))
    if form == "absent":
        file.unlink()
    with pytest.raises(LaunchError) as error:
        fg.load_export(folder)
    assert_four_lines(error.value)


def test_a_gpu_that_no_kernel_is_for_is_refused() -> None:
    folder = open_folder(exported("sliding_window"))
    assert folder.check_gpu(gpu_facts(driver=FakeDriver((8, 6)))) == "sm_80"
    with pytest.raises(LaunchError, match="no kernels for this GPU") as error:
        folder.check_gpu(gpu_facts(driver=FakeDriver((9, 0), name="NVIDIA H100")))
    assert error.value.numbers == "exported for sm_80; the device is sm_90"
    assert "--arch sm_90" in error.value.way_out
    assert_four_lines(error.value)


def test_a_driver_older_than_the_compiler_is_refused() -> None:
    folder = open_folder(exported("sliding_window"))
    needed = max(kernel.cuda for kernel in folder.manifest.kernels)
    folder.check_gpu(gpu_facts(driver=FakeDriver(cuda=needed * 1000)))
    with pytest.raises(LaunchError, match="older than the compiler") as error:
        folder.check_gpu(gpu_facts(driver=FakeDriver(cuda=(needed - 1) * 1000 + 80)))
    assert "install a driver" in error.value.way_out
    assert_four_lines(error.value)


@pytest.mark.parametrize(
    ("arch", "capability", "fits"),
    [
        ("sm_80", (8, 0), True),
        ("sm_80", (8, 9), True),
        ("sm_86", (8, 0), False),
        ("sm_80", (9, 0), False),
        ("sm_90a", (9, 0), True),
        ("sm_90a", (9, 1), False),
        ("sm_120", (12, 1), True),
    ],
)
def test_cubins_run_on_devices_of_their_major_version(
    arch: str, capability: tuple[int, int], fits: bool
) -> None:
    assert runs_on(arch, capability) is fits


@pytest.mark.parametrize(
    ("options", "way_out"),
    [
        ({"arch": "sm_90a"}, "--arch sm_90a"),
        ({"backend": "tiled"}, "backend='emulator'"),
        ({"split_size": 16}, "--call split_size"),
        ({"h_offset": 1, "whole": {"heads": 8}}, "--call whole"),
        ({"q_offset": torch.tensor(3, dtype=torch.int32)}, "--call q_offset:int32"),
    ],
)
def test_arguments_whose_kernels_were_not_exported_are_refused(
    options: dict[str, Any], way_out: str
) -> None:
    op = fg.load_export(exported("sliding_window"))
    with pytest.raises(InputError) as error:
        op(*CASE.tensors(3), **captures_of("sliding_window"), **options)
    assert way_out in error.value.way_out
    assert_four_lines(error.value)


def test_autocast_to_another_dtype_is_refused() -> None:
    op = fg.load_export(exported("sliding_window"))
    q, k, v = CASE.tensors(3)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(InputError, match="autocast"):
        op(q, k, v, **captures_of("sliding_window"))


def test_arguments_are_checked_as_those_of_the_compiled_operator() -> None:
    op = fg.load_export(exported("sliding_window"))
    q, k, v = CASE.tensors(3)
    with pytest.raises(InputError, match="head_dim"):
        op(q[..., :8], k, v, window=8)
    with pytest.raises(InputError):
        op(q, k, v)


# ---- what is exported in addition


@pytest.mark.parametrize(
    ("call", "options"),
    [
        slow("split_size", {"split_size": 16}),
        slow("whole", {"h_offset": 2, "whole": {"heads": 8}}),
        slow("q_offset:int32", {"q_offset": torch.tensor([5], dtype=torch.int32)}),
        slow("split_size+k_offset:int64", {"split_size": 16, "k_offset": torch.tensor(32)}),
    ],
)
def test_variants_of_calls_give_the_bits_of_the_compiled_operator(
    call: str, options: dict[str, Any]
) -> None:
    op = fg.load_export(exported("sliding_window", calls=(call,)))
    own = fg.attention(spec_of("sliding_window"))
    given = (*CASE.tensors(3),)
    results = [
        each(*given, **captures_of("sliding_window"), **options, backend="emulator")
        for each in (op, own)
    ]
    assert torch.equal(*results)


@pytest.mark.parametrize("group", [slow(4)])
def test_heads_share_a_tile_where_that_was_exported(group: int) -> None:
    op = fg.load_export(exported("sliding_window", heads_per_tile=(1, 4)))
    case = Case(1, 64, 1, 2 * group, 2, "float16", 16)
    out = op(*case.tensors(), **captures_of("sliding_window", case))
    assert op.report is not None
    assert op.report.kernel.facts.heads_per_tile == 4
    own = fg.attention(spec_of("sliding_window"))
    other = own(*case.tensors(), **captures_of("sliding_window", case), backend="emulator")
    assert own.report.kernel.plan.heads_per_tile == 4  # type: ignore[union-attr]
    assert torch.equal(out, other)


@pytest.mark.slow
def test_a_block_layout_that_is_a_function_is_stored_up_to_a_position(tmp_path: Path) -> None:
    op = fg.load_export(exported("bigbird", positions=64))
    case = Case(40, 64, 1, 1, 1, "float16", 16)
    own = fg.attention(spec_of("bigbird"))
    mine = op(*case.tensors())
    assert torch.equal(mine, own(*case.tensors(), backend="emulator"))
    with pytest.raises(InputError, match="beyond the block layout") as error:
        op(*Case(40, 65, 1, 1, 1, "float16", 16).tensors())
    assert "--positions" in error.value.way_out


@pytest.mark.slow
def test_calls_beyond_32_bit_integers_take_the_wide_kernels() -> None:
    op = fg.load_export(exported("block_diagonal"))
    program = op.spec
    boxes = program.record.narrow
    names, ends = zip(*boxes[0].items(), strict=True)
    assert not program._is_wide(CallRanges(names, ends))
    longest = max(boxes, key=lambda box: box["q"][1])
    beyond = {**longest, "q": (0, longest["q"][1] + 1)}
    assert program._is_wide(CallRanges(tuple(beyond), tuple(beyond.values())))


# ---- the callable


def test_it_can_be_copied_pickled_and_printed() -> None:
    op = fg.load_export(exported("sliding_window"))
    again = pickle.loads(pickle.dumps(op))
    assert again.name == op.name == copy.deepcopy(op).name
    assert repr(op).startswith("flashgen.load_export(")
    q, k, v = CASE.tensors(3)
    captures = captures_of("sliding_window")
    assert torch.equal(op(q, k, v, **captures), again(q, k, v, **captures))


def test_files_are_read_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = copied(exported("sliding_window"), tmp_path)
    op = fg.load_export(folder)
    shutil.rmtree(folder)
    monkeypatch.setattr(folders, "open_folder", None)
    op(*CASE.tensors(3), **captures_of("sliding_window"))


SAVE = """
import sys, torch, flashgen as fg
spec = fg.load("specs/sliding_window.py").replace(head_dim=16)
if {hashed}:
    fg.attention(spec.replace(head_dim=24))  # has the name
own = fg.attention(spec)

class Layer(torch.nn.Module):
    def forward(self, q, k, v):
        return own(q, k, v, window=9) * 2

operands = torch.load("{folder}/operands.pt")
torch.export.save(torch.export.export(Layer(), operands), "{folder}/layer.pt2")
"""
RUN = """
import sys, torch, flashgen as fg
op = fg.load_export("{export}")
program = torch.export.load("{folder}/layer.pt2")
print([str(n.target) for n in program.graph.nodes if "flashgen" in str(n.target)])
torch.save(program.module()(*torch.load("{folder}/operands.pt")), "{folder}/out.pt")
stages = ("flashgen.kernels.codegen", "flashgen.kernels.planner", "jinja2")
print([m for m in sys.modules if m.startswith(stages)])
"""


@pytest.mark.parametrize("hashed", [slow(False), slow(True)])
def test_a_program_of_torch_export_runs_where_only_the_export_is(
    hashed: bool, tmp_path: Path
) -> None:
    spec, operands = spec_of("sliding_window"), tuple(CASE.tensors(3))
    torch.save(operands, tmp_path / "operands.pt")
    run_python("-c", SAVE.format(hashed=hashed, folder=tmp_path))
    export = exported("sliding_window")
    done = run_python("-c", RUN.format(export=export, folder=tmp_path))
    digest = open_folder(export).manifest.programs[0].digest
    name = f"sliding_window_{digest[:8]}" if hashed else "sliding_window"
    assert done.stdout.splitlines() == [f"['flashgen.{name}.default']", "[]"]
    expected = fg.attention(spec)(*operands, window=9, backend="emulator") * 2
    assert torch.equal(torch.load(tmp_path / "out.pt"), expected)


def test_calls_without_an_architecture_take_the_path_that_the_export_recorded() -> None:
    folder = open_folder(exported("local_global", ("sm_90a",)))
    (record,) = folder.manifest.programs
    spec = spec_of("local_global")
    (path,) = paths_of_layout(spec, "sm_90a", backward=False)
    forward = PathRecord("sm_90a", True, Pass(False), path.arch, 16, path.why)
    assert record.paths == (forward,)
    program = ExportedProgram(folder, with_portable_path(record), drops=False)
    target = Target("gpu", "sm_90a", torch.device("cpu"), 0, open_path=True)
    chosen = {"forward": "sm_90", "backward": "sm_90a", "deterministic": "sm_90"}
    for which, arch in chosen.items():
        assert program.path_of_pass(target, which).arch == arch
        assert program.path_of_pass(replace(target, open_path=False), which).arch == "sm_90a"
