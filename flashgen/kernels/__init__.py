"""From a spec to a compiled kernel: planner, code generation, NVRTC, and the pipeline of them."""
