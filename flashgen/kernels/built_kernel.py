"""A compiled kernel with the result of every stage, and the facts of its launches."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from flashgen.kernels.codegen import Source
from flashgen.kernels.compile import Binary
from flashgen.kernels.planner import Plan
from flashgen.kernels.planner.schedule import blocks_of
from flashgen.shared.call import CallRanges
from flashgen.shared.launch_facts import LaunchBlocks, LaunchFacts, ParamFacts
from flashgen.shared.signature import GradientTerm
from flashgen.spec.analysis import Analysis
from flashgen.spec.analysis.score import kind_of_sum
from flashgen.spec.language.symbols import B, H, K, Q


@dataclass(frozen=True)
class Build:
    """An emitted and compiled kernel, with the result of every stage."""

    analysis: Analysis
    source: Source
    binary: Binary

    @property
    def plan(self) -> Plan:
        return self.source.plan

    @functools.cached_property
    def facts(self) -> LaunchFacts:
        """What launches need of the plan, as plain values."""
        params = [ParamFacts(param.name, param.ctype) for param in self.source.params]
        terms = gradient_terms(self) if self.plan.kernel == "captured_exact" else ()
        return self.plan.launch_facts(self.source.name, params, terms)

    def blocks(
        self, work_tiles: int, sms: int | None = None, requested: int | None = None
    ) -> LaunchBlocks:
        """The blocks of a launch, as `shared.launch_facts.LaunchRules.blocks_of`, derived."""
        return blocks_of(self.plan, work_tiles, sms, requested)

    def integers(self, ranges: CallRanges) -> str:
        """The width of integers in a call, as `Source.integers`."""
        return self.source.integers(ranges)

    @property
    def ptx(self) -> str:
        return self.binary.ptx

    @property
    def cubin(self) -> bytes:
        return self.binary.cubin


def gradient_terms(build: Build) -> tuple[GradientTerm, ...]:
    """The elements of learned tensors to whose gradients a kernel adds, as plain values."""
    names = {B: "b", H: "h", Q: "q", K: "k"}
    return tuple(
        GradientTerm(
            element.tensor.name,
            kind_of_sum(element),
            tuple(names.get(index) for index in element.indices),
        )
        for element, _ in build.analysis.score.learned
    )
