"""A terminal that shows texts as they are read: nothing that a file says moves its cursor."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console as RichConsole
from rich.segment import Segment
from rich.text import Text

from compress.errors import printable

__all__ = ["Console"]


class Console(RichConsole):
    """rich's, which passes on escape sequences that stand in a text; what steers it is rich's own alone."""

    def render_str(self, text: str, **named: Any) -> Text:
        """As rich's, without letters that are none, so that the room for it is measured as it is shown."""
        return super().render_str(printable(text, keep="\n"), **named)

    def render(self, *given: Any, **named: Any) -> Iterable[Segment]:
        """The same of what was made a text elsewhere."""
        for segment in super().render(*given, **named):
            yield segment if segment.control else Segment(printable(segment.text, keep="\n"), segment.style)
