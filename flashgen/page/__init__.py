"""Reports as pages: the values that a report shows, and the HTML page made of them.

`flashgen.report` fills the values by running a call; `html_of` makes one self-contained document.
"""

from flashgen.page.kernel import pane_of
from flashgen.page.render import html_of, notebook_html
from flashgen.page.values import KernelPane, Page, Side

__all__ = ["KernelPane", "Page", "Side", "html_of", "notebook_html", "pane_of"]
