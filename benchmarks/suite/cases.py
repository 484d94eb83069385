"""The problems that are timed, most important first, and their operations and bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.variants import FORMS, Form, Mods, form_of
from flashgen.shared.dtypes import ITEMSIZE

ROOT = Path(__file__).resolve().parents[2]
PASSES = ("forward", "backward", "both")

WINDOWED = "symmetric_window"
"""The spec of the part "sparsity"."""


@dataclass(frozen=True)
class Case:
    """One problem.

    Attributes:
        group: the name of the group of shapes.
        spec: name of a file in specs/, or several that are one: `benchmarks.variants.form_of`.
        scalars: the spec's run-time scalars, (name, value).
        key: whether the case is one of the few shapes for contenders that compile slowly.
        main: whether it is one of the very few for contenders that compile for a minute.
        dim_v: head dim of v and the output where it is not `head_dim`.
    """

    group: str
    spec: str
    batch: int
    heads_q: int
    heads_kv: int
    seq_q: int
    seq_k: int
    head_dim: int
    dtype: str = "bfloat16"
    scalars: tuple[tuple[str, Any], ...] = ()
    key: bool = False
    main: bool = False
    dim_v: int | None = None

    @property
    def head_dim_v(self) -> int:
        return self.head_dim if self.dim_v is None else self.dim_v

    @property
    def id(self) -> str:
        heads = f"{self.heads_q}h{self.heads_kv}"
        scalars = "".join(f"-{name}{value}" for name, value in self.scalars)
        length = f"{self.seq_q}x{self.seq_k}"
        dims = f"{self.head_dim}" + (f"v{self.dim_v}" if self.dim_v else "")
        return f"{self.spec}-b{self.batch}-{heads}-{length}-d{dims}-{self.dtype}{scalars}"

    def tensors(self, device: torch.device) -> dict[str, torch.Tensor]:
        """New captured tensors of the spec, always with the same values; learned ones
        require gradients."""
        tensors = form_of(self.spec).tensors(self.batch, self.seq_k, self.heads_q)
        on_device = {name: tensor.to(device) for name, tensor in tensors.items()}
        return {name: t.requires_grad_(t.is_floating_point()) for name, t in on_device.items()}

    def numbers(self, device: torch.device) -> dict[str, torch.Tensor]:
        """The scalars as tensors, so that no library compiles them into a kernel."""
        return {name: torch.tensor(value, device=device) for name, value in self.scalars}

    def mods_of(self, values: Mapping[str, Any]) -> Mods:
        """Mask and score in torch, of these scalars and captured tensors."""
        return form_of(self.spec).mods(self.seq_q, self.seq_k, self.heads_q, values)

    @property
    def mods(self) -> Mods:
        """The same with Python's numbers, and tensors on the CPU."""
        return self.mods_of({**dict(self.scalars), **self.tensors(torch.device("cpu"))})

    @property
    def scores(self) -> int:
        """Elements of S, masked ones too."""
        return self.batch * self.heads_q * self.seq_q * self.seq_k

    @property
    def bytes(self) -> int:
        """Bytes of q, k, v and the output, each counted once."""
        rows = self.heads_q * self.seq_q + self.heads_kv * self.seq_k
        return self.batch * rows * (self.head_dim + self.head_dim_v) * ITEMSIZE[self.dtype]


def flops(pass_: str, live: int, head_dim: int, head_dim_v: int | None = None) -> int:
    """Floating-point operations of a pass by the usual convention.

    Two per multiply-add of the matrix products, over the elements of S that the mask keeps:
    2 (d + d_v) forward and 2 (3 d + 2 d_v) backward per element, so backward is 2.5 times forward
    where d = d_v. Recomputation, softmax and tiles computed in vain do not count.
    """
    d, d_v = head_dim, head_dim if head_dim_v is None else head_dim_v
    forward, backward = 2 * (d + d_v), 2 * (3 * d + 2 * d_v)
    return live * {"forward": forward, "backward": backward, "both": forward + backward}[pass_]


def make(group: str, spec: str, *sizes: int, **options: Any) -> Case:
    """A case with the scalars of the spec's form; sizes as in Case, batch to head_dim."""
    form: Form = form_of(spec)
    defaults = form.scalars(sizes[4])
    scalars = tuple(sorted((name, options.pop(name, value)) for name, value in defaults.items()))
    return Case(group, spec, *sizes, scalars=scalars, **options)


def grid(spec: str, seq: int, head_dim: int, **options: Any) -> Case:
    """FlashAttention's shapes: 16k tokens, heads * head_dim = 2048, or a little less."""
    heads = 2048 // head_dim
    return make("grid", spec, 16384 // seq, heads, heads, seq, seq, head_dim, **options)


def llama(spec: str, seq: int, **options: Any) -> Case:
    """Llama 3.1 70B: 64 query heads, 8 key heads, head_dim 128."""
    return make("llama", spec, 1, 64, 8, seq, seq, 128, **options)


def decode(seq_k: int, batch: int = 8) -> Case:
    """One new query per sequence, heads of Llama 3.1 8B."""
    return make("decode", "full", batch, 32, 8, 1, seq_k, 128)


def models() -> list[Case]:
    """What layers of published models compute, with their heads and head dims."""
    main = {"key": True, "main": True}
    return [
        make("model", "sliding_window+sink", 1, 64, 8, 8192, 8192, 64, **main, window=128),
        make("model", "sliding_window+softcap", 1, 16, 8, 8192, 8192, 256, **main, window=4096),
        make("model", "causal", 1, 16, 16, 8192, 8192, 192, dim_v=128, key=True),  # DeepSeek V3
        make("model", "packed_causal", 2, 16, 16, 8192, 8192, 128, **main),
        make("model", "variable_length", 1, 16, 16, 16384, 16384, 128, key=True),
        make("model", "causal+dropout", 2, 16, 16, 8192, 8192, 128),
        make("model", "relative_bias", 2, 16, 16, 4096, 4096, 64, key=True),
        make("model", "causal+alibi", 2, 16, 16, 8192, 8192, 128, key=True),
    ]


def spec_names() -> list[str]:
    """Names of all files in specs/ that `FORMS` has in torch."""
    return [name for name in all_spec_names() if name in FORMS]


def all_spec_names() -> list[str]:
    return sorted(path.stem for path in (ROOT / "specs").glob("*.py"))


def full_list() -> list[Case]:
    """Every case, most important first, each once."""
    first: dict[str, Case] = {}
    for case in _in_order():
        first.setdefault(case.id, case)
    return list(first.values())


def _in_order() -> Iterator[Case]:
    yield llama("causal", 8192, key=True, main=True)
    yield grid("causal", 8192, 128, key=True)
    yield grid("full", 8192, 128, key=True)
    yield grid("causal", 8192, 64, key=True)
    yield make("gpt2-medium", "causal", 64, 16, 16, 1024, 1024, 64)
    for batch, seq_k in ((8, 131072), (1, 131072), (8, 8192), (1, 8192), (2, 32768)):
        yield decode(seq_k, batch)
    yield from models()[:3]
    for spec in ("causal", "full"):
        yield grid(spec, 8192, 256)
    yield from models()[3:]
    # What has no record: lengths from 512 to 4,096, head dims, float16.
    for seq in (4096, 2048, 512):
        yield grid("causal", seq, 128)
    yield grid("full", 8192, 64)
    for spec in ("causal", "full"):
        yield grid(spec, 8192, 96)
    yield grid("causal", 8192, 128, dtype="float16")
    for seq in (2048, 4096, 32768):
        yield llama("causal", seq)
    # Windows and caps first among the variants; then block layouts, whose tiles are mixed.
    first = ("sliding_window", "softcap", "alibi", "bigbird", "local_global", "butterfly")
    for name in sorted(spec_names(), key=lambda n: first.index(n) if n in first else len(first)):
        if name not in ("full", "causal"):
            yield make("variant", name, 2, 16, 16, 8192, 8192, 128, key=True)
    for seq in (16384, 4096, 2048, 32768, 8192):
        yield llama("causal", seq)
        yield llama("full", seq)
    for seq_k in (32768, 1024, 4096, 16384, 65536, 2048):
        yield decode(seq_k)
        yield decode(seq_k, 1)
    for head_dim in (128, 64, 256):
        for seq in (8192, 4096, 16384, 2048, 1024, 512):
            yield grid("causal", seq, head_dim)
            yield grid("full", seq, head_dim)


def tiny_list() -> list[Case]:
    """The smallest possible case of each group, for a dry run.

    Not every spec is included: other tests check the specs and their forms in torch.
    """
    return [
        make("llama", "causal", 1, 2, 1, 64, 64, 32, key=True),
        make("decode", "full", 1, 2, 1, 1, 80, 64),
        make("grid", "full", 1, 1, 1, 64, 64, 32, dtype="float16"),
        make("variant", "sliding_window", 1, 1, 1, 64, 64, 32, key=True),
        make("model", "causal+alibi", 1, 1, 1, 32, 32, 16, key=True),
        make("model", "sliding_window+sink", 1, 2, 1, 32, 32, 16, key=True, window=9),
        make("model", "variable_length", 1, 1, 1, 48, 48, 16, key=True),
        make("model", "causal+dropout", 1, 1, 1, 32, 32, 16, dim_v=8),
    ]


def windowed(case: Case, window: int) -> Case:
    return replace(case, group="sparsity", spec=WINDOWED, scalars=(("window", window),))
