"""The sentences of README.md, docs/index.md and docs/gpu.md that say which GPUs ran the kernels.

They follow from the records, from the code paths that these prove, and from the templates of this
checkout, and from nothing else.
"""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

from benchmarks.suite import proven
from benchmarks.suite.cases import ROOT
from benchmarks.suite.records import RESULTS, read
from flashgen.kernels.codegen.environment import template_digest

PAGES = tuple(ROOT / page for page in ("README.md", "docs/index.md", "docs/gpu.md"))
BEGIN = "<!-- status: written by `python benchmarks/report.py --status` -->"
END = "<!-- end of status -->"
NONE = "No GPU has run the kernels."


def block(results: Path = RESULTS, templates: str | None = None) -> str:
    """The text between the markers.

    Args:
        results: the folder of the records.
        templates: the digest of the templates that kernels are made from; the digest of
            this checkout by default.
    """
    rows = [row for row in read(results / "measures.csv") if row["device"] == "gpu"]
    days = {row["gpu"]: row["date"][:10] for row in sorted(rows, key=lambda row: row["date"])}
    if not days:
        return NONE
    now = templates or template_digest()
    entries = json.loads(proven.text(results))["proven"]
    paths = [f"{e['arch']} on {e['gpu']}" for e in entries if e["templates"] == now]
    ran = " and on ".join(f"one {gpu} ({day})" for gpu, day in sorted(days.items()))
    if paths:
        sentence = f"With the templates as they are now, the records prove {', '.join(paths)}."
    else:
        sentence = (
            "The templates have changed since, so that the records prove no present code path."
        )
    text = (
        f"Kernels ran on {ran}, and on no other GPU. {sentence} A GPU takes a code path that is "
        "not proven there after a trial in a child process."
    )
    return "\n".join(textwrap.wrap(text, 120))
