"""The C sources of an export: they compile without a warning and launch what Python launches."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import flashgen as fg
from flashgen.calls.export import ExportRequest, c_source, export
from flashgen.calls.export.c_source import c_sources
from flashgen.calls.exported.folder import open_folder
from flashgen.calls.exported.manifest import LayoutRecord, Manifest
from flashgen.calls.runtime import kernel_arguments
from flashgen.calls.runtime.backends import Target
from flashgen.calls.runtime.bound_kernel import BoundKernel
from flashgen.shared.paths import PATHS
from flashgen.shared.signature import TensorArgument
from flashgen.shared.tensormap import TensorMapSpec
from flashgen.spec.language.block_layout import TENSORS
from tests.support.examples import SPEC_IDS, spec_path, values_of
from tests.support.exported_c import (
    WARNINGS,
    CLibrary,
    Tensor,
    compiler,
    cuda_headers,
    emulate,
    without_addresses,
)
from tests.support.exports import exported, spec_of, with_portable_path
from tests.support.judged import forward_verdicts
from tests.support.paths import ROOT
from tests.support.shapes import Case
from tests.support.tiers import slow

RNG = torch.tensor([0x0123456789ABCDEF, 42])


def empty_map(spec: TensorMapSpec, address: int, device: int) -> bytes:
    spec.check_address(address)
    return bytes(128)


@contextmanager
def recorded(sms: int) -> Iterator[list[SimpleNamespace]]:
    """Inside, the launches that Python binds, before the emulator executes them."""
    found: list[SimpleNamespace] = []
    emulate_bound = BoundKernel.emulate

    def recording(self: BoundKernel, tensors: Any, launch: Any) -> Any:
        given = [tensors[name] for name in self.arguments.pointers]
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in given]
        found.append(
            SimpleNamespace(
                facts=self.build.facts,
                grid=self.grid,
                block=self.block,
                smem=self.smem_bytes,
                params=self.arguments.packed(addresses),
                maps=self.arguments.maps,
                lse=tensors.get("lse"),  # without a softmax, the sum of weights
            )
        )
        return emulate_bound(self, tensors, launch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BoundKernel, "emulate", recording)
        patch.setattr(kernel_arguments, "encode", empty_map)
        patch.setattr(Target, "sms", property(lambda _: sms))
        yield found


class Compared:
    """A call of an export by Python and by C, on the same tensors."""

    def __init__(self, name: str, arch: str, build: Path, case: Case, **options: Any) -> None:
        self.sms = options.pop("sms", 108)
        self.dropout_p = options.pop("dropout_p", 0.0)
        archs = ("sm_80",) if arch == "sm_80" else (arch,)
        path = exported(name, archs, dropout=self.dropout_p > 0, **options)
        self.folder, self.arch = open_folder(path), arch
        self.op = fg.load_export(path)
        self.spec = spec_of(name, dropout=self.dropout_p > 0)
        case = replace(case, dtype=self.spec.dtype)
        self.qkv = case.tensors(3)
        found = values_of(spec_path(name), case)
        self.captures = found["scalars"] | found["tensors"]
        self.numbers = dict(found)
        if self.dropout_p:
            self.numbers |= {"dropout_p": self.dropout_p, "rng": RNG}
        self.library = CLibrary(self.folder, build)
        assert self.library.open(arch, self.sms) == 0

    def python(self, backward: bool = False, **how: Any) -> list[SimpleNamespace]:
        drops = {"dropout_p": self.dropout_p, "rng": RNG} if self.dropout_p else {}
        captures = {
            name: x.requires_grad_(backward) if backward and name in self.learned else x
            for name, x in self.captures.items()
        }
        qkv = [x.detach().requires_grad_(backward) for x in self.qkv]
        with recorded(self.sms) as launches:
            out = self.op(*qkv, **captures, **drops, arch=self.arch, **how)
            self.results = out.detach(), launches[-1].lse
            if backward:
                launches.clear()
                self.dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(5))
                self.dout = self.dout.to(out.dtype)
                inputs = (*qkv, *(captures[name] for name in self.learned))
                self.gradients = torch.autograd.grad(out, inputs, self.dout)
        return launches

    @property
    def learned(self) -> list[str]:
        return [tensor.name for tensor in self.op.spec.signature.learned]

    def forward_arguments(self, into: Any = None) -> Any:
        arguments = into or self.library.defaults("forward")
        self.memory = dict(zip("qkv", self.qkv, strict=True))
        out, lse = (torch.full_like(x, float("nan")) for x in self.results)
        self.memory |= {"o": out, "lse": lse, "rng": RNG}
        for name in "qkv":
            setattr(arguments, name, Tensor.of(self.memory[name]))
        arguments.out, arguments.lse = Tensor.of(out), lse.data_ptr()
        for name, value in self.captures.items():
            is_tensor = isinstance(value, torch.Tensor)
            setattr(arguments, name, Tensor.of(value.detach()) if is_tensor else value)
            if is_tensor:
                self.memory[f"c_{name}"] = value.detach()
        if self.dropout_p:
            arguments.dropout_p, arguments.rng = self.dropout_p, RNG.data_ptr()
        return arguments

    def c_forward(self) -> Any:
        arguments = self.forward_arguments()
        return arguments, *self.library.run("forward", arguments, stream=77)

    def backward_arguments(self, deterministic: bool = False) -> Any:
        arguments = self.library.defaults("backward")
        self.forward_arguments(arguments.forward)
        out, lse = self.results
        self.memory |= {"o": out, "lse": lse, "do": self.dout}
        arguments.forward.out, arguments.forward.lse = Tensor.of(out), lse.data_ptr()
        arguments.dout = Tensor.of(self.dout)
        for name, like in zip(("dq", "dk", "dv"), self.qkv, strict=True):
            self.memory[name] = torch.full_like(like, float("nan"))
            setattr(arguments, name, Tensor.of(self.memory[name]))
        for name in self.learned:
            made = torch.full(self.captures[name].shape, float("nan"), dtype=torch.float32)
            self.memory[f"dc_{name}"] = made
            setattr(arguments, f"d_{name}", made.data_ptr())
        arguments.deterministic = int(deterministic)
        return arguments

    def c_backward(self, deterministic: bool) -> Any:
        arguments = self.backward_arguments(deterministic)
        return arguments, *self.library.run("backward", arguments)

    def execute(self, workspace: torch.Tensor) -> None:
        for launched in self.library.launches():
            emulate(self.folder, launched, self.memory, workspace)

    def assert_same(self, of_python: list[SimpleNamespace]) -> None:
        of_c = self.library.launches()
        assert [x.facts.name for x in of_c] == [x.facts.name for x in of_python]
        for c, py in zip(of_c, of_python, strict=True):
            assert c.facts.params == py.facts.params
            assert (c.grid, c.block, c.smem) == (py.grid, py.block, py.smem), c.facts.name
            assert len(c.maps) == len(py.maps)
            for mine, other in zip(c.maps, py.maps, strict=True):
                assert mine == other
            assert without_addresses(py.facts, c.params) == without_addresses(
                py.facts, py.params
            ), c.facts.name


CASE = Case(24, 40, 1, 4, 2, "float16", 16)


@pytest.mark.parametrize(
    ("name", "arch", "options"),
    [
        ("sliding_window", "sm_80", {}),
        slow("sliding_window", "sm_80", {"dropout_p": 0.25}),
        slow("causal", "sm_90a", {}),
        slow("causal", "sm_90a", {"sms": 1}),  # blocks fetch work tiles from a counter
        slow("document", "sm_80", {}),  # min/max tables
        slow("document", "sm_90a", {}),
        slow("block_diagonal", "sm_80", {}),  # 32-bit integers serve this call
        slow("strided", "sm_80", {}),  # tests for multiples
        slow("t5_bias", "sm_90a", {}),
        slow("variable_length", "sm_80", {}),
        slow("variable_length", "sm_90a", {}),  # tensor maps with ragged rows
        slow("sink", "sm_80", {}),
        slow("power", "sm_80", {}),  # a sum of weights in the place of the LSE
        slow("hstu", "sm_90a", {}),  # no sum, and a learned tensor in the weight
    ],
)
def test_a_forward_launch_from_c_has_the_bytes_of_python_and_meets_the_error_rule(
    name: str, arch: str, options: dict[str, Any], tmp_path: Path
) -> None:
    both = Compared(name, arch, tmp_path, CASE, **options)
    of_python = both.python()
    _, status, workspace = both.c_forward()
    assert status == 0, both.library.status_string(status)
    both.assert_same(of_python)
    assert {x.stream for x in both.library.launches()} == {77}
    both.execute(workspace)
    out, lse = both.memory["o"], both.memory["lse"]
    if not both.spec.sums_weights:  # nothing is written
        assert lse.isnan().all()
        lse = both.results[1]
    if not both.spec.packed:
        assert torch.equal(out, both.results[0])
        verdicts = forward_verdicts((out, lse), both.spec, *both.qkv, **both.numbers)
        assert all(verdicts.values()), verdicts
    both.library.close()
    assert both.library.number("fake_open_modules").value == 0


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(24, 40, 1, 4, 2), (190, 90, 2, 2, 2), (200, 90, 1, 1, 1)])
def test_launches_of_clusters_from_c_have_the_bytes_of_python(
    sizes: tuple[int, ...], tmp_path: Path
) -> None:
    case = Case(*sizes, "bfloat16", 384)
    both = Compared("causal", "sm_90a", tmp_path, case, head_dim=384)
    of_python = both.python()
    assert both.c_forward()[1] == 0
    both.assert_same(of_python)
    both.execute(both.c_forward()[2])
    assert torch.equal(both.memory["o"], both.results[0])


def test_a_spec_whose_launches_compute_some_columns_names_exports_with_sources() -> None:
    manifest = open_folder(exported("causal", head_dim_v=392)).manifest
    found = c_source.why_no_sources(manifest.programs[0])
    assert "--head-dim-v 208 and --head-dim-v 184 have these launches for C" in found
    assert not any(name.endswith(".c") for name in manifest.files)


@pytest.mark.slow
def test_launches_of_some_columns_from_c_add_up_to_the_results_of_python(tmp_path: Path) -> None:
    case = Case(24, 40, 1, 2, 1, "float16", 16, 392)
    q, k, v = case.tensors(3)
    op = fg.load_export(exported("causal", head_dim_v=392, backward=True))
    given = [x.detach().requires_grad_() for x in (q, k, v)]
    out, lse = op(*given, return_lse=True)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(5)).to(out.dtype)
    expected = torch.autograd.grad(out, given, dout)
    found: dict[str, list[torch.Tensor]] = {"dq": [], "dk": [], "dv": []}
    for at in (slice(0, 208), slice(208, 392)):
        part = replace(case, head_dim_v=at.stop - at.start)
        options = {"head_dim_v": part.head_dim_v, "backward": True}
        folder = tmp_path / str(at.start)
        folder.mkdir()
        both = Compared("causal", "sm_80", folder, part, **options)
        both.qkv = q, k, v[..., at]
        both.results, both.dout = (out.detach()[..., at], lse.detach()), dout[..., at]
        _, status, workspace = both.c_forward()
        assert status == 0, both.library.status_string(status)
        both.execute(workspace)
        assert torch.equal(both.memory["o"], out[..., at])
        assert torch.equal(both.memory["lse"], lse)
        _, status, workspace = both.c_backward(deterministic=True)
        assert status == 0, both.library.status_string(status)
        both.execute(workspace)
        for name, each in found.items():
            each.append(both.memory[name])
    made = sum(found["dq"]), sum(found["dk"]), torch.cat(found["dv"], dim=-1)
    for mine, other in zip(made, expected, strict=True):
        torch.testing.assert_close(mine, other, atol=4e-3, rtol=4e-3)


@pytest.mark.parametrize(
    ("name", "arch", "deterministic"),
    [
        slow("causal", "sm_80", False),
        slow("causal", "sm_80", True),
        slow("causal", "sm_90a", False),
        slow("causal", "sm_90a", True),
        slow("dense_bias", "sm_80", False),
        slow("dense_bias", "sm_90a", False),
        slow("document", "sm_80", False),
        slow("variable_length", "sm_90a", False),
        slow("power", "sm_80", False),
        slow("hstu", "sm_90a", False),
    ],
)
def test_backward_launches_from_c_have_the_bytes_of_python_and_its_gradients(
    name: str, arch: str, deterministic: bool, tmp_path: Path
) -> None:
    both = Compared(name, arch, tmp_path, CASE, backward=True)
    of_python = both.python(backward=True, deterministic=deterministic)
    _, status, workspace = both.c_backward(deterministic)
    assert status == 0, both.library.status_string(status)
    both.assert_same(of_python)
    both.execute(workspace)
    names = ["dq", "dk", "dv", *(f"dc_{name}" for name in both.learned)]
    for name, expected in zip(names, both.gradients, strict=True):
        found = both.memory[name]
        if both.spec.packed:  # C does not write rows outside all sequences
            found = torch.where(found.isnan(), 0, found)
        torch.testing.assert_close(found.to(expected.dtype), expected)


@pytest.mark.slow
def test_a_backward_call_from_c_that_does_not_fit_launches_nothing(tmp_path: Path) -> None:
    both = Compared("dense_bias", "sm_80", tmp_path, CASE, backward=True)
    both.python(backward=True)

    def refused(change: Callable[[Any], None]) -> str:
        arguments = both.backward_arguments()
        change(arguments)
        found, _ = both.library.run("backward", arguments)
        assert both.library.launches() == []
        return both.library.status_string(found)

    def without_queries(arguments: Any) -> None:
        for x in (arguments.forward.q, arguments.forward.out, arguments.dout, arguments.dq):
            x.shape[2] = 0

    assert "not aligned" in refused(lambda a: setattr(a, "dlse", 6))
    assert "not aligned" in refused(lambda a: setattr(a, "d_bias", a.d_bias + 2))
    assert "shapes" in refused(without_queries)
    for name in ("dq", "dk", "dv"):
        assert "null" in refused(lambda a, x=name: setattr(getattr(a, x), "data", 0))
        assert "expanded" in refused(lambda a, x=name: getattr(a, x).stride.__setitem__(1, 0))


def test_c_refuses_what_does_not_fit_with_a_status_and_a_sentence(tmp_path: Path) -> None:
    both = Compared("sliding_window", "sm_80", tmp_path, CASE)
    both.python()
    library = both.library
    upper = (spec_path("sliding_window").stem).upper()
    header = (both.folder.path / "sliding_window.h").read_text()
    names = [
        line.split()[0].rstrip(",").removeprefix(f"{upper}_")
        for line in header.partition("typedef enum {")[2].partition("}")[0].splitlines()
        if line.strip()
    ]
    status = {name: number for number, name in enumerate(n for n in names if n != "=")}

    def refused(change: Any) -> str:
        arguments = both.forward_arguments()
        change(arguments)
        found, _ = library.run("forward", arguments)
        assert library.launches() == []
        return next(name for name, number in status.items() if number == found)

    def no_keys(a: Any) -> None:
        a.k.shape[2] = a.v.shape[2] = 0

    def wrong_heads(a: Any) -> None:
        a.k.shape[1] = 3

    assert refused(lambda a: setattr(a, "lse", 0)) == "ERROR_ARGUMENT"
    assert refused(lambda a: setattr(a, "lse", a.lse + 2)) == "ERROR_ALIGNMENT"
    for name in ("q", "k", "v", "out"):
        assert refused(lambda a, x=name: getattr(a, x).__setattr__("data", 0)) == "ERROR_ARGUMENT"
        assert refused(lambda a, x=name: getattr(a, x).__setattr__("data", 33)) == "ERROR_ALIGNMENT"
    assert refused(lambda a: a.out.stride.__setitem__(1, 0)) == "ERROR_STRIDE"
    for axis in range(3):  # a call without batch entries, heads or queries, which has no addresses
        arguments = both.forward_arguments()
        named = {"q": axis, "out": axis} | ({"k": 0, "v": 0} if axis == 0 else {})
        for name, of in named.items():
            getattr(arguments, name).shape[of] = 0
            getattr(arguments, name).data = 0
        arguments.lse = 0
        assert library.run("forward", arguments)[0] == status["OK"], axis
        assert library.launches() == []
    assert refused(lambda a: setattr(a, "q_offset", 2**28)) == "ERROR_ARGUMENT"
    assert refused(wrong_heads) == "ERROR_SHAPE"
    assert refused(lambda a: a.q.stride.__setitem__(3, 2)) == "ERROR_STRIDE"
    for field, values in {
        "window": (0, -(2**31), 2**30 + 1),
        "scale": (0.0, -1.0, float("inf"), float("nan")),
    }.items():
        for value in values:
            assert refused(lambda a, f=field, x=value: setattr(a, f, x)) == "ERROR_ARGUMENT", value
    assert refused(no_keys) == "ERROR_NO_KEYS"
    for field, rows in (("q_offset", CASE.seq_q), ("k_offset", CASE.seq_k)):
        last = 2**28 - (rows - 1)  # the last row has the largest position that kernels support
        assert refused(lambda a, f=field, x=last + 1: setattr(a, f, x)) == "ERROR_ARGUMENT"
        arguments = both.forward_arguments()
        setattr(arguments, field, last)
        assert library.run("forward", arguments)[0] == status["OK"]
        both.python(**{field: last})
        with pytest.raises(fg.InputError, match=f"{field} makes positions larger"):
            both.python(**{field: last + 1})
    library.run("forward", both.forward_arguments())
    library.number("fake_fails").value = 719
    assert library.run("forward", both.forward_arguments())[0] == status["ERROR_CUDA"]
    assert library.c.sliding_window_cuda_result(library.handle) == 719
    library.number("fake_fails").value = 0
    assert library.open("sm_90", 132) == status["ERROR_DEVICE"]
    assert "--arch" in library.status_string(status["ERROR_DEVICE"])
    library.number("fake_version").value = 11_080
    assert library.open("sm_80", 108) == status["ERROR_DRIVER"]
    library.number("fake_version").value = 13_000
    assert library.open("sm_80", 108, tmp_path) == 0
    assert library.run("forward", both.forward_arguments())[0] == status["ERROR_FILE"]


def test_c_checks_the_sizes_of_captured_tensors_and_the_blocks_of_a_layout(tmp_path: Path) -> None:
    shapes: dict[str, tuple[str | int, ...]]
    shapes = {"table": (33,), "first": ("n", 2), "second": (3, "n"), "third": ("n",)}
    sizes = {"table": [33], "first": [1, 2], "second": [3, 7], "third": [7]}
    sizes |= {"layout": [1, 2, 3, 2], "layout_row_counts": [1, 2, 3]}
    sizes |= {"layout_row_blocks": [1, 2, 3, 2], "layout_column_counts": [1, 2, 2]}
    sizes["layout_column_blocks"] = [1, 2, 2, 3]
    manifest = with_captures(shapes, LayoutRecord(block_q=16, block_k=32))
    library = library_of(manifest, tmp_path)
    assert library.open("sm_80", 108, exported("sliding_window")) == 0
    q, k, v = Case(33, 40, 1, 2, 2, "float16", 16).tensors()

    def status(q_offset: int = 0, **changes: list[int]) -> str:
        arguments = library.defaults("forward")
        arguments.window, arguments.q_offset = 8, q_offset
        arguments.lse = 4
        for name, x in {"q": q, "k": k, "v": v, "out": q}.items():
            setattr(arguments, name, Tensor.of(x))
        for name, size in {**sizes, **changes}.items():
            setattr(arguments, name, Tensor.of(torch.zeros(size)))
        return library.status_string(library.run("forward", arguments)[0])

    assert status() == "success"
    assert status(q_offset=15) == "success"
    assert status(third=[1]) == "success"
    shape = "the shapes of tensors do not fit together, or a size is too large"
    assert status(q_offset=16) == shape  # the layout has blocks for 48 queries
    for changes in (
        *({"table": [1]}, {"first": [7, 1]}, {"first": [6, 2]}, {"third": [6]}),
        *({"second": [1, 7]}, {"layout": [1, 2, 3, 1]}, {"layout_row_counts": [1, 2, 2]}),
    ):
        assert status(**changes) == shape, changes


def test_tensors_in_c_have_as_many_axes_as_those_that_mods_read() -> None:
    for dims, most in ((("batch", 2), 4), (("batch", "heads", 2, 3, 4, "n"), 6)):
        header = c_sources(with_captures({"x": dims}))["sliding_window.h"]
        assert f"int64_t shape[{most}];" in header
        assert f"int64_t stride[{most}];" in header


def with_captures(
    dims: dict[str, tuple[str | int, ...]], layout: LayoutRecord | None = None
) -> Manifest:
    """The export of the sliding window, as if its mods read tensors of these dimensions."""
    manifest = open_folder(exported("sliding_window")).manifest
    program = manifest.programs[0]
    tensors = tuple(TensorArgument(name, each, "float32", False) for name, each in dims.items())
    if layout is not None:
        tensors += tuple(TensorArgument(*tensor.key) for tensor in TENSORS)
    signature = replace(program.signature, tensors=tensors)
    changed = replace(program, signature=signature, layout=layout)
    return replace(manifest, programs=(changed, *manifest.programs[1:]))


def library_of(manifest: Manifest, folder: Path) -> CLibrary:
    """The C sources of a manifest that no export wrote."""
    for name, text in c_sources(manifest).items():
        (folder / name).write_text(text)
    made: Any = SimpleNamespace(manifest=manifest, path=folder)
    return CLibrary(made, folder)


def test_the_order_of_heads_in_c_is_that_of_python_on_a_gpu_of_any_size(tmp_path: Path) -> None:
    both = Compared("causal", "sm_80", tmp_path, CASE)
    both.python()
    arguments, heads, rows, keys = both.forward_arguments(), 16, 3000, 2**20
    for name, length in (("q", rows), ("k", keys), ("v", keys), ("out", rows)):
        getattr(arguments, name).shape[:3] = (1, heads, length)
        getattr(arguments, name).stride[:3] = (0, 16, 16 * heads)
    for sms in (1, 108, 1000):
        assert both.library.open("sm_80", sms) == 0
        assert both.library.run("forward", arguments)[0] == 0
        (launched,) = both.library.launches()
        bits = launched.facts.head_bits(heads, heads, rows, keys)
        assert bits
        assert launched.grid == launched.facts.grid(1, heads, heads, rows, keys, head_bits=bits)


@pytest.mark.slow
def test_dropout_in_c_has_the_checks_of_python(tmp_path: Path) -> None:
    both = Compared("sliding_window", "sm_80", tmp_path, CASE, dropout_p=0.25)
    both.python()
    for field, value in (("dropout_p", 1.0), ("dropout_p", -0.1), ("rng", 0), ("k_offset", 8)):
        arguments = both.forward_arguments()
        setattr(arguments, field, value)
        status, _ = both.library.run("forward", arguments)
        assert "outside its range" in both.library.status_string(status)
        assert both.library.launches() == []


def test_unaligned_operands_take_the_kernel_for_them(tmp_path: Path) -> None:
    both = Compared("sliding_window", "sm_80", tmp_path, CASE)
    q, k, v = both.qkv
    shifted = torch.empty(q.numel() + 1, dtype=q.dtype)[1:].view(q.shape).copy_(q)
    both.qkv = shifted, k, v
    of_python = both.python()
    _, status, _ = both.c_forward()
    assert status == 0
    both.assert_same(of_python)
    assert {x.facts.access_bytes for x in of_python} == {2}


@pytest.mark.slow
@pytest.mark.parametrize("name", SPEC_IDS)
def test_the_sources_of_every_spec_compile_without_a_warning(name: str, tmp_path: Path) -> None:
    # What is exported without the backward pass is a part of what is exported with it.
    for backward in (False, True)[SPEC_IDS.index(name) % 6 > 0 :]:
        path = exported(name, tuple(PATHS), backward=backward, dropout=backward)
        folder = tmp_path / str(backward)
        folder.mkdir()
        library = CLibrary(open_folder(path), folder)
        assert library.open("sm_90", 132) == 0
        library.close()


@pytest.mark.slow
def test_arguments_in_c_have_names_that_c_and_its_headers_leave_free(tmp_path: Path) -> None:
    names = ("int", "NULL", "INT32_MAX", "linux", "__FILE__", "_Bool", "int_value", "class_", "a")
    scalars = [fg.Scalar(name) for name in names]
    bias = fg.Tensor("register", ("heads",), grad=True)
    sizes = fg.Tensor("register_size_0", ("heads",), grad=True)
    spec = fg.AttentionSpec(
        lambda b, h, q, k: q - k < sum(scalars[1:], scalars[0]),
        lambda score, b, h, q, k: score + bias[h] * sizes[h],
        name="named",
        head_dim=16,
    )
    export(ExportRequest(spec=spec, archs=("sm_80",), command="", backward=True), tmp_path / "x")
    library = CLibrary(open_folder(tmp_path / "x"), tmp_path)
    assert library.open("sm_80", 108) == 0
    library.close()
    header = (tmp_path / "x/named.h").read_text()
    for field in ("int_value", "NULL_value", "__FILE___value", "int_value_value", "a", "class_"):
        assert f"  int32_t {field};" in header
    assert "named_tensor register_value;" in header
    assert "named_tensor register_size_0;" in header


@pytest.mark.parametrize("standard", ["c11", "gnu11"])
def test_arguments_in_c_compile_in_both_languages_and_standards(
    standard: str, tmp_path: Path
) -> None:
    words = "NULL EOF INT32_MAX CU_STREAM_LEGACY linux unix restrict inline errno stdin I complex"
    names = [*words.split(), "window", "data", "p", "forward", "tensor"]
    manifest = open_folder(exported("sliding_window")).manifest
    signature = manifest.programs[0].signature
    (window,) = signature.scalars
    scalars = (window, *(replace(window, name=name) for name in names if name != "window"))
    program = replace(manifest.programs[0], signature=replace(signature, scalars=scalars))
    header = c_sources(replace(manifest, programs=(program,)))["sliding_window.h"]
    found = re.findall(r"int32_t (\w+); // run-time scalar", header)
    assert sorted(name.removesuffix("_value") for name in found) == sorted(names)
    assert {"window", "data", "NULL_value"} <= set(found)
    (tmp_path / "use.c").write_text(f"#include <stdio.h>\n#include <errno.h>\n{header}")
    includes = ("-isystem", str(cuda_headers()), "-I", str(tmp_path))
    for language in ("c", "c++"):
        standards = (f"-std={standard}", *WARNINGS[1:]) if language == "c" else ("-Wall",)
        command = (compiler(), "-x", language, *standards, *includes, "-fsyntax-only")
        subprocess.run([*command, str(tmp_path / "use.c")], check=True)


def test_no_name_of_a_spec_gives_a_public_name_that_the_sources_have_for_themselves() -> None:
    folder = ROOT / "templates/export"
    name = r"/\*\{ p(?: \| upper)? \}\*/(_\w+)"
    public = set(re.findall(name, (folder / "launcher.h.j2").read_text()))
    assert {"_tensor", "_open", "_ERROR_SHAPE", "_backward"} <= public
    for path in folder.glob("*.c.j2"):
        code = re.sub(rf"{name}|/\*.*?\*/|//.*|\"[^\"]*\"", "", path.read_text())
        own = set(re.findall(r"[A-Za-z]\w*", code))
        assert {x for x in own if x.endswith(tuple(public))} == set(), path.name


def test_strides_whose_bytes_no_integer_holds_are_refused(tmp_path: Path) -> None:
    both = Compared("sliding_window", "sm_80", tmp_path, CASE)
    both.python()
    for name in ("q", "k", "v", "out"):
        arguments = both.forward_arguments()
        getattr(arguments, name).stride[2] = 16 - 2**63  # times 2 it is 32, with 64 bits
        status, _ = both.library.run("forward", arguments)
        assert "too far apart" in both.library.status_string(status)


def test_calls_from_c_take_the_path_that_the_export_recorded() -> None:
    record = open_folder(exported("local_global", ("sm_90a",))).manifest.programs[0]
    arch_of = {form.kernel: form.arch for form in record.forward}
    for program, arch in ((record, "sm_90a"), (with_portable_path(record), "sm_90")):
        forms = c_source._forms(program, ["sm_90a"])["forwards"]
        found = {(form["fallback"], arch_of[form["kernel"]]) for form in forms}
        assert found == {(0, arch), (1, "sm_90")}  # TMA cannot copy operands of the fallback
