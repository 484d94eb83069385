"""`diagnose`: whether flashgen works on this machine: versions, GPU, compiler, each code path.

The problems run in child processes (`calls.trust.trial`), so that a fault or a hang on the GPU
ends no more than one of them.
"""

from flashgen.tools.doctor.check import ProblemResult
from flashgen.tools.doctor.diagnosis import Diagnosis, PathOfGpu, diagnose
from flashgen.tools.doctor.machine import Cache, Finding, MachineFacts, Nvrtc

__all__ = [
    "Cache",
    "Diagnosis",
    "Finding",
    "MachineFacts",
    "Nvrtc",
    "PathOfGpu",
    "ProblemResult",
    "diagnose",
]
