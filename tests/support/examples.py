"""The run-time values with which tests run the specs of ``specs/``: the files' own examples."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import flashgen as fg
from flashgen.spec.language.spec import AttentionSpec
from flashgen.tools.cli.captured_tensors import tensor_values
from flashgen.tools.cli.inputs import Shape, example_scalars
from tests.support.paths import ROOT
from tests.support.shapes import Case

SPECS = sorted((ROOT / "specs").glob("*.py"))
SPEC_IDS = [path.stem for path in SPECS]

COVERING = {
    "causal": 0.0,
    "sliding_window": 0.0,
    "document": 0.0,
    "softcap": 0.0,
    "relative_bias": 0.0,
    "sink": 0.0,
    "packed_causal": 0.0,
    "full": 0.17,
    "block_sparse": 0.0,
}
"""Specs with every feature of a forward kernel between them, and their dropout."""


def spec_path(name: str) -> Path:
    return SPECS[SPEC_IDS.index(name)]


def fitted(spec: AttentionSpec, case: Case) -> Case:
    """The case with packed sequences one after another in one batch entry."""
    return replace(case, batch=1) if spec.packed else case


def values_of(
    path: Path, case: Case, device: Any = "cpu", q_offset: int = 0, k_offset: int = 0
) -> dict[str, Any]:
    """Arguments ``scalars`` and ``tensors`` of the run and reference functions."""
    sizes = Shape(case.batch, case.heads_q, case.heads_kv, case.seq_q, case.seq_k)
    tensors, _ = tensor_values(
        fg.load(path),
        str(path),
        sizes,
        q_offset=q_offset,
        k_offset=k_offset,
        seed=case.scores,
        device=str(device),
    )
    return {"scalars": dict(example_scalars(str(path))), "tensors": tensors}
