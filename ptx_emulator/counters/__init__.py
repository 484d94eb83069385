"""Counters of a launch: instructions, bytes, bank conflicts, and a model of the L2 cache."""
