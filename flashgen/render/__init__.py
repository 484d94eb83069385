"""Plan + template -> Source: the emitted CUDA files.

Every decision is taken here or earlier; the templates only lay the result out. The same inputs give
the same bytes: no timestamp, no path of a machine, everything in a fixed order.
"""

from __future__ import annotations

from flashgen.render.backward import backward, walk_of_kernel
from flashgen.render.forward import forward
from flashgen.render.source import Param, Source
from flashgen.render.summary import summary

__all__ = ["Param", "Source", "backward", "forward", "summary", "walk_of_kernel"]
