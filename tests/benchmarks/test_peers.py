"""The peers that a GPU machine may lack: the folder that travels, and what adapters ask of them."""

from __future__ import annotations

import json
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import peers
from benchmarks.suite import check
from benchmarks.suite.cases import PASSES, Case, full_list, make
from benchmarks.suite.contenders import Contender, contenders, fakes
from benchmarks.suite.contenders.cudnn_flex import CudnnFlex, intervals
from benchmarks.suite.contenders.cudnn_graph import CudnnGraph
from benchmarks.suite.contenders.flash_attention import FlashAttention
from benchmarks.suite.contenders.flashinfer import FlashInfer
from benchmarks.suite.contenders.libraries import FA4
from benchmarks.suite.contenders.standard import Standard
from benchmarks.suite.one_case import differentiated
from benchmarks.variants import FORMS
from tests.benchmarks.test_contenders import AUTOTUNED, CPU, DEVICE, FLASH, GPU

# ---- the folder that travels ---------------------------------------------------------------------

PINS = {"one": {"small": "1.0", "other": "2"}, "two": {"third": "3"}}
HERE = f"{sys.version_info[0]}.{sys.version_info[1]}"


def wheel(package: str, version: str, folder: Path, python: str) -> Path:
    """A wheel that holds a module, a large file, and files that are dropped."""
    path = folder / f"{package}-{version}-py3-none-any.whl"
    noise = torch.randint(0, 256, (4000,), generator=torch.Generator().manual_seed(0))
    with zipfile.ZipFile(path, "w") as target:
        target.writestr(f"{package}/__init__.py", f"version = {version!r}\n")
        target.writestr(f"{package}/kernels.so", bytes(noise.tolist()))
        target.writestr(f"{package}/libstatic.a", b"x" * 9000)
        target.writestr("nvidia_cutlass_dsl/dsl_packages/cutlass.py", "")
    return path


def test_an_archive_travels_in_pieces_and_comes_back_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = peers.fetch(tmp_path, PINS, HERE, wheel, size=1500)
    pieces = manifest["archives"]["one"]["pieces"]
    assert len(pieces) > 2
    assert max((tmp_path / name).stat().st_size for name in pieces) <= 1500
    text = peers.listed(manifest)
    assert "small 1.0" in text
    assert (
        f"{sum(p['bytes'] for a in manifest['archives'].values() for p in a['pieces'].values()):,}"
        in text
    )
    assert peers.main(["--unpack", str(tmp_path)]) == 0
    site = tmp_path / "site"
    printed = capsys.readouterr().out.splitlines()[-1]
    assert printed == f"export PYTHONPATH={site}:{site / 'nvidia_cutlass_dsl/dsl_packages'}"
    assert (site / "other/__init__.py").read_text() == "version = '2'\n"
    assert len((site / "small/kernels.so").read_bytes()) == 4000
    assert not list(site.rglob("*.a"))


def test_the_same_packages_give_the_same_pieces(tmp_path: Path) -> None:
    first, second = (peers.fetch(tmp_path / n, PINS, HERE, wheel) for n in ("a", "b"))
    assert first == second


def test_a_piece_that_is_missing_or_damaged_leaves_out_its_archive_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = peers.fetch(tmp_path, PINS, HERE, wheel, size=1500)
    first, second, *_ = (tmp_path / name for name in manifest["archives"]["one"]["pieces"])
    whole = second.read_bytes()
    second.unlink()
    assert peers.main(["--unpack", str(tmp_path)]) == 1
    assert f"one is left out: {second.name} is not there" in capsys.readouterr().out
    assert (tmp_path / "site/third/__init__.py").exists()
    assert not (tmp_path / "site/small").exists()
    second.write_bytes(whole)
    first.write_bytes(first.read_bytes()[:-1])
    assert "another hash: 1499 of 1500" in peers.unpack(tmp_path)[1]["one"]


def test_a_second_fetch_adds_to_the_first(tmp_path: Path) -> None:
    peers.fetch(tmp_path, {"one": PINS["one"]}, HERE, wheel, size=1000)
    manifest = peers.fetch(tmp_path, PINS, HERE, wheel, size=1500)
    pieces = {name for entry in manifest["archives"].values() for name in entry["pieces"]}
    assert {path.name for path in tmp_path.iterdir()} == {*pieces, peers.MANIFEST}

    def fails(package: str, version: str, folder: Path, python: str) -> Path:
        if package == "third":
            raise peers.PeersError("no network")
        return wheel(package, version, folder, python)

    with pytest.raises(peers.PeersError, match="no network"):
        peers.fetch(tmp_path / "interrupted", PINS, HERE, fails)
    assert [*peers.manifest_in(tmp_path / "interrupted")["archives"]] == ["one"]
    with pytest.raises(peers.PeersError, match="another folder for"):
        peers.fetch(tmp_path, PINS, "2.7", wheel)


def test_what_was_unpacked_before_does_not_stay(tmp_path: Path) -> None:
    manifest = peers.fetch(tmp_path, PINS, HERE, wheel, size=1500)
    assert peers.unpack(tmp_path)[1] == {}
    (tmp_path / next(iter(manifest["archives"]["one"]["pieces"]))).unlink()
    assert [*peers.unpack(tmp_path)[1]] == ["one"]
    assert not (tmp_path / "site/small").exists()
    assert (tmp_path / "site/third").exists()


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"python": "3.12", "archives": [1]}', "\udcff"],
)
def test_a_damaged_manifest_is_named(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / peers.MANIFEST).write_bytes(text.encode("utf-8", "surrogateescape"))
    for command in ("--unpack", "--fetch"):
        assert peers.main([command, str(tmp_path)]) == 1
        assert "remove it and fetch again" in capsys.readouterr().out


def test_a_folder_that_cannot_be_written_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    peers.fetch(tmp_path, PINS, HERE, wheel)
    (tmp_path / "site").write_text("no folder")
    assert peers.main(["--unpack", str(tmp_path)]) == 1
    assert peers.main(["--fetch", str(tmp_path / "site")]) == 1
    assert capsys.readouterr().out.count(str(tmp_path / "site")) == 2


def test_a_folder_without_a_manifest_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert peers.main(["--unpack", str(tmp_path)]) == 1
    assert f"--fetch {tmp_path} makes it" in capsys.readouterr().out


def test_a_package_that_the_index_lacks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lacking(package: str, version: str, *_: Any) -> Path:
        raise peers.PeersError(f"{package} {version}: no wheel")

    monkeypatch.setattr(peers.fetch, "__defaults__", (peers.PINS, peers.PYTHON, lacking, 1))
    assert peers.main(["--fetch", str(tmp_path)]) == 1
    assert "flash-attn-4 4.0.0b36: no wheel" in capsys.readouterr().out


def test_pieces_and_versions_are_what_a_gpu_machine_takes() -> None:
    assert peers.PIECE <= 40 * 2**20
    versions = [version for packages in peers.PINS.values() for version in packages.values()]
    assert all(version[0].isdigit() and "*" not in version for version in versions)
    dsl = {v for name, v in peers.PINS["fa4"].items() if name.startswith("nvidia-cutlass-dsl")}
    assert len(dsl) == 1


def test_the_check_says_what_can_be_imported_and_why_the_rest_cannot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from benchmarks.suite.contenders import libraries

    there = libraries.Library("numpy", "json")
    lost = libraries.Library("no-such-package", "no_such_module")
    monkeypatch.setattr(libraries, "LIBRARIES", (there, lost))
    monkeypatch.setattr(peers, "PINS", {"one": {"no-such-package": "1"}, "two": {"numpy": "2"}})
    here, right, wrong, last = peers.check()
    assert f"torch {torch.__version__}" in here
    assert right.split()[:3:2] == ["numpy", "json"]
    assert right.endswith("can be imported")
    assert "no-such-package, not installed" in wrong
    assert wrong.endswith("cannot be imported: No module named 'no_such_module'")
    assert last == "--fetch and --unpack bring packages that are missing: one"


def test_make_gpu_runs_with_the_path_that_the_packages_were_unpacked_to() -> None:
    # A make that sets PYTHONPATH would hide them; gpu.py finds its checkout by itself.
    recipe = (peers.ROOT / "Makefile").read_text().split("\ngpu:\n")[1].split("\n\n")[0]
    assert "benchmarks/gpu.py" in recipe
    assert "PYTHONPATH" not in recipe


# ---- adapters ------------------------------------------------------------------------------------


def small(spec: str, **options: Any) -> Case:
    sizes = options.pop("sizes", (2, 4, 2, 48, 48, 64))
    return make("x", spec, *sizes, dtype="bfloat16", key=True, **options)


TAKEN: list[tuple[Contender, str, dict[str, Any]]] = [
    (FlashAttention(), "full", {"dim_v": 32}),
    (FlashAttention(), "sliding_window", {"window": 7}),
    (FlashAttention(), "symmetric_window", {"window": 7}),
    (FlashAttention(), "sliding_window+softcap", {"window": 7}),
    (FlashAttention(deterministic=True), "sliding_window+sink", {"window": 7}),
    (FlashAttention(), "variable_length", {"sizes": (1, 4, 2, 48, 48, 64)}),
    (CudnnGraph(), "full", {"dim_v": 32}),
    (CudnnGraph(), "sliding_window+sink", {"window": 7}),
    (CudnnGraph(deterministic=True), "symmetric_window", {"window": 7}),
    (CudnnGraph(), "causal+alibi", {}),
    (CudnnGraph(), "causal+dropout", {}),
    (CudnnGraph(paged=True), "full", {"sizes": (2, 4, 2, 1, 48, 64)}),
    (CudnnFlex(), "full", {}),
    (CudnnFlex(), "prefix_lm", {}),
    (CudnnFlex(), "block_diagonal", {"chunk": 9}),
    (CudnnFlex(), "sliding_window", {"window": 7}),
    (CudnnFlex(), "empty_rows", {}),
    (CudnnFlex(), "variable_length", {"sizes": (1, 4, 2, 48, 48, 64)}),
    (FlashInfer(), "full", {"sizes": (2, 4, 2, 1, 48, 64)}),
    (FLASH, "causal", {}),
    (AUTOTUNED, "sliding_window+sink", {"window": 7}),
]


@pytest.mark.parametrize(("contender", "spec", "options"), TAKEN)
def test_an_adapter_asks_its_package_for_the_attention_of_the_case(
    contender: Contender, spec: str, options: dict[str, Any]
) -> None:
    case = small(spec, **options)
    assert contender.supports(case, DEVICE) is None
    inputs = check.make_inputs(case, CPU, seed=0)
    prepared = contender.prepare(case, DEVICE)
    out = (prepared.undropped or prepared.attend)(*inputs.learnt)
    results = {"out": out.nan_to_num()}  # rows without a key are the stand-ins' own affair
    if "both" in prepared.passes and spec != "empty_rows":
        gradients = torch.autograd.grad(out, differentiated(prepared, inputs), inputs.dout)
        names = ("dq", "dk", "dv", *(f"d{name}" for name in prepared.learned))
        results |= dict(zip(names, gradients, strict=True))
    verdict = check.Oracle(case, inputs).verdict(results, ours=False)
    assert verdict.ok, verdict.text
    trusted = Standard().prepare(case, DEVICE)
    exact = (trusted.undropped or trusted.attend)(*inputs.learnt)
    found = torch.autograd.grad(exact, differentiated(trusted, inputs), inputs.dout)
    names = ("dq", "dk", "dv", *(f"d{name}" for name in trusted.learned))
    whole = {"out": exact, **dict(zip(names, found, strict=True))}
    assert "dsink" not in results or "dsink" in whole
    assert check.compare_peers(results, whole).ok
    if prepared.undropped:
        assert check.dropped_at_random(prepared.attend, inputs, case.mods.dropout).ok
        assert not check.dropped_at_random(prepared.undropped, inputs, case.mods.dropout).ok


REFUSED = [
    (FlashAttention(), small("alibi"), "score function is no cap"),
    (FlashAttention(), small("prefix_lm"), "no band"),
    (FlashAttention(), small("causal+dropout"), "no dropout"),
    (FlashAttention(), small("causal", sizes=(1, 2, 2, 8, 16, 64)), "last query"),
    (FlashAttention(), replace(small("causal"), dtype="float32"), "16-bit"),
    (FlashAttention(deterministic=True), small("full", sizes=(1, 2, 2, 1, 16, 64)), "no gradients"),
    (CudnnGraph(), small("softcap"), "not ALiBi"),
    (CudnnGraph(), small("alibi"), "with a causal mask"),
    (CudnnGraph(), small("causal+alibi", sizes=(1, 3, 3, 8, 8, 64)), "power of two"),
    (CudnnGraph(), small("variable_length"), "flex_attention"),
    (CudnnGraph(paged=True), small("causal"), "for decoding"),
    (CudnnFlex(), small("longformer"), "no single interval"),
    (CudnnFlex(), small("bigbird"), "no single interval"),
    (CudnnFlex(), small("softcap"), "masks alone"),
    (FlashInfer(), small("causal"), "for decoding"),
    (FLASH, small("causal+dropout"), "no dropout"),
]


@pytest.mark.parametrize(("contender", "case", "reason"), REFUSED)
def test_what_a_package_lacks_is_said_and_not_tried(
    contender: Contender, case: Case, reason: str
) -> None:
    assert reason in str(contender.supports(case, DEVICE))


def test_an_older_package_without_an_argument_is_no_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    def older(q: Any, k: Any, v: Any, causal: bool, deterministic: bool) -> Any:
        raise AssertionError("never called")

    monkeypatch.setattr(fakes.FlashAttention, "flash_attn_func", older)
    case = small("sliding_window+sink", window=7)
    reason = FlashAttention().supports(case, DEVICE)
    assert reason == "this version has no argument learnable_sink, window_size"
    assert FlashAttention().supports(small("causal"), DEVICE) is None


def test_a_package_that_a_gpu_machine_lacks_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn.cute", None)
    assert "flash-attn-4 cannot be imported" in str(FlashAttention().supports(small("causal"), GPU))
    assert FA4.missing(DEVICE) is None
    assert FlashAttention().library(DEVICE).startswith("stand-in for flash-attn-4; torch ")


def test_intervals_of_packed_sequences_count_from_each_of_their_rows() -> None:
    case = small("variable_length", sizes=(1, 2, 2, 6, 6, 64))
    assert json.loads(str(case.mods.starts.tolist())) == [0, 3, 5, 6]
    assert intervals(case)[0].tolist() == [[1, 2, 3, 1, 2, 1]]
    window = make("x", "sliding_window", 2, 2, 2, 4, 4, 64, window=2)
    assert intervals(window)[0].tolist() == [[0] * 8, [0, 0, 1, 2] * 2, [1, 2, 3, 4] * 2]


@pytest.mark.parametrize("name", [name for name in sorted(FORMS) if FORMS[name].scalars(64)])
def test_numbers_that_are_tensors_give_the_mask_of_the_same_numbers(name: str) -> None:
    # FlexAttention reads them at run time, as flashgen does: neither compiles them in.
    case = small(name)
    numbers = case.numbers(CPU)
    assert all(isinstance(number, torch.Tensor) for number in numbers.values())
    zero = torch.zeros((), dtype=torch.int64)
    q, k = torch.arange(48)[:, None], torch.arange(48)[None, :]
    one, two = (mods.mask(zero, zero, q, k) for mods in (case.mods_of(numbers), case.mods))
    assert torch.equal(one, two)


def test_contenders_that_compile_for_a_minute_are_in_few_cases_and_early_ones() -> None:
    cases = full_list()
    main = [place for place, case in enumerate(cases) if case.main]
    assert 3 <= len(main) <= 6
    assert max(main) < 20
    for contender in (FLASH, AUTOTUNED):
        assert "too long" in str(contender.supports(make("x", "causal", 1, 2, 2, 64, 64, 64), GPU))


def test_every_kind_that_had_no_record_comes_before_the_variants() -> None:
    cases = full_list()
    first = cases[: next(i for i, case in enumerate(cases) if case.group == "variant")]
    assert {"sliding_window+sink", "sliding_window+softcap", "causal+dropout"} <= {
        case.spec for case in first
    }
    assert {"variable_length", "packed_causal", "relative_bias"} <= {case.spec for case in first}
    assert {(c.batch, c.seq_q) for c in first} >= {(1, 1), (2, 1)}
    assert {c.head_dim for c in first} >= {64, 96, 128, 192, 256}
    assert any(c.dtype == "float16" for c in first)
    assert {c.seq_q for c in first} >= {512, 1024, 2048, 4096, 32768}
    assert [c.head_dim_v for c in first if c.head_dim == 192] == [128]


def test_every_contender_names_its_packages_and_each_name_is_once() -> None:
    listed = contenders(DEVICE)
    assert len({contender.name for contender in listed}) == len(listed)
    for contender in listed:
        text = contender.library(DEVICE)
        assert (
            any(character.isdigit() for character in text)
            or "stand-in" in text
            or ("not installed" in text)
        )
    assert set(PASSES) == {"forward", "backward", "both"}
