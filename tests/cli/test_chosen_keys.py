"""Commands on a spec whose queries choose their keys: what they show, and what they refuse."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.commands import flashgen, rows

CHOSEN = """
import flashgen as fg

spec = fg.AttentionSpec(
    lambda b, h, q, k: q >= k,
    head_dim=16,
    block_sparse=fg.BlockSparse(block_q=1, block_k=16, heads="kv"),
)
paged = spec.replace(paged=True, name="paged")
"""


@pytest.fixture
def chosen(tmp_path: Path) -> str:
    file = tmp_path / "chosen.py"
    file.write_text(CHOSEN)
    return str(file)


def test_emit_writes_the_kernels_of_o(chosen: str, tmp_path: Path) -> None:
    for spec, name in ((chosen, "chosen"), (f"{chosen}:paged", "paged")):
        folder = tmp_path / name
        result = flashgen("emit", spec, "-o", str(folder))
        assert result.exit_code == 0, result.output
        kernels = ("minmax_listed_blocks_1", "forward_fp16_d16", "split_forward_fp16_d16")
        files = {f"{name}_by_groups_{kernel}_sm_80.cu" for kernel in kernels}
        assert {path.name for path in folder.iterdir()} == files


@pytest.mark.parametrize("spec", ["spec", "paged"])
def test_the_plan_of_o_is_certified(chosen: str, spec: str) -> None:
    result = flashgen("plan", f"{chosen}:{spec}", "--certify")
    assert result.exit_code == 0, result.output
    assert "NOT PROVED" not in result.stdout


@pytest.mark.slow
def test_run_compares_the_gradients(chosen: str) -> None:
    result = flashgen("run", chosen, "--backward", "--shape", "1,4,2,9,40", "--backend", "emulator")
    assert result.exit_code == 0, result.output
    table = rows(result.stdout)
    assert all(table[name].startswith("pass") for name in ("out", "lse", "dq", "dk", "dv"))


@pytest.mark.parametrize(
    "command",
    [
        ("plan", "--backward"),
        ("plan", "--tangent"),
        ("plan", "--decode", "--page", "16", "--shape", "1,4,2,1,40"),
        ("plan", "--shape", "1,4,2,9,40"),
        ("inspect", "--kernel", "backward_dq"),
        ("profile", "--shape", "1,4,2,9,40"),
    ],
    ids=" ".join,
)
def test_what_one_kernel_does_not_compute_is_refused_as_such(
    chosen: str, command: tuple[str, ...]
) -> None:
    result = flashgen(command[0], chosen, *command[1:])
    assert result.exit_code == 2
    assert "several" in result.output
    assert "paged cache" not in result.output.partition("try")[0]
