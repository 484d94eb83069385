"""Commands in this process, and a spec file that several tests give them."""

from __future__ import annotations

from typer.testing import CliRunner

from flashgen.tools.cli import app
from tests.support.paths import ROOT

CAUSAL = str(ROOT / "specs" / "causal.py")

WINDOWED = """
import flashgen as fg

window = fg.Scalar("window", "int32", minimum=1)
slope = fg.Scalar("slope", "float32")
{examples}

spec = fg.AttentionSpec(
    mask_mod=lambda b, h, q, k: (q >= k) & (q - k < window),
    score_mod=lambda score, b, h, q, k: score + slope * (k - q),
    head_dim=16,
)
"""


def flashgen(*arguments: str, **environment: str):
    return CliRunner().invoke(app, list(arguments), env=environment or None)


def rows(output: str) -> dict[str, str]:
    """The table that ``run`` and ``inspect`` print, by name."""
    pairs = (line.split(None, 1) for line in output.splitlines() if line.strip())
    return {pair[0]: pair[1] if len(pair) > 1 else "" for pair in pairs}
