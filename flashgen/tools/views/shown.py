"""The ways to show a drawing: notebooks, terminals and files."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

from flashgen.shared.errors import InputError
from flashgen.tools.views.drawing import Drawing, text_of
from flashgen.tools.views.png import png_of
from flashgen.tools.views.svg import svg_of

_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<body style="margin:8px;background:Canvas">
{svg}</body>
</html>
"""


class Shown(ABC):
    """An object that notebooks show as a picture and terminals as text."""

    @abstractmethod
    def drawing(self) -> Drawing:
        """What the picture shows."""

    def to_svg(self, *, compact: bool = False) -> str:
        """The picture as an SVG element, for a page or a file.

        Args:
            compact: the cells alone, as a small square without text.
        """
        return svg_of(self.drawing(), compact=compact)

    def to_html(self) -> str:
        """The picture as an HTML page."""
        from html import escape

        return _PAGE.format(title=escape(self.drawing().title), svg=self.to_svg())

    def to_png(self) -> bytes:
        """The picture as a PNG image.

        Raises:
            InputError: matplotlib, which draws it, is not installed.
        """
        return png_of(self.drawing())

    def save(self, path: str | Path) -> None:
        """Writes the picture to a file.

        Args:
            path: a name that ends with .svg, .html, .png or .txt.

        Raises:
            InputError: the name ends otherwise, the file cannot be written, or it is a .png and
                matplotlib is not installed.
        """
        makers: dict[str, Callable[[], bytes]] = {
            ".svg": lambda: self.to_svg().encode(),
            ".html": lambda: self.to_html().encode(),
            ".png": self.to_png,
            ".txt": lambda: f"{self}\n".encode(),
        }
        make = makers.get(Path(path).suffix)
        if make is None:
            raise InputError(
                "a picture cannot be written in this format",
                where="argument path",
                numbers=f"given {str(path)!r}; formats: {', '.join(makers)}",
                way_out=f"{Path(path).stem or 'tiles'}.svg",
            )
        content = make()
        try:
            Path(path).write_bytes(content)
        except OSError as error:
            raise InputError(
                "the picture cannot be written into this file",
                where="argument path",
                numbers=f"{str(path)!r}: {error.strerror or error}",
                way_out="a file in a folder that exists and that you can write",
            ) from None

    def __str__(self) -> str:
        return text_of(self.drawing())

    def __repr__(self) -> str:
        return str(self)

    def _repr_svg_(self) -> str:
        return self.to_svg()

    def _repr_html_(self) -> str:
        return f"<div>{self.to_svg()}</div>"
