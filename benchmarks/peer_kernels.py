"""Executes FlashAttention-4's kernels for Hopper in the emulator, beside flashgen's.

    python benchmarks/peer_kernels.py [--length 320] [--head-dims 64 128]

The packages of the archive "fa4" (`benchmarks/peers.py`) and einops compile the kernels without a
GPU. This file knows their parameters, for flash-attn-4 4.0.0b36 alone; the emulator knows PTX. Each
row has the largest errors of O, dQ, dK and dV beside float64, and what the forward kernel and the
largest backward one take: instructions of PTX for each score of length x length, and wavefronts of
shared memory for a thousand of them. The machine has fewer instructions than PTX.

The emulator reports two habits of these kernels that hardware forgives, and that are allowed here:
arrivals at a named barrier that nothing waits for, and rows that two blocks write alike.
"""

from __future__ import annotations

import argparse
import importlib
import math
import os
import re
import sys
import tempfile
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import torch  # noqa: E402

import flashgen as fg  # noqa: E402
from flashgen import emulator  # noqa: E402

FORGIVEN = ("barrier_left_incomplete", "same_value")
HEADS = 2
KERNELS = ("fwd_sm90", "bwd_pre", "bwd_sm90", "bwd_post")
"""In the names of the kernels of both passes, in the order of their launches."""
KEYS, QUERIES = 128, {64: 192, 128: 128}
"""Keys of a tile, and queries of a forward tile by head dim."""
STEPS = {(64, False): 128, (64, True): 128, (128, False): 80, (128, True): 64}
"""Queries of a step of the backward kernel, by head dim and whether the mask is causal."""

Tensor = torch.Tensor
Int, Long = np.int32, np.int64


class Work(NamedTuple):
    """What a kernel executes for each score."""

    instructions: float
    wavefronts: float

    @staticmethod
    def from_counters(counters: Any, scores: int) -> Work:
        total = counters.total()
        return Work(total.warp_instructions * 32 / scores, total.wavefronts * 1000 / scores)


class Results(NamedTuple):
    out: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    forward: Work
    backward: Work


class Problem(NamedTuple):
    """Operands of one call, [1, heads, length, head_dim] in bfloat16."""

    causal: bool
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.q.shape[3])

    @property
    def scores(self) -> int:
        return HEADS * self.q.shape[2] ** 2

    def reference(self) -> tuple[Tensor, tuple[Tensor, ...]]:
        """LSE, and O, dQ, dK and dV, in float64."""
        q, k, v = (x.double().requires_grad_() for x in (self.q, self.k, self.v))
        s = q @ k.mT * self.scale
        if self.causal:
            s = s.masked_fill(torch.ones(s.shape[2:]).triu(1).bool(), -math.inf)
        out = s.softmax(3) @ v
        gradients = torch.autograd.grad(out, (q, k, v), self.dout.double())
        return s.logsumexp(3).detach(), (out.detach(), *gradients)


def import_package() -> Any:
    """`flash_attn.cute.interface`, which also needs a module triton, if only to be imported."""
    importlib.import_module("torch._inductor.standalone_compile")  # it looks for triton itself
    try:
        importlib.import_module("triton")
    except ImportError:
        sys.modules["triton"] = _Anything("triton")
    return importlib.import_module("flash_attn.cute.interface")


class _Anything(types.ModuleType):
    """A module that has every attribute, each of which is a class that decorates by itself."""

    __version__ = "0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return arguments[0] if arguments and callable(arguments[0]) else self

    def __mro_entries__(self, bases: Any) -> tuple[type, ...]:
        return ()


def compiled(interface: Any, folder: Path, head_dim: int, *, causal: bool) -> dict[str, str]:
    """The PTX of the kernels of both passes, by the names of `KERNELS`."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        shape = (2, 4096, 16, head_dim)
        q, k, v, out = (torch.empty(shape, dtype=torch.bfloat16, device="cuda") for _ in range(4))
        _, lse, *_ = interface._flash_attn_fwd(q, k, v, causal=causal, return_lse=True)
        interface._flash_attn_bwd(q, k, v, out, torch.empty_like(out), lse, causal=causal)
    # A kernel that another mask needs too is compiled once.
    paths = {name: list(folder.glob(f"*flash_{name}*.ptx")) for name in KERNELS}
    latest = {
        name: max(every, key=lambda path: path.stat().st_mtime_ns) for name, every in paths.items()
    }
    return {name: path.read_text() for name, path in latest.items()}


def launch(ptx: str, grid: Sequence[int], args: Sequence[Any]) -> Any:
    name, threads = (re.search(text, ptx) for text in (r"\.entry\s+([\w$]+)", r"\.reqntid (\d+)"))
    assert name is not None, "PTX of one kernel"
    assert threads is not None, "a kernel of the CuTe DSL names its threads"
    size = 232448 if "__dynamic_shmem__" in ptx else 0
    return emulator.launch(
        ptx, name[1], grid, int(threads[1]), args, size, allow=FORGIVEN, profile=True
    )


def divisor(number: int) -> list[Any]:
    """The numbers by which these kernels divide (Granlund and Montgomery, 1994), and ``number``."""
    bits = (number - 1).bit_length()
    factor = (2**32 * (2**bits - number)) // number + 1
    shifts = np.uint8(min(bits, 1)), np.uint8(max(bits - 1, 0))
    return [(Int(number), np.uint32(factor % 2**32), *shifts), Int(number)]


class Peer:
    """FlashAttention-4's kernels and their parameters."""

    def __init__(self, ptx: dict[str, str], problem: Problem) -> None:
        self.ptx, self.problem = ptx, problem
        self.length, self.head_dim = problem.q.shape[2:]
        self.sizes = Int(self.length), Int(self.head_dim), Int(HEADS), Int(1)

    def rows(self, x: np.ndarray) -> tuple[Any, ...]:
        """A tensor [1, length, heads, head_dim]: its address, sizes and strides."""
        _, length, heads, _ = (Long(stride // x.itemsize) for stride in x.strides)
        return (x, *self.sizes, length, heads, Long(x.size))

    def numbers(self, x: np.ndarray) -> tuple[Any, ...]:
        """Numbers of each row, [1, heads, n]."""
        return x, Int(x.shape[2]), Int(HEADS), Int(1), Long(x.shape[2]), Long(x.size)

    def tensor_map(self, x: np.ndarray, rows: int) -> emulator.TensorMap:
        dims = (self.head_dim, self.length, HEADS, 1)
        strides = (x.strides[1], x.strides[2], x.nbytes)
        return emulator.TensorMap(
            x, (64, rows, 1, 1), 128, dims=dims, strides=strides, dtype="bfloat16"
        )

    def results(self, lse: Tensor, out: Tensor) -> Results:
        """Both passes, the backward one of the given O and LSE."""
        problem = self.problem
        q, k, v, dout, out_bits = map(_bits, (*problem[1:], out.bfloat16()))
        own_out, dq, dk, dv = (np.zeros_like(q) for _ in range(4))
        scales = np.float32(problem.scale / math.log(2)), np.float32(problem.scale)
        forward = self._forward((q, k, v, own_out), scales[0])

        step = STEPS[self.head_dim, problem.causal]
        tiles, padded = -(-self.length // step), -(-self.length // step) * step
        delta, log2, sums = (
            np.zeros((1, HEADS, padded * columns), np.float32) for columns in (1, 1, self.head_dim)
        )
        own_lse = lse.float().numpy()
        row_arguments = [
            self.rows(out_bits),
            self.rows(dout),
            *map(self.numbers, (delta, own_lse, log2)),
        ]
        grid_arguments = [Int(tiles), Int(HEADS), Int(1), *divisor(1)]
        args = [*row_arguments, self.numbers(sums), scales[1], *grid_arguments]
        launch(self.ptx["bwd_pre"], (tiles, HEADS, 1), args)
        blocks = -(-self.length // KEYS)
        maps = [self.tensor_map(x, n) for x, n in ((q, step), (k, KEYS), (v, KEYS), (dout, step))]
        maps += [self.tensor_map(x, KEYS) for x in (dk, dv)]
        backward = launch(
            self.ptx["bwd_sm90"],
            (blocks, HEADS, 1),
            [
                *([self.sizes] * 6),
                *maps,
                *map(self.numbers, (log2, delta, sums)),
                *([np.int8(0)] * 4),
                *scales,
                *(Int(blocks), Int(HEADS), Int(1), *divisor(1)),
            ],
        )
        sum_arguments = (
            sums,
            Int(1),
            Int(HEADS),
            Int(sums.shape[2]),
            Long(sums.size),
            Long(sums.shape[2]),
        )
        rows, heads = (Long(stride // dq.itemsize) for stride in dq.strides[1:3])
        dq_arguments = (
            dq,
            Int(1),
            self.sizes[0],
            Int(HEADS),
            self.sizes[1],
            Long(dq.size),
            rows,
            heads,
        )
        launch(
            self.ptx["bwd_post"],
            (tiles, HEADS, 1),
            [sum_arguments, dq_arguments, scales[1], np.int8(0), *grid_arguments],
        )
        works = (Work.from_counters(counters, problem.scores) for counters in (forward, backward))
        return Results(*map(_values, (own_out, dq, dk, dv)), *works)

    def _forward(self, operands: Sequence[np.ndarray], scale: Any) -> Any:
        rows = QUERIES[self.head_dim]
        tiles = -(-self.length // rows)
        lse = np.zeros((1, HEADS, self.length), np.float32)
        tiles_of = (rows, KEYS, KEYS, rows)
        maps = [self.tensor_map(x, n) for x, n in zip(operands, tiles_of, strict=True)]
        args = [*[self.sizes] * 4, self.numbers(lse), *maps, scale, np.int8(0), np.int8(0)]
        if not self.problem.causal:
            args += [Int(tiles), Int(HEADS), Int(1), *divisor(1)]
            return launch(self.ptx["fwd_sm90"], (tiles, HEADS, 1), args)
        # The heads whose K and V fit in 50 MiB of L2, a power of two, come one after the other.
        fit = 50 * 2**20 // (4 * self.length * self.head_dim)
        heads = 1 << max(fit, 1).bit_length() - 1
        args += [Int(tiles * HEADS), Int(tiles), Int(HEADS), Int(1), Int(heads), *divisor(HEADS)]
        args += [*divisor(heads), *divisor(heads * tiles), *divisor(max(HEADS % heads, 1))]
        args += [Int(HEADS // heads), *divisor(1)]
        return launch(self.ptx["fwd_sm90"], (tiles * HEADS, 1, 1), args)


def _bits(x: Tensor) -> np.ndarray:
    """[1, heads, length, head_dim] as the bits of [1, length, heads, head_dim]."""
    return x.detach().transpose(1, 2).contiguous().view(torch.uint16).numpy()


def _values(bits: np.ndarray) -> Tensor:
    return torch.from_numpy(bits).view(torch.bfloat16).transpose(1, 2)


def own_results(problem: Problem) -> Results:
    """The same of flashgen."""
    mask = (lambda b, h, q, k: k <= q) if problem.causal else None
    head_dim = problem.q.shape[3]
    op = fg.attention(fg.AttentionSpec(mask_mod=mask, head_dim=head_dim, dtype="bfloat16"))
    leaves = [x.clone().requires_grad_() for x in (problem.q, problem.k, problem.v)]
    with emulator.profiling() as launches:
        out = op(*leaves, backend="emulator", arch="sm_90a")
        gradients = torch.autograd.grad(out, leaves, problem.dout)
    works = {launch.kernel: Work.from_counters(launch, problem.scores) for launch in launches}
    forward, backward = (
        next(work for name, work in works.items() if f"_{kernel}_" in name)
        for kernel in ("forward", "fused")
    )
    return Results(out.detach(), *gradients, forward, backward)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--length", type=int, default=320, help="queries and keys")
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128], choices=QUERIES)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        os.environ |= {
            "FLASH_ATTENTION_ARCH": "sm_90",
            "FLASH_ATTENTION_NUM_SMS": "132",
            "CUTE_DSL_ARCH": "sm_90a",
            "CUTE_DSL_KEEP_PTX": "1",
            "CUTE_DSL_DUMP_DIR": name,
        }
        try:
            interface = import_package()
        except ImportError as error:
            sys.exit(f"FlashAttention-4 cannot be imported: {error}; see benchmarks/peers.py")
        print("| head dim | mask | kernels of | O | dQ | dK | dV | forward | backward |")
        print("| --- " * 9 + "|")
        for head_dim in options.head_dims:
            for causal in (False, True):
                generator = torch.Generator().manual_seed(0)
                shape = (1, HEADS, options.length, head_dim)
                operands = (torch.randn(shape, generator=generator).bfloat16() for _ in range(4))
                problem = Problem(causal, *operands)
                lse, expected = problem.reference()
                ptx = compiled(interface, Path(name), head_dim, causal=causal)
                every = {"FlashAttention-4": Peer(ptx, problem).results(lse, expected[0])}
                every["flashgen"] = own_results(problem)
                for whose, results in every.items():
                    errors = [
                        f"{(x.double() - y).abs().max():.4f}"
                        for x, y in zip(results[:4], expected, strict=True)
                    ]
                    works = [f"{x.instructions:.1f}, {x.wavefronts:.0f}" for x in results[4:]]
                    mask = "causal" if causal else "full"
                    print("| " + " | ".join([str(head_dim), mask, whose, *errors, *works]) + " |")


if __name__ == "__main__":
    main()
