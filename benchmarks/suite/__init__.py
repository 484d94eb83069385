"""What `benchmarks/gpu.py` measures, and how it keeps what it found.

The runner (`runner`, `parts`) starts each part in a process of its own, because a kernel that goes
astray takes its process with it; `journal` lets the next process go on behind the place. A part
takes `cases`, whose masks and scores `forms` has in torch, lets the `contenders` compute them,
compares with the oracle (`check`), times them side by side (`timing`, on a `device` that is a GPU
or, in a dry run, the emulator) and appends to tidy files (`records`). `summary`, `figures` and
`readme` read those files and nothing else.
"""
