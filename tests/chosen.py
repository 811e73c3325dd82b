"""Of a file's cases, those of this run: what a fixture makes for all of them is made for no others."""

from __future__ import annotations

from typing import Any

import pytest

__all__ = ["chosen"]


def chosen(request: pytest.FixtureRequest, name: str) -> list[Any]:
    """The values that a parameter has in the tests of this file that are tried, each once, in their order."""
    found: list[Any] = []
    for item in request.session.items:
        given = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        if item.path == request.path and name in given and given[name] not in found:
            found.append(given[name])
    return found
