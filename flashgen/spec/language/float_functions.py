"""Functions of floats as sympy functions that sympy does not simplify.

sympy's own exp, log, tanh, sin, cos and Abs are functions of real or complex numbers: they cancel
one another, and rewrite their arguments. Outside its domain a function of floats is NaN.

A `FloatFunction` is the only description of a function: mods, analysis, planner, kernels and the
tiled path read it. The float64 reference and the proof of derivatives have rules of their own.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, NamedTuple

import sympy

from flashgen.spec.language.comparisons import relation
from flashgen.spec.language.symbols import is_int
from flashgen.spec.language.sympy_functions import RealFunction, unless


class Monotone(NamedTuple):
    """The range of a function of one argument that never falls, or never rises.

    Attributes:
        least, most: bounds of all values.
        from_on: the least argument that the function is defined for; None for all.
    """

    least: float = -math.inf
    most: float = math.inf
    from_on: int | None = None
    falls: bool = False


class Bounded(NamedTuple):
    """The range of a function whose values lie in [-bound, bound].

    Attributes:
        finite_only: whether it is defined for finite arguments only.
    """

    bound: int
    finite_only: bool = False


class FloatFunction(RealFunction):
    """A function for mods that torch and CUDA have: ``fg.<called>``.

    A subclass has `form` (as sympy has it) and `slope` (its derivative) besides the attributes.

    Attributes:
        called: its name in fg, torch and math.
        takes: the names of its arguments.
        numpy: its name in numpy where that is another one; where numpy has none, math's is used.
        cuda: its name in kernels of float32 operands, and of float16 and bfloat16.
        pole: the argument at which the value is -inf.
        most_instructions: the most instructions of one call, for the limits of a kernel's size.
        instructions: the instructions counted in kernels of float16, and of float32, for the time
            of a tile.
        special: the number of instructions of special-function units, in the same two kernels.
        is_costly: whether code computes it only on the paths that need it.
        interval: how its range over a tile follows from its arguments' ranges; None where nothing
            is known.
    """

    nargs = (1,)
    called: ClassVar[str]
    takes: ClassVar[tuple[str, ...]] = ("x",)
    numpy: ClassVar[str] = ""
    cuda: ClassVar[tuple[str, str]]
    pole: ClassVar[int | None] = None
    most_instructions: ClassVar[int] = 8
    instructions: ClassVar[tuple[int, int]]
    special: ClassVar[tuple[int, int]] = (1, 1)
    is_costly: ClassVar[bool] = True
    interval: ClassVar[Monotone | Bounded | None] = None

    @property
    def has_poles(self) -> bool:
        return self.pole is not None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        FUNCTIONS[cls.called] = cls


FUNCTIONS: dict[str, type[FloatFunction]] = {}
"""All functions of floats, by name."""


class Abs(RealFunction):
    """The absolute value of a float. `sympy.Abs`, for integers, rewrites its argument."""

    nargs = (1,)
    form = staticmethod(sympy.Abs)
    slope = staticmethod(sympy.sign)

    @classmethod
    def eval(cls, x: sympy.Expr) -> sympy.Expr | None:
        return sympy.Abs(x) if is_int(x) else None

    def _eval_is_integer(self) -> Any:
        return self.args[0].is_integer


class Exp(FloatFunction):
    """e to the power x."""

    called = "exp"
    cuda = ("expf", "fast_exp")
    instructions = (2, 8)
    interval = Monotone(least=0.0)
    form = staticmethod(sympy.exp)
    slope = staticmethod(lambda x: Exp(x))


class Log(FloatFunction):
    """Natural logarithm."""

    called = "log"
    cuda = ("logf", "fast_log")
    pole = 0
    instructions = (2, 22)
    special = (1, 0)
    interval = Monotone(from_on=0)
    form = staticmethod(sympy.log)
    slope = staticmethod(lambda x: 1 / x)


class Log2(FloatFunction):
    """Logarithm to base 2."""

    called = "log2"
    cuda = ("log2f", "fast_log2")
    pole = 0
    instructions = (1, 22)
    special = (1, 0)
    is_costly = False
    interval = Monotone(from_on=0)
    form = staticmethod(lambda x: sympy.log(x) / sympy.log(2))
    slope = staticmethod(lambda x: 1 / (x * Log(sympy.Integer(2))))


class Tanh(FloatFunction):
    """Hyperbolic tangent."""

    called = "tanh"
    cuda = ("tanhf", "fast_tanh")
    instructions = (1, 20)
    special = (1, 2)
    interval = Monotone(-1.125, 1.125)
    form = staticmethod(sympy.tanh)
    slope = staticmethod(lambda x: 1 - Tanh(x) ** 2)


class Sin(FloatFunction):
    """Sine of x radians."""

    called = "sin"
    cuda = ("sine", "sine")
    most_instructions = 80
    instructions = (21, 21)
    special = (0, 0)
    is_costly = False
    interval = Bounded(1, finite_only=True)
    form = staticmethod(sympy.sin)
    slope = staticmethod(lambda x: Cos(x))


class Cos(FloatFunction):
    """Cosine of x radians."""

    called = "cos"
    cuda = ("cosine", "cosine")
    most_instructions = 80
    instructions = (21, 21)
    special = (0, 0)
    is_costly = False
    interval = Bounded(1, finite_only=True)
    form = staticmethod(sympy.cos)
    slope = staticmethod(lambda x: -Sin(x))


class Sigmoid(FloatFunction):
    """1 / (1 + exp(-x))."""

    called = "sigmoid"
    cuda = ("sigmoid", "fast_sigmoid")
    instructions = (4, 17)
    special = (2, 2)
    is_costly = False
    interval = Monotone(0.0, 1.125)
    form = staticmethod(lambda x: 1 / (1 + sympy.exp(-x)))

    def _eval_is_positive(self) -> Any:
        return self.args[0].is_real

    slope = staticmethod(lambda x: Sigmoid(x) - Sigmoid(x) ** 2)  # one multiply-add


class Erf(FloatFunction):
    """The error function."""

    called = "erf"
    cuda = ("erff", "erff")
    most_instructions = 30
    instructions = (20, 20)
    interval = Monotone(-1.125, 1.125)
    form = staticmethod(sympy.erf)
    slope = staticmethod(lambda x: 2 / sympy.sqrt(sympy.pi) * Exp(-(x**2)))


class Erfc(FloatFunction):
    """1 - erf(x), also where that is tiny."""

    called = "erfc"
    cuda = ("erfcf", "erfcf")
    most_instructions = 60
    instructions = (45, 45)
    special = (3, 3)
    interval = Monotone(0.0, 3.0, falls=True)
    form = staticmethod(sympy.erfc)
    slope = staticmethod(lambda x: -2 / sympy.sqrt(sympy.pi) * Exp(-(x**2)))


class Log1p(FloatFunction):
    """log(1 + x), also where x is tiny."""

    called = "log1p"
    cuda = ("log1pf", "log1pf")
    pole = -1
    most_instructions = 30
    instructions = (24, 24)
    special = (0, 0)
    interval = Monotone(from_on=-1)
    form = staticmethod(lambda x: sympy.log(1 + x))
    slope = staticmethod(lambda x: 1 / (1 + x))


class Expm1(FloatFunction):
    """exp(x) - 1, also where x is tiny."""

    called = "expm1"
    cuda = ("expm1f", "expm1f")
    most_instructions = 30
    instructions = (22, 22)
    special = (0, 0)
    interval = Monotone(least=-2.0)
    form = staticmethod(lambda x: sympy.exp(x) - 1)
    slope = staticmethod(lambda x: Exp(x))


class Atan(FloatFunction):
    """The angle in radians, from -pi/2 to pi/2, whose tangent is x."""

    called = "atan"
    numpy = "arctan"
    cuda = ("atanf", "atanf")
    most_instructions = 30
    instructions = (20, 20)
    interval = Monotone(-2.0, 2.0)
    form = staticmethod(sympy.atan)
    slope = staticmethod(lambda x: 1 / (1 + x**2))


class Atan2(FloatFunction):
    """The angle of the point (x, y) in radians, from -pi to pi."""

    nargs = (2,)
    called = "atan2"
    takes = ("y", "x")
    numpy = "arctan2"
    cuda = ("atan2f", "atan2f")
    most_instructions = 60
    instructions = (34, 34)
    interval = Bounded(4)
    form = staticmethod(sympy.atan2)

    def fdiff(self, argindex: int = 1) -> sympy.Expr:
        y, x = self.args
        square = x**2 + y**2
        part = x if argindex == 1 else -y
        none = relation(sympy.Eq, square, sympy.S.Zero)
        return unless(none, part / square)
