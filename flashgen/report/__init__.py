"""Reports: a call executed and counted in the emulator, with all that its kernels are made of.

`side_of` gathers what one call gives; `flashgen.page.html_of` makes a document of one side or two.
"""

from flashgen.report.collect import CallResults, side_of
from flashgen.report.kernel import with_duration

__all__ = ["CallResults", "side_of", "with_duration"]
