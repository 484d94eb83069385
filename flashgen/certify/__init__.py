"""Short proofs, by sympy, of what a plan and its kernels rest on.

Of the chosen plan: that its constraints hold for every length. Of the algorithm: how much it moves,
and that its softmax is exact. Of the spec: that the derivatives are those of its score function.
"""

from __future__ import annotations

from flashgen.analysis import analyse
from flashgen.arch import facts
from flashgen.certify import constraints, derivative, softmax, traffic
from flashgen.certify.value import Certificate, Step
from flashgen.errors import CertificateError
from flashgen.plan import plan, plan_backward
from flashgen.spec import AttentionSpec

__all__ = ["Certificate", "Step", "certify"]


def certify(
    spec: AttentionSpec,
    arch: str = "sm_80",
    *,
    sram: int | None = None,
    policy: str = "derived",
    deterministic: bool = False,
) -> tuple[Certificate, ...]:
    """The certificates of the forward and backward plans of ``spec``; all of them hold.

    Args: as for `flashgen.plan`.

    Raises:
        PlanError: no tile fits.
        CertificateError: a claim could not be proved; it shows the derivation.
    """
    forward = plan(spec, arch, sram=sram, policy=policy)
    backward = plan_backward(spec, arch, sram=sram, deterministic=deterministic)
    found = (
        *(constraints.constraints(each) for each in (forward, *backward.kernels)),
        traffic.tiled(),
        traffic.standard(),
        traffic.of_plan(forward, sram or facts(arch).smem_per_block),
        softmax.softmax(spec),
        derivative.derivatives(spec, analyse(spec)),
    )
    for each in found:
        if not each.holds:
            broken = next(step.text for step in each.steps if not step.holds)
            raise CertificateError(
                f"not proved: {each.claim}",
                where=f"spec {spec.name}, certificate {each.name}",
                numbers=str(each),
                way_out=f"look at the step that does not hold: {broken}",
            )
    return found
