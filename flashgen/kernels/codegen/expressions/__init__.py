"""sympy expressions as CUDA C++."""

from flashgen.kernels.codegen.expressions.printer import CPrinter

__all__ = ["CPrinter"]
