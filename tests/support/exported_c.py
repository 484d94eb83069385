"""The C sources of an export, compiled against a recording driver and called by ctypes."""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import ptx_emulator as emulator
from flashgen.calls.exported.folder import Folder
from flashgen.calls.runtime.bound_kernel import span
from flashgen.shared.launch_facts import LaunchFacts
from flashgen.shared.tensormap import TensorMapSpec
from tests.support.paths import ROOT

FAKE = ROOT / "tests/support/fake_cuda.c"
WARNINGS = ("-std=c11", "-Wall", "-Wextra", "-Werror")
OWN_BUFFERS = ("o", "lse", "dq", "dk", "dv", "rows", "dq_sum", "tile_counter")
"""Buffers that Python and the C caller allocate each for themselves."""

_MAP_DTYPES = {6: "float16", 9: "bfloat16"}  # CUtensorMapDataType


class Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_uint64),
        ("shape", ctypes.c_int64 * 4),
        ("stride", ctypes.c_int64 * 4),
    )

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Tensor:
        made = cls(tensor.data_ptr())
        for axis, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
            made.shape[axis], made.stride[axis] = size, stride
        return made


class Launched(NamedTuple):
    """A recorded launch, with the descriptions of its tensor maps."""

    facts: LaunchFacts
    grid: tuple[int, ...]
    block: tuple[int, ...]
    smem: int
    stream: int
    params: bytes
    maps: tuple[TensorMapSpec, ...]


class _Launch(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char * 256),
        ("path", ctypes.c_char * 1024),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("smem", ctypes.c_uint32),
        ("allowed_smem", ctypes.c_uint32),
        ("stream", ctypes.c_uint64),
        ("overlaps", ctypes.c_uint64),
        ("params", ctypes.c_ubyte * 4096),
    )


class _Map(ctypes.Structure):
    _fields_ = (
        ("dtype", ctypes.c_int),
        ("rank", ctypes.c_int),
        ("swizzle", ctypes.c_int),
        ("promotion", ctypes.c_int),
        ("address", ctypes.c_uint64),
        ("sizes", ctypes.c_uint64 * 5),
        ("strides", ctypes.c_uint64 * 4),
        ("box", ctypes.c_uint32 * 5),
        ("steps", ctypes.c_uint32 * 5),
    )


@cache
def cuda_headers() -> Path:
    """The folder of cuda.h, of the package nvidia-cuda-runtime; the test is skipped without it."""
    found = importlib.util.find_spec("nvidia")
    for root in found.submodule_search_locations or () if found else ():
        for header in sorted(Path(root).glob("*/include/cuda.h")):
            return header.parent
    pytest.skip("cuda.h is missing: pip install nvidia-cuda-runtime")


def compiler() -> str:
    found = shutil.which("cc")
    if found is None:
        pytest.skip("there is no C compiler: cc")
    return found


class CLibrary:
    """The functions of an export's C sources, on the recording driver."""

    def __init__(self, folder: Folder, build: Path) -> None:
        self.folder = folder
        record = folder.manifest.programs[0]
        self.signature, self.name = record.signature, record.signature.name
        shared = build / f"{self.name}.so"
        sources = (str(folder.path / f"{self.name}.c"), str(FAKE))
        includes = ("-isystem", str(cuda_headers()), "-I", str(folder.path))
        command = (compiler(), *WARNINGS, *includes, "-shared", "-fPIC", *sources)
        done = subprocess.run([*command, "-o", str(shared)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        self.c = ctypes.CDLL(str(shared))
        self.handle = ctypes.c_void_p()

    def number(self, name: str) -> Any:
        return ctypes.c_int.in_dll(self.c, name)

    def open(self, arch: str, sms: int, folder: Path | None = None) -> int:
        self.number("fake_major").value, self.number("fake_minor").value = divmod(
            int(arch.removeprefix("sm_").rstrip("a")), 10
        )
        self.number("fake_sms").value = sms
        self.path = folder or self.folder.path
        path = str(self.path).encode()
        return int(getattr(self.c, f"{self.name}_open")(path, ctypes.byref(self.handle)))

    def close(self) -> None:
        getattr(self.c, f"{self.name}_close")(self.handle)

    def status_string(self, status: int) -> str:
        function = getattr(self.c, f"{self.name}_status_string")
        function.restype = ctypes.c_char_p
        return str(function(status).decode())

    def forward_arguments(self) -> Any:
        signature = self.signature
        fields: list[tuple[str, Any]] = [(n, Tensor) for n in ("q", "k", "v", "out")]
        fields += [("lse", ctypes.c_uint64), ("scale", ctypes.c_float)]
        fields += [("q_offset", ctypes.c_int32), ("k_offset", ctypes.c_int32)]
        if signature.dropout:
            fields += [("dropout_p", ctypes.c_double), ("rng", ctypes.c_uint64)]
        fields += [(tensor.name, Tensor) for tensor in signature.tensors]
        numbers = {"float32": ctypes.c_float}
        fields += [(x.name, numbers.get(x.dtype, ctypes.c_int32)) for x in signature.scalars]
        return type("Forward", (ctypes.Structure,), {"_fields_": fields})

    def backward_arguments(self) -> Any:
        sink = self.signature.sink
        learned = () if sink is not None and sink.grad else self.signature.learned
        fields = [
            ("forward", self.forward_arguments()),
            ("dout", Tensor),
            ("dlse", ctypes.c_uint64),
        ]
        fields += [(n, Tensor) for n in ("dq", "dk", "dv")]
        fields += [(f"d_{tensor.name}", ctypes.c_uint64) for tensor in learned]
        fields += [("deterministic", ctypes.c_int)]
        return type("Backward", (ctypes.Structure,), {"_fields_": fields})

    def defaults(self, which: str) -> Any:
        kind = {"forward": self.forward_arguments, "backward": self.backward_arguments}[which]
        made = kind()()
        getattr(self.c, f"{self.name}_{which}_defaults")(ctypes.byref(made))
        return made

    def run(self, which: str, arguments: Any, stream: int = 0) -> tuple[int, torch.Tensor]:
        """The status, and the workspace that the launches used."""
        self.c.fake_reset()
        for kernel in self.folder.manifest.kernels:
            path = str(self.path / f"kernels/{kernel.stem}.cubin").encode()
            self.c.fake_expect(path, ctypes.c_size_t(_padded_bytes(kernel.facts)))
        needed = ctypes.c_size_t()
        of = getattr(self.c, f"{self.name}_{which}_workspace")
        status = of(self.handle, ctypes.byref(arguments), ctypes.byref(needed))
        if status:
            return status, torch.empty(0)
        space = torch.zeros(needed.value + 256, dtype=torch.uint8)
        space = space[-space.data_ptr() % 256 :][: needed.value]
        call = getattr(self.c, f"{self.name}_{which}")
        at, size = ctypes.c_uint64(space.data_ptr()), ctypes.c_size_t(needed.value)
        return call(self.handle, ctypes.byref(arguments), at, size, ctypes.c_void_p(stream)), space

    def launches(self) -> list[Launched]:
        count = self.number("fake_launch_count").value
        return [self._launched(x) for x in (_Launch * 64).in_dll(self.c, "fake_launches")[:count]]

    def _launched(self, launch: _Launch) -> Launched:
        assert launch.allowed_smem == launch.smem
        stem = Path(launch.path.decode()).stem
        facts = next(k.facts for k in self.folder.manifest.kernels if k.stem == stem)
        assert launch.name.decode() == facts.name
        assert bool(launch.overlaps) == facts.overlaps
        params = bytes(launch.params)[: _padded_bytes(facts)]
        count = sum(ctype == "tensormap" for _, ctype in facts.params)
        every = (_Map * 64).in_dll(self.c, "fake_maps")
        numbers = [int.from_bytes(params[128 * i :][:4], "little") for i in range(count)]
        maps = tuple(_spec_of(every[number - 1]) for number in numbers)
        grid, block = tuple(launch.grid), tuple(launch.block)
        return Launched(facts, grid, block, launch.smem, launch.stream, params, maps)


def _spec_of(found: _Map) -> TensorMapSpec:
    rank = found.rank
    assert tuple(found.steps[:rank]) == (1,) * rank
    assert found.promotion == 2, "L2_128B"
    return TensorMapSpec(
        _MAP_DTYPES[found.dtype],
        tuple(found.sizes[:rank]),
        tuple(found.strides[: rank - 1]),
        tuple(found.box[:rank]),
        {0: 0, 1: 32, 2: 64, 3: 128}[found.swizzle],
    )


_BYTES = {"pointer": 8, "int64": 8, "int32": 4, "float32": 4, "tensormap": 128}


def places_of(facts: LaunchFacts) -> dict[str, int]:
    """The offset of each field in the parameter struct."""
    at, found = 0, {}
    for name, ctype in facts.params:
        at += -at % _BYTES[ctype]
        found[name] = at
        at += _BYTES[ctype]
    return found


def _padded_bytes(facts: LaunchFacts) -> int:
    name, at = max(places_of(facts).items(), key=lambda pair: pair[1])
    end = at + _BYTES[dict(facts.params)[name]]
    align = 128 if any(ctype == "tensormap" for _, ctype in facts.params) else 8
    return end + -end % align


def without_addresses(facts: LaunchFacts, params: bytes) -> bytes:
    """Parameters with 0 in place of tensor maps, and 1 in place of the caller's own buffers."""
    made = bytearray(params[: _padded_bytes(facts)])
    places = places_of(facts)
    for name, ctype in facts.params:
        at = places[name]
        if ctype == "tensormap":
            made[at : at + 128] = bytes(128)
        elif ctype == "pointer" and (name in OWN_BUFFERS or name[:2] in ("m_", "dc")):
            made[at : at + 8] = int(any(made[at : at + 8])).to_bytes(8, "little")
    return bytes(made)


def emulate(
    folder: Folder,
    launched: Launched,
    memory: Mapping[str, torch.Tensor],
    workspace: torch.Tensor,
) -> None:
    """Executes the PTX of a recorded launch with its parameters, on the memory of the process."""
    facts = launched.facts
    number = next(i for i, k in enumerate(folder.manifest.kernels) if k.facts is facts)
    by_address = {tensor.data_ptr(): tensor for tensor in memory.values()}
    places, maps = places_of(facts), iter(launched.maps)
    starts = sorted(
        int.from_bytes(launched.params[places[name] :][:8], "little")
        for name, ctype in facts.params
        if ctype == "pointer"
    )

    def pointed(address: int) -> Any:
        if not address:
            return None
        if address in by_address:
            return span(by_address[address])
        first, end = workspace.data_ptr(), workspace.data_ptr() + workspace.numel()
        assert first <= address < end, "a pointer is that of a tensor or inside of the workspace"
        following = [at for at in starts if address < at < end]
        last = min(following, default=end)
        return workspace[address - first : last - first].view(torch.float32).numpy()

    def argument(name: str, ctype: str) -> Any:
        raw = launched.params[places[name] :][: _BYTES[ctype]]
        if ctype == "tensormap":
            spec = next(maps)
            array = span(memory[name])
            options = {"dims": spec.dims, "strides": spec.strides, "dtype": spec.dtype}
            return emulator.TensorMap(array, spec.box, spec.swizzle, **options)
        if ctype == "pointer":
            return pointed(int.from_bytes(raw, "little"))
        kinds: Mapping[str, Any] = {"int64": np.int64, "int32": np.int32, "float32": np.float32}
        return np.frombuffer(raw, kinds[ctype])[0]

    structure = tuple(argument(name, ctype) for name, ctype in facts.params)
    kernel = folder.kernel(number)
    sizes: Sequence[tuple[int, ...]] = (launched.grid, launched.block)
    how = {"shared_bytes": launched.smem, "overlaps": facts.overlaps}
    emulator.launch(kernel.binary.ptx, facts.name, *sizes, [structure], **how)
