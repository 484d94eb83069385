"""The cost models of all kernels: what a tile needs and what it costs, as formulas."""
