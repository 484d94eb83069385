"""sympy expressions as CUDA C++."""

from flashgen.kernels.codegen.expressions.cpp_text import HELPERS
from flashgen.kernels.codegen.expressions.printer import CPrinter

__all__ = ["HELPERS", "CPrinter"]
