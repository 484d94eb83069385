"""Which code path a GPU takes: only one that was seen to compute right results there.

::

    decide(0).arch     "sm_90a" on a Hopper GPU whose trial passed, "sm_90" where it failed

A code path is proven on a GPU by the records that come with flashgen, or by a trial: a child
process runs a few of the problems of `flashgen.tools.doctor` on the GPU and compares them with the
float64 reference. The verdict is remembered for the GPU's model, the driver, NVRTC and the
templates.
"""

from flashgen.calls.trust.decision import Decision, TrustWarning, decide, forget

__all__ = ["Decision", "TrustWarning", "decide", "forget"]
