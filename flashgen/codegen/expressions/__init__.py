"""sympy expressions as CUDA C++."""

from flashgen.codegen.expressions.cpp_text import HELPERS
from flashgen.codegen.expressions.printer import CPrinter

__all__ = ["HELPERS", "CPrinter"]
