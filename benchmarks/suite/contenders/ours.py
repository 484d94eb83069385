"""flashgen: one contender per code path, and one with bitwise reproducible gradients."""

from __future__ import annotations

import functools
from typing import Any

import flashgen as fg
from benchmarks.suite.cases import ROOT, Case
from benchmarks.suite.contenders import Prepared, Tensor, learned, passes_of
from benchmarks.suite.contenders.libraries import named
from benchmarks.suite.device import Device
from benchmarks.variants import ADDED
from flashgen.kernels.planner import Plan
from flashgen.shared.arch import facts


class Flashgen:
    ours = True

    def __init__(self, arch: str, *, deterministic: bool = False) -> None:
        self.name = f"flashgen {facts(arch).path}" + (" deterministic" if deterministic else "")
        self.arch = arch
        self.deterministic = deterministic

    def library(self, device: Device) -> str:
        return named("flashgen")

    def supports(self, case: Case, device: Device) -> str | None:
        return None

    def prepare(self, case: Case, device: Device) -> Prepared:
        op, captured = fg.attention(spec_of(case)), case.tensors(device.torch)
        options: dict[str, Any] = {
            "backend": device.backend,
            "arch": self.arch,
            "deterministic": self.deterministic,
            **dict(case.scalars),
            **captured,
        }

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return op(q, k, v, **options)

        def undropped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return op(q, k, v, **{**options, "dropout_p": 0.0})

        def described() -> tuple[str, str]:
            reports = [report for report in (op.report, *op.backward_reports) if report]
            plans = [report.kernel.plan for report in reports if report.kernel is not None]
            path = plans[0].path if plans else ""
            return path, "; ".join(map(in_short, plans))

        return Prepared(
            attend,
            passes_of(case, deterministic=self.deterministic),
            described=described,
            learned=learned(captured),
            undropped=undropped if case.mods.dropout else None,
        )


def flashgens(device: Device) -> list[Flashgen]:
    """Every code path that serves this device, and the deterministic mode of each."""
    return [Flashgen(arch, deterministic=d) for arch in device.archs for d in (False, True)]


@functools.cache
def spec_of(case: Case) -> fg.AttentionSpec:
    """The spec of a case, with its dtype and head dims; of several where its name has a +."""
    first, *more = case.spec.split("+")
    changes: dict[str, Any] = {"head_dim": case.head_dim, "head_dim_v": case.head_dim_v}
    for name in more:
        if name == "dropout":
            changes["dropout"] = True
        elif name in ADDED:
            changes[name] = getattr(_loaded(name), name)
        else:
            changes["score_mod"] = _loaded(name).score_mod
    return _loaded(first).replace(dtype=case.dtype, **changes)


def _loaded(name: str) -> fg.AttentionSpec:
    return fg.load(ROOT / "specs" / f"{name}.py")


def in_short(plan: Plan) -> str:
    """A plan in a few characters for a column of a table."""
    return (
        f"{plan.kernel} {plan.block_q}x{plan.block_k} {plan.warps} warps {plan.stages} stages "
        f"{plan.blocks_per_sm} blocks/SM"
    )
