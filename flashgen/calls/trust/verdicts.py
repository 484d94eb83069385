"""Verdicts on code paths, in flashgen's records and from trials on this machine.

::

    proven.json                              records of `make gpu`, part of the package
    <cache folder>/trust/<key>.json          a verdict of this machine

`benchmarks/report.py --proven` writes the first file.
"""

from __future__ import annotations

import functools
import hashlib
import json
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path

from flashgen.calls.launch import Gpu
from flashgen.kernels.compile import nvrtc
from flashgen.kernels.compile.cache import TRUST, CacheWarning, replace_text, usable_root
from flashgen.kernels.compile.ownership import contents
from flashgen.shared.plain import from_plain, parsed, to_plain

PROVEN = Path(__file__).with_name("proven.json")


@dataclass(frozen=True)
class Subject:
    """The subject of a verdict: a code path on a model of GPU, with the makers of its kernels.

    Attributes:
        gpu: the model, such as "NVIDIA H200".
        driver: version of the driver.
        nvrtc: version of NVRTC.
        templates: digest of flashgen's templates.
        arch: the architecture, which names the code path.
    """

    gpu: str
    driver: str
    nvrtc: str
    templates: str
    arch: str

    @property
    def key(self) -> str:
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:24]


@dataclass(frozen=True)
class _StoredVerdict:
    subject: Subject
    failure: str


@dataclass(frozen=True)
class PathVerdict:
    """The outcome of a trial, or of the problems of `flashgen doctor`.

    Attributes:
        failure: the problem that failed and how; "" where all passed.
    """

    failure: str = ""

    @property
    def passed(self) -> bool:
        return not self.failure


def subject_of(gpu: Gpu, arch: str) -> Subject:
    """A code path on a GPU of this machine.

    Raises:
        CompileError: NVRTC is missing.
        RenderError: the templates are missing.
    """
    from flashgen.kernels.codegen.environment import template_digest

    return Subject(gpu.name, gpu.driver, nvrtc.version(), template_digest(), arch)


def is_proven(subject: Subject) -> bool:
    """Whether a record proves the code path on this model of GPU with these templates."""
    return (subject.gpu, subject.arch, subject.templates) in _proven(PROVEN)


@functools.cache
def _proven(file: Path) -> frozenset[tuple[str, str, str]]:
    entries = json.loads(file.read_text(encoding="utf-8"))["proven"]
    return frozenset((entry["gpu"], entry["arch"], entry["templates"]) for entry in entries)


_in_memory: dict[str, PathVerdict] = {}
"""Verdicts that cannot be kept on disk, by key."""


def read(subject: Subject) -> PathVerdict | None:
    """The remembered verdict; None where there is none or, with a CacheWarning, a damaged one."""
    path = _verdict_file(subject)
    if path is None or not path.exists():
        return _in_memory.get(subject.key)
    try:
        record = from_plain(_StoredVerdict, parsed(contents(path)))
        if record.subject == subject:
            return PathVerdict(record.failure)
        damage = "it is of another subject"
    except (OSError, ValueError) as error:
        damage = str(error)
    warnings.warn(f"{path.name} holds no verdict ({damage})", CacheWarning, stacklevel=2)
    return None


def write(subject: Subject, verdict: PathVerdict) -> None:
    """Keeps a verdict on disk, or where that is impossible in this process."""
    path, hindrance = _verdict_file(subject), None
    if path is not None:
        record = to_plain(_StoredVerdict(subject, verdict.failure))
        hindrance = replace_text(path, json.dumps(record, indent=1) + "\n")
    if path is None or hindrance is not None:
        _in_memory[subject.key] = verdict
    if hindrance is not None:
        note = f"the verdict on {subject.arch} cannot be stored: {hindrance}"
        warnings.warn(note, CacheWarning, stacklevel=2)


def forget() -> None:
    """Drops the verdicts in the memory of the process; those on disk stay."""
    _in_memory.clear()


def _verdict_file(subject: Subject) -> Path | None:
    root = usable_root()
    return None if root is None else root / TRUST / f"{subject.arch}.{subject.key}.json"
