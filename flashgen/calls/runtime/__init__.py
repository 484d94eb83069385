"""Execution of a call: checks, the choice of a backend, kernel arguments, launches and reports."""
