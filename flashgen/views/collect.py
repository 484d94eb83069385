"""All that a report shows of one call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from flashgen.call import Inputs
from flashgen.language.spec import AttentionSpec
from flashgen.ops import BackwardRun, ForwardRun
from flashgen.profile import Profile
from flashgen.views.kernel import pane_of_profile
from flashgen.views.numerics import MOST_SCORES, backward_errors, forward_errors
from flashgen.views.python_lines import PythonText
from flashgen.views.report_page import versions
from flashgen.views.tiles import with_tile_map
from flashgen.views.values import ErrorHistogram, Row, Side


@dataclass(frozen=True)
class CallResults:
    """A call that was executed in the emulator.

    Attributes:
        spec, inputs: the call; in its options, the scalars and the captured tensors.
        profiles: the profile of each launch, the forward pass first.
        forward: the result.
        backward: the gradients; None where they were not computed.
    """

    spec: AttentionSpec
    inputs: Inputs
    profiles: Sequence[Profile]
    forward: ForwardRun
    backward: BackwardRun | None = None


def side_of(
    results: CallResults,
    title: str,
    call: Sequence[Row],
    spec_file: PythonText | None = None,
) -> Side:
    """The report of a call.

    Args:
        title: what tells the call apart from another one.
        call: the call in rows of names and values.
        spec_file: the file of the spec; None for a spec that was made in Python.
    """
    panes = []
    seen: Counter[str] = Counter()
    for profile in results.profiles:
        role = profile.plan.kernel
        seen[role] += 1
        name = role if seen[role] == 1 else f"{role} ({seen[role]})"
        pane = pane_of_profile(profile, name, spec_file)
        panes.append(with_tile_map(pane, profile, results.spec, results.inputs))
    errors, note = _errors(results)
    return Side(title, tuple(call), tuple(panes), errors, note, versions())


def _errors(results: CallResults) -> tuple[tuple[ErrorHistogram, ...], str]:
    q, k, _ = results.inputs.operands
    scores = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2]
    if scores > MOST_SCORES:
        return (), (
            f"No oracle was computed: it makes all {scores:,} scores in float64, and this report "
            f"stops at {MOST_SCORES:,}. A smaller --shape has one."
        )
    if not scores:
        return (), "No oracle was computed: a size is 0, and there is no score."
    found = forward_errors(results.spec, results.inputs, results.forward)
    if results.backward is not None:
        found += backward_errors(results.spec, results.inputs, results.backward)
    return found, ""
