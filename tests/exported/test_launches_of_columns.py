"""Exports of wide heads, of which each launch of a pass computes some columns of V."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import flashgen as fg
from flashgen.calls.export import ExportRequest, export
from flashgen.calls.exported.folder import open_folder
from flashgen.shared.errors import ExportError
from tests.exported.test_damaged_manifests import REMOVED, changed, values_of, write
from tests.support.examples import spec_path
from tests.support.examples import values_of as captured_of
from tests.support.judged import dropping
from tests.support.shapes import Case

IN_PARTS = {"head_dim": 16, "head_dim_v": 392}


class Both:
    """A spec and its export."""

    def __init__(self, folder: Path, name: str, arch: str, **changes: Any) -> None:
        options = {key: changes.pop(key) for key in ("backward", "calls") if key in changes}
        self.spec = fg.load(spec_path(name)).replace(**{"dtype": "bfloat16"} | changes)
        self.arch = arch
        export(ExportRequest(spec=self.spec, archs=(arch,), **options), folder)
        self.ops = fg.load_export(folder), fg.attention(self.spec)
        case = Case(33, 40, 1, 2, 1, self.spec.dtype, self.spec.head_dim, self.spec.head_dim_v)
        self.qkv = case.tensors(seed=2)
        found = captured_of(spec_path(name), case)
        self.captures = found["scalars"] | found["tensors"]
        self.learned = [x.name for x in self.ops[0].spec.signature.learned]

    def forward(self, **how: Any) -> list[list[torch.Tensor]]:
        """The results of the export and of the spec, whose launches are the same."""
        found, launches = [], []
        for op in self.ops:
            run = op(*self.qkv, **self.captures, **self.where, **how, return_lse=True)
            found.append(list(run))
            launches.append([op.report.columns, *(x.columns for x in op.report.others)])
        assert launches[0] == launches[1]
        self.columns = launches[0]
        return found

    def backward(self, **how: Any) -> list[list[torch.Tensor]]:
        found = []
        for op in self.ops:
            given = [x.detach().requires_grad_() for x in self.qkv]
            names = {x: self.captures[x].detach().requires_grad_() for x in self.learned}
            out = op(*given, **(self.captures | names), **self.where, **how)
            dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(5))
            inputs = (*given, *names.values())
            found.append([out, *torch.autograd.grad(out, inputs, dout.to(out.dtype))])
        return found

    @property
    def where(self) -> dict[str, Any]:
        return {"backend": "emulator", "arch": self.arch}


def same(found: list[list[torch.Tensor]]) -> bool:
    return all(torch.equal(*each) for each in zip(*found, strict=True))


def test_launches_of_some_columns_have_the_bits_of_the_spec(tmp_path: Path) -> None:
    both = Both(tmp_path / "export", "causal", "sm_80", dtype="float16", **IN_PARTS)
    assert same(both.forward())
    assert both.columns == [208, 184]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "arch", "dims", "dropout_p"),
    [
        ("causal", "sm_86", (576, 512), 0.2),
        ("dense_bias", "sm_86", (576, 512), 0.0),
        ("dense_bias", "sm_90a", (384, 384), 0.0),
        ("dense_bias", "sm_90a", (512, 512), 0.0),
        ("dense_bias", "sm_80", (416, 504), 0.0),
        ("softcap", "sm_90a", (576, 504), 0.2),
        ("relative_bias", "sm_120", (512, 512), 0.2),
    ],
)
def test_gradients_of_wide_heads_have_the_bits_of_the_spec(
    name: str, arch: str, dims: tuple[int, int], dropout_p: float, tmp_path: Path
) -> None:
    wide = {"head_dim": dims[0], "head_dim_v": dims[1], "dropout": dropout_p > 0}
    both = Both(tmp_path / "export", name, arch, backward=True, **wide)
    drops = dropping(dropout_p)
    assert same(both.forward(**drops))
    for deterministic in (False, True):
        assert same(both.backward(deterministic=deterministic, **drops))


@pytest.mark.slow
@pytest.mark.parametrize("size", [None, 16])
def test_split_keys_of_some_columns_have_the_bits_of_the_spec(
    size: int | None, tmp_path: Path
) -> None:
    both = Both(tmp_path / "export", "causal", "sm_80", calls=("split_size",), **IN_PARTS)
    both.qkv = [both.qkv[0][:, :, :1], *both.qkv[1:]]
    assert same(both.forward(q_offset=39, split_size=size))
    assert len(both.columns) == 2


@pytest.mark.slow
def test_operands_without_a_kernel_of_all_columns_are_refused_with_a_way_out(
    tmp_path: Path,
) -> None:
    """On sm_90a one launch computes 416 columns; the kernel for other addresses has no tile."""
    both = Both(tmp_path / "export", "causal", "sm_90a", head_dim=16, head_dim_v=416)
    assert same(both.forward())
    assert both.columns == [416]
    q, k, v = both.qkv
    shifted = torch.empty(q.numel() + 1, dtype=q.dtype)[1:].view(q.shape).copy_(q)
    with pytest.raises(fg.InputError, match="no forward kernel for this call") as error:
        both.ops[0](shifted, k, v, **both.where)
    assert "x.contiguous()" in error.value.way_out


# ---- manifests that name other columns


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export") / "causal"
    Both(folder, "causal", "sm_80", **IN_PARTS)
    return folder


PATH = ("programs", 0, "paths", 0)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ((*PATH, "columns"), 0),
        ((*PATH, "columns"), -208),
        ((*PATH, "columns"), 8),  # no program has so many
        ((*PATH, "columns"), 184),  # the last launch has none
        ((*PATH, "columns"), 392),  # there is no kernel of all columns
        ((*PATH, "columns"), 400),
        ((*PATH, "taken"), "sm_90a"),
        ((*PATH, "arch"), "sm_90a"),
        ((*PATH, "of", "drops"), True),
        ((*PATH, "of", "deterministic"), True),
        ((*PATH, "of", "learns"), ["bias"]),
        ((*PATH, "why"), "two\nlines"),
        ((*PATH, "is_open"), True),
        (("programs", 0, "paths"), []),
        (("programs", 0, "columns"), 392),
        (("programs", 1), REMOVED),
        (("programs", 2), REMOVED),
        (("programs", 1, "columns"), 0),
        (("programs", 1, "columns"), 184),
        (("programs", 1, "columns"), 200),
        (("programs", 1, "signature", "head_dim_v"), 184),
        (("programs", 1, "signature", "dropout"), True),
        (("programs", 1, "forward"), []),
    ],
)
def test_columns_that_do_not_fit_together_are_refused(
    place: tuple[str | int, ...], value: Any, whole: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "export"))
    values = values_of(folder)
    open_folder(folder)
    write(folder, changed(values, place, value))
    with pytest.raises(ExportError) as error:
        open_folder(folder)
    assert len(str(error.value).splitlines()) == 4, error.value


def test_a_choice_that_is_named_twice_is_refused(whole: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "export"))
    values = values_of(folder)
    paths = values["programs"][0]["paths"]
    write(folder, changed(values, ("programs", 0, "paths"), [*paths, *paths]))
    with pytest.raises(ExportError):
        open_folder(folder)
