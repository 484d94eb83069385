"""Profiles: the work of a kernel counted in the emulator, compared with its plan's predictions.

``profile_forward`` and ``profile_backward`` run a spec's kernels in the emulator and return a
`Profile` of each: bytes as issued, distinct bytes and bytes by the model of the L2 cache,
coalescing, bank conflicts, work by class, each by step and by line of the emitted file, and a
roofline.
"""
