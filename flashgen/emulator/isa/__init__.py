"""The instructions: emitters of Python code, and the functions that this code calls."""
