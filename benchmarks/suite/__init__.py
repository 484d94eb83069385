"""The measurements of `benchmarks/gpu.py`, and the files that hold their results.

The `supervisor` starts each of the `parts` in a process of its own, because a kernel that fails can
end its process; by the `journal` the next process continues after that step. A part runs the
`contenders` on the `cases`, whose masks and scores in torch are in `benchmarks.variants`, compares
their results with the oracle (`check`), times them side by side (`timing`, on a `device` that is a
GPU or, in a dry run, the emulator) and appends rows to tidy files (`records`). `summary`, `figures`
and `speed_table` read only those files.
"""
