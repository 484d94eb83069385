"""Cohorts of warps, memories, and the state of a launch."""
