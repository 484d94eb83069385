"""Short proofs with sympy of the claims on which a plan and its kernels depend.

For the chosen plan: that its constraints hold for every sequence length. For the algorithm: the
bytes that it moves, and that its softmax is exact. For the spec: that the derivatives are those of
its score function.
"""

from __future__ import annotations

from flashgen.kernels.planner import plan, plan_backward
from flashgen.kernels.planner.proofs import (
    algorithm,
    plan_constraints,
    score_derivative,
)
from flashgen.kernels.planner.proofs.certificate import Certificate, ProofStep
from flashgen.shared.arch import facts
from flashgen.shared.errors import CertificateError
from flashgen.spec.analysis import analyse
from flashgen.spec.language.chosen_specs import spec_of_kernels
from flashgen.spec.language.spec import AttentionSpec

__all__ = ["Certificate", "ProofStep", "certify"]


def certify(
    spec: AttentionSpec,
    arch: str = "sm_80",
    *,
    sram: int | None = None,
    policy: str = "derived",
    deterministic: bool = False,
) -> tuple[Certificate, ...]:
    """The certificates of the forward and backward plans of ``spec``; all of them hold.

    Calls with paged caches have no backward plan, and with lists of blocks none of their own.

    Args:
        arch, sram, policy: as for `flashgen.kernels.planner.plan`.
        deterministic: as for `flashgen.kernels.planner.plan_backward`.

    Raises:
        PlanError: no tile fits.
        CertificateError: a claim could not be proved; the error shows the derivation.
    """
    forward = plan(spec, arch, sram=sram, policy=policy)
    plans = [forward]
    if not spec_of_kernels(spec).paged:
        plans += plan_backward(spec, arch, sram=sram, deterministic=deterministic).kernels
    certificates = (
        *map(plan_constraints.certify_constraints, plans),
        algorithm.certify_tiled(),
        algorithm.certify_standard(),
        algorithm.certify_plan(forward, sram or facts(arch).smem_per_block),
        algorithm.certify_softmax(spec),
        score_derivative.certify_derivatives(spec, analyse(spec)),
    )
    for certificate in certificates:
        if not certificate.holds:
            broken = next(step.text for step in certificate.steps if not step.holds)
            raise CertificateError(
                f"not proved: {certificate.claim}",
                where=f"spec {spec.name}, certificate {certificate.name}",
                numbers=str(certificate),
                way_out=f"look at the step that does not hold: {broken}",
            )
    return certificates
