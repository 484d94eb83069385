"""The manifest of an export: the contents of its folder, as frozen values with a JSON form.

::

    manifest.json     Manifest, with the digests of all other files
    kernels/          a .cu, a .ptx and a .cubin for each kernel
    NAME.h, NAME.c    the same launches for C, by the driver API

`flashgen.calls.export` writes it, and `flashgen.calls.exported.program` reads it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from flashgen.kernels.compile import Resources
from flashgen.shared.launch_facts import DecodingTile, LaunchFacts, column_ranges
from flashgen.shared.plain import from_plain, parsed, to_plain
from flashgen.shared.signature import CallSignature
from flashgen.shared.split_choice import ALL_SPLITS, RUNS

FORMAT = 9
"""The version of the manifest; another one is refused."""

RUNS_OF_PROGRAMS = (1, RUNS[-1], ALL_SPLITS)
"""The values of `ProgramRecord.run` where keys are split; the second serves every longer run."""

MANIFEST = "manifest.json"
KERNELS = "kernels"
LAYOUT_TABLE = "layout.bin"

_FILE = re.compile(
    rf"{KERNELS}/\w[\w.-]*\.(cu|ptx|cubin)|\w+\.[ch]|{re.escape(LAYOUT_TABLE)}", re.ASCII
)
"""The names that an export gives to its files: none leaves its folder."""


@dataclass(frozen=True)
class FileRecord:
    """A file of the folder.

    Attributes:
        sha256: the digest of its bytes, in hexadecimal.
        bytes: its size.
    """

    sha256: str
    bytes: int


@dataclass(frozen=True)
class KernelRecord:
    """A compiled kernel.

    Attributes:
        facts: the facts that launches need.
        stem: the name of its files in ``kernels/``, without their suffix.
        resources: registers, memory and size of the code, from the cubin.
        cuda: the major version of CUDA of its compiler, which the driver must have.
    """

    facts: LaunchFacts
    stem: str
    resources: Resources
    cuda: int


@dataclass(frozen=True)
class LayoutRecord:
    """A block layout.

    Attributes:
        block_q, block_k: queries and keys of a block.
        rows, columns: blocks of a table of a layout that is a function; 0 where each call gives
            the layout.
        table: the file of the table, a byte for each block, rows first; "" where there is none.
    """

    block_q: int
    block_k: int
    rows: int = 0
    columns: int = 0
    table: str = ""


@dataclass(frozen=True)
class ForwardRecord:
    """When a forward kernel serves a call.

    Attributes:
        drops: whether it drops elements of P.
        arch: its architecture.
        access_bytes: bytes per access to global memory.
        heads: query heads per tile.
        wide: whether integers of mask and score have 64 bits.
        kernel: its number in `Manifest.kernels`.
        tile: with split keys, its tile, which tells the time of a call; None without.
        few_rows: the rows of served calls that it has a tile for; 0 for calls with any number.
    """

    drops: bool
    arch: str
    access_bytes: int
    heads: int
    wide: bool
    kernel: int
    tile: DecodingTile | None = None
    few_rows: int = 0


@dataclass(frozen=True)
class BackwardRecord:
    """When backward kernels serve a call.

    Attributes:
        drops, arch, wide: as in `ForwardRecord`.
        learns: the learned tensors whose gradients they compute.
        deterministic: whether gradients have the same bits in every run.
        kernels: their numbers in `Manifest.kernels`, in the order of launches.
    """

    drops: bool
    learns: tuple[str, ...]
    arch: str
    deterministic: bool
    wide: bool
    kernels: tuple[int, ...]


class Pass(NamedTuple):
    """A pass of calls.

    Attributes:
        drops: whether the calls drop elements of P.
        learns: the learned tensors whose gradients are computed; () in a forward pass.
        backward, deterministic: the pass, and whether its gradients have the same bits in each run.
    """

    drops: bool
    learns: tuple[str, ...] = ()
    backward: bool = False
    deterministic: bool = False

    @property
    def name(self) -> str:
        """Its name in `CallProgram.columns_of_launch`."""
        return "deterministic" if self.deterministic else "backward" if self.backward else "forward"


@dataclass(frozen=True)
class PathRecord:
    """Which kernels compute a pass, where it is not one launch of the call's own architecture.

    Attributes:
        arch: the architecture of the call.
        is_open: whether it holds only for calls that name no architecture.
        of: the pass.
        taken: the architecture of the kernels: ``arch``, or the architecture of its fallback.
        columns: the number of columns of V that a launch computes: all, or a part.
        why: the reason for ``taken``, in words; "" where it is ``arch``.
    """

    arch: str
    is_open: bool
    of: Pass
    taken: str
    columns: int
    why: str


@dataclass(frozen=True)
class ProgramRecord:
    """The kernels of a spec, or of a variant of it, or of some columns of V of one of these.

    Attributes:
        offsets, part, packs: as in `calls.runtime.programs.Variant`; all empty for the spec.
        run: the neighbouring splits of a thread block, one of `RUNS_OF_PROGRAMS`: 1, also where
            keys are not split; `ALL_SPLITS`; or the longest of `split_choice.RUNS` for kernels to
            which each call gives their number.
        columns: the columns of V of launches that compute a part of them; 0 for all.
        digest: the digest of the spec, which completes the name of the operator where another spec
            has that name.
        signature: the arguments of calls; a block layout is in ``layout`` instead.
        narrow: sets of the least and the greatest value of each name in expressions, in each of
            which kernels with 32-bit integers serve; None where they serve every call.
        tables: by architecture, the kernels of the min/max tables.
        merge: by architecture, the kernel that merges results over split keys.
        no_backward: why there are no backward kernels: the four parts of an error; () otherwise.
        paths: the passes that one launch of kernels for the architecture does not compute.
        by_position: whether the mask depends on the positions of queries and of keys.
    """

    offsets: tuple[tuple[str, str], ...]
    part: tuple[str, ...]
    packs: bool
    run: int
    columns: int
    digest: str
    signature: CallSignature
    layout: LayoutRecord | None
    forward: tuple[ForwardRecord, ...]
    backward: tuple[BackwardRecord, ...]
    narrow: tuple[Mapping[str, tuple[int, int]], ...] | None
    tables: Mapping[str, tuple[int, ...]]
    merge: Mapping[str, int]
    no_backward: tuple[str, ...]
    paths: tuple[PathRecord, ...]
    by_position: bool

    @property
    def key(self) -> tuple[object, ...]:
        """For which calls it is."""
        return self.offsets, self.part, self.packs, self.run, self.columns

    @property
    def is_called(self) -> bool:
        """Whether it has the kernels of calls, and not of some of their launches."""
        return self.run == 1 and not self.columns

    @property
    def widths(self) -> Mapping[int, tuple[Pass, ...]]:
        """The passes that have launches for some columns of V, by the number of these columns."""
        passes: dict[int, tuple[Pass, ...]] = {}
        for path in self.paths:
            ranges = column_ranges(self.signature.head_dim_v, path.columns)
            for columns in {part.stop - part.start for part in ranges if len(ranges) > 1}:
                passes[columns] = (*passes.get(columns, ()), path.of)
        return passes

    def path_of(self, arch: str, pass_: Pass, *, is_open: bool) -> PathRecord | None:
        """The choice for a pass; None where it is one launch on the architecture of the call.

        Args:
            is_open: whether the call names no architecture.
        """
        fitting = (x for x in self.paths if (x.arch, x.of) == (arch, pass_))
        return next((x for x in fitting if is_open or not x.is_open), None)


@dataclass(frozen=True)
class Manifest:
    """An export.

    Attributes:
        flashgen, nvrtc: the versions that made it.
        command: the command that makes it again, which errors name.
        archs: the architectures for which calls have kernels.
        heads_gain: the factor of `flashgen.shared.launch_facts.heads_of_fewest_rows`.
        programs: the spec first, then its variants.
        files: every other file of the folder by its path.
    """

    flashgen: str
    nvrtc: str
    command: str
    archs: tuple[str, ...]
    heads_gain: float
    kernels: tuple[KernelRecord, ...]
    programs: tuple[ProgramRecord, ...]
    files: Mapping[str, FileRecord]

    def text(self) -> str:
        """The manifest as JSON, with its version and a digest of the rest."""
        data = to_plain(self)
        return json.dumps({"format": FORMAT, "sha256": digest_of(data), **data}, indent=1) + "\n"


@dataclass(frozen=True)
class StoredManifest:
    """The values of a manifest's JSON, of any version.

    Attributes:
        version: the version of the format.
        data: the fields of `Manifest`.
        is_whole: whether the digest is that of the fields.
        digest: the digest.
    """

    version: int
    data: dict[str, Any]
    is_whole: bool
    digest: str

    @property
    def files(self) -> dict[str, FileRecord]:
        """Every other file of the folder by its path.

        Raises:
            ValueError: the manifest does not say so, or names a file that no export writes.
        """
        records = from_plain(dict[str, FileRecord], self.data.get("files"))
        for name in records:
            if not _FILE.fullmatch(name):
                raise ValueError(f"no file of an export has the name {name!r:.80}")
        return records


def stored(text: bytes) -> StoredManifest:
    """The values of a manifest.

    Raises:
        ValueError: the text is not the JSON of an export.
    """
    data = parsed(text)
    if not isinstance(data, dict):
        raise ValueError("it is not a JSON object")
    version, digest = data.pop("format", None), data.pop("sha256", None)
    if type(version) is not int or type(digest) is not str:
        raise ValueError("it has no version and digest of an export")
    return StoredManifest(version, data, digest_of(data) == digest, digest)


def digest_of(data: Any) -> str:
    """The digest of a manifest's values, without its version and the digest itself.

    Raises:
        ValueError: the values are nested too deep.
    """
    try:
        text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    return hashlib.sha256(text.encode()).hexdigest()
