"""Self-contained HTML pages from the templates, all in one style."""

from __future__ import annotations

import jinja2

from compress.console.wording import counted, in_words
from compress.evaluate.gains import drop_told, in_points, signed

__all__ = ["page"]


def page(template: str, **values: object) -> str:
    """A page.

    Args:
        template: file in the package's templates.
        values: that it names; text among them is escaped.
    """
    loader = jinja2.PackageLoader("compress")
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
    environment.globals.update(
        counted=counted, drop_told=drop_told, in_points=in_points, in_words=in_words, signed=signed
    )
    return environment.get_template(template).render(values)
