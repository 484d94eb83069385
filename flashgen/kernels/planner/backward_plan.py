"""The plan of a backward pass: the plans of its kernels, and the reasons for the choice."""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.kernels.planner.derivation import wrapped
from flashgen.kernels.planner.kernel_plan import Plan


@dataclass(frozen=True)
class BackwardPlan:
    """The kernels of a backward pass, and the reasons for the choice.

    Attributes:
        scheme: "fused": one kernel computes dK, dV and dQ and sums dQ by atomic additions in
            float32, which another kernel converts; "split": dQ has a kernel of its own, whose sums
            have a fixed order. "queries": only dQ is computed. "keys": only dK and dV are.
        deterministic: whether gradients must be bitwise reproducible: only "split" is, and of the
            kernels for learned tensors only "captured_exact".
        kernels: in launch order: ("delta", "dq") for queries alone, ("delta", "dkdv") for keys, or
            ("delta", "fused", "convert_dq") or ("delta", "dkdv", "dq"),
            followed by "captured" or "captured_exact" where the score reads learned tensors.
        notes: the predicted costs of both schemes, and the reason for the choice.
    """

    scheme: str
    deterministic: bool
    kernels: tuple[Plan, ...]
    notes: tuple[str, ...]

    @property
    def cost(self) -> float:
        """Predicted clocks of one SM per score element, without kernels whose cost is per row."""
        return sum(plan.cost * plan.launches for plan in self.kernels if not plan.streams)

    @property
    def key_plan(self) -> Plan:
        """The plan of the kernel that computes dK and dV: "fused" or "dkdv"."""
        return next(plan for plan in self.kernels if plan.owns_keys)

    def kernel(self, name: str) -> Plan:
        """The plan of one kernel.

        Raises:
            KeyError: this scheme has no kernel of that name.
        """
        for plan in self.kernels:
            if plan.kernel == name:
                return plan
        raise KeyError(name)

    def __str__(self) -> str:
        """The choice of the scheme, then each kernel's derivation; at most 97 columns."""
        return self.explain(details=False)

    def explain(self, *, details: bool = True) -> str:
        """The choice of the scheme and the derivations; ``details`` adds intermediate steps."""
        lines = [f"backward  scheme {self.scheme}"]
        for note in self.notes:
            lines += wrapped(note)
        return "\n".join([*lines, *(plan.explain(details=details) for plan in self.kernels)])
