"""Python of someone else's, parsed and compiled without being run."""

from __future__ import annotations

import ast
from pathlib import Path

from compress.vetting.texts import read_bytes

__all__ = ["parsed_python"]

LARGEST = 1 << 20


def parsed_python(path: Path) -> ast.Module:
    """The syntax tree of a file.

    Raises:
        OSError: it can't be read.
        SyntaxError: it is no Python; says where.
        ValueError: it is no text, too large, or nested too deeply.
    """
    data = read_bytes(path, LARGEST)
    try:
        tree = ast.parse(data, filename=str(path))
        compile(tree, str(path), "exec", dont_inherit=True)  # finds what the grammar lets pass; it runs nothing
    except (RecursionError, MemoryError) as err:  # Python's parser calls its own bound on depth a lack of memory
        raise ValueError("it is nested too deeply") from err
    return tree
