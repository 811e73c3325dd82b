"""What hooks require, as images are built by it: each a requirement of PEP 508, and nothing else that pip would read.

pip takes options out of a line of requirements (another index, a file, an editable folder), joins lines and puts in
variables of the environment. `packaging` would tell a requirement, too, but is not everywhere that a repository is
checked.
"""

from __future__ import annotations

import re

from compress.vetting.texts import parse_json

__all__ = ["OF_HOOKS", "REQUIREMENTS", "is_requirement", "requirements_in"]

REQUIREMENTS = "requirements"
"""The parameter of a configuration that has them, as JSON."""

OF_HOOKS = "stages"
"""The parameter that every model with hooks of `serve pack` has; what others call requirements is their affair."""

_VERSION = r"(?:~=|===?|!=|<=?|>=?) *[A-Za-z0-9.*+!_-]+"
_VERSIONS = rf"{_VERSION}(?: *, *{_VERSION})*"
_NAME = r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?"
_REQUIREMENT = re.compile(
    rf" *{_NAME} *(?:\[ *(?:{_NAME}(?: *, *{_NAME})*)? *\])? *"
    rf"(?:{_VERSIONS} *|\( *{_VERSIONS} *\) *|@ *[A-Za-z][A-Za-z0-9+.-]*://[^ $\\\"'<>]+(?: +(?=;)| *$))?"
    r"(?:;[A-Za-z0-9_.'\"<>=!~(), *+-]+)?"
)
_OPTION = re.compile(r"(?:^| )-")
_FILE = (".whl", ".zip", ".tar", ".tgz", ".tbz", ".txz", ".gz", ".bz2", ".xz")  # pip looks for these on its machine


def is_requirement(text: str) -> bool:
    """Whether pip takes a text for a package, and for no more than that."""
    plain = text.isascii() and text.isprintable() and len(text) <= 1000
    if not plain or _OPTION.search(text) or _REQUIREMENT.fullmatch(text) is None:
        return False
    return "://" in text or not re.split(r"[ \[(<>=!~;]", text.strip(), maxsplit=1)[0].lower().endswith(_FILE)


def requirements_in(text: str) -> list[str]:
    """Those of a configuration's parameter.

    Raises:
        ValueError: it is no list of texts, or one of them is no requirement.
    """
    found = parse_json(text.encode(errors="surrogateescape"))
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise ValueError("they are no list of texts")
    for each in found:
        if not is_requirement(each):
            raise ValueError(f"{each!r} is no requirement of a package")
    return found
