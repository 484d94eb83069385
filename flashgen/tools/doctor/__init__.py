"""`diagnose`: whether flashgen works on this machine: versions, GPU, compiler, each code path.

The problems run in child processes (`calls.trust.trial`), so that a fault or a hang on the GPU
ends no more than one of them.
"""
