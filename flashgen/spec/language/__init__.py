"""Tracing of Python mods to sympy expressions: symbols, traced values, captures, expressions."""
