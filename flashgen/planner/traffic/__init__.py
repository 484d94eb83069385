"""Bytes that a launch moves to and from global memory, counted from the loops of its kernel."""
