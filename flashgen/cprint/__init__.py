"""sympy expressions as CUDA C++."""

from .printer import CPrinter
from .text import HELPERS

__all__ = ["HELPERS", "CPrinter"]
