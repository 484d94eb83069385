"""The machine: scheduler, barriers, asynchronous copies, tensor maps and wgmma."""
