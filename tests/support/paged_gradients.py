"""Gradients of q in calls with a paged cache, and those of the contiguous calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from flashgen import reference
from flashgen.calls.ops import run_forward
from flashgen.calls.runtime.backward import prepare_queries
from flashgen.calls.runtime.calls import _call_of
from flashgen.calls.runtime.prepared_call import DerivativeOutcome
from flashgen.shared.call import CallOptions, LaunchOptions, OutputGradients
from tests.support.judged import normal
from tests.support.paged_calls import Paged

Tensor = torch.Tensor


@dataclass(frozen=True)
class PagedGradient:
    """A call with a paged cache and random gradients of its results.

    Attributes:
        of: the forward call; its ``how`` has the backend and the architecture.
        q_offset: the positions of the first queries, by sequence; None: the last ones.
    """

    of: Paged
    q_offset: tuple[int, ...] | None = None

    def outputs(self, operands: tuple[Tensor, ...], tensors: Mapping[str, Tensor]) -> Any:
        """Out, LSE and their gradients, by the tiled algorithm; in float32 by the kernel, because
        the errors of two LSE show in the gradients."""
        q, k, v = operands
        spec, own = self.of.spec, {"backend": "emulator", "arch": self.of.how.get("arch")}
        how = own if spec.dtype == "float32" else {"backend": "tiled"}
        numbers = {**self.of.numbers, **self._offsets()}
        run = run_forward(spec, q, k, v, **{**numbers, "tensors": tensors}, **how)
        dout = normal(run.out.shape, q.dtype, 1)
        dlse = normal(run.lse.shape, torch.float32, 2) if spec.is_softmax else None
        return OutputGradients(run.out, run.lse, dout, dlse)

    def _offsets(self) -> dict[str, Tensor]:
        if self.q_offset is None:
            return {}
        return {"q_offset": torch.tensor(self.q_offset, dtype=torch.int32)}

    def run(
        self,
        changes: Mapping[str, Tensor] | None = None,
        seed: int = 0,
        launch: LaunchOptions | None = None,
        **how: Any,
    ) -> tuple[Tensor, OutputGradients, DerivativeOutcome]:
        """dq, the results with their gradients, and the record.

        Args:
            changes: captured tensors of the backward call that differ from the forward call.
            seed: of the permutation of pages.
        """
        q, k, v, tables = self.of.operands(seed)
        if self.of.spec.shared_kv:
            v = k[..., : self.of.spec.head_dim_v]
        tensors = {**self.of.numbers.get("tensors", {}), **tables}
        outputs = self.outputs((q, k, v), tensors)
        given = {"backend": "emulator", **self.of.how, **how}
        options = CallOptions(q_offset=self._offsets().get("q_offset", 0), **given)
        scalars = self.of.numbers.get("scalars")
        tensors = {**tensors, **(changes or {})}
        program, operands, options = _call_of(
            self.of.spec, (q, k, v), None, options, scalars, tensors
        )
        call = prepare_queries(program, operands, outputs, options, launch or LaunchOptions())
        (dq,), record = call.run(operands, outputs)
        return dq, outputs, record

    def judge(self, dq: Tensor, outputs: OutputGradients) -> None:
        """Holds the rows of each sequence against the oracle for its own keys, contiguous and
        alone. For specs whose mods do not read the number of the sequence."""
        spec, of = self.of.spec.replace(paged=False, shared_kv=False), self.of.of
        assert not dq.isnan().any()
        for b, (q, k, v) in enumerate(zip(of.q, of.k, of.v, strict=True)):
            rows = slice(0, q.shape[1])
            entry = b
            if self.of.packed:
                first = sum(each.shape[1] for each in of.q[:b])
                entry, rows = 0, slice(first, first + q.shape[1])
            found = dq[entry : entry + 1, :, rows]
            if not (q.shape[1] and k.shape[1]):
                assert not found.any()
                continue
            if self.of.spec.shared_kv:
                v = k[..., : spec.head_dim_v]
            dout, dlse = (
                None if x is None else x[entry : entry + 1, :, rows]
                for x in (outputs.dout, outputs.dlse)
            )
            assert dout is not None
            q_offset = k.shape[1] - q.shape[1] if self.q_offset is None else self.q_offset[b]
            given = spec, q[None], k[None], v[None], dout, dlse
            numbers = {**self.of.numbers, "q_offset": q_offset}
            exact, same, kept = (
                each(*given, **numbers)[0]
                for each in (
                    reference.gradients,
                    reference.same_dtype_gradients,
                    reference.kept_gradients,
                )
            )
            verdict = reference.compare(
                found, exact, same, factor=reference.GRADIENT_FACTOR, from_rounded=kept
            )
            assert verdict.ok, f"sequence {b}: {verdict}"

    def judged(self, **how: Any) -> Tensor:
        dq, outputs, _ = self.run(**how)
        self.judge(dq, outputs)
        return dq
