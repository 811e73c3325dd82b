"""YAML as the files of deploy/ have it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from compress.errors import MissingExtraError

__all__ = ["HEAD", "several", "yaml_text"]

WRITTEN = "# Written by `serve deploy {}`; another run replaces it.\n"
HEAD = WRITTEN.format("render")


def yaml_text(data: Any, head: str = HEAD) -> str:
    """One document.

    Raises:
        MissingExtraError: PyYAML is not installed.
    """
    return head + _dump([data])


def several(documents: Sequence[Any], command: str = "render") -> str:
    """Several, in one file.

    Args:
        documents: each as Python's values.
        command: of `serve deploy`, that writes it.
    """
    return WRITTEN.format(command) + _dump(documents)


def _dump(documents: Sequence[Any]) -> str:
    try:
        import yaml
    except ModuleNotFoundError as err:
        if err.name != "yaml":
            raise
        raise MissingExtraError("can't write the files", module="yaml", extra="deploy") from err

    class Plain(yaml.SafeDumper):  # type: ignore[misc]  # PyYAML has no types
        """Writes what stands in two places twice: not every reader knows YAML's anchors."""

        def ignore_aliases(self, _data: Any) -> bool:
            return True

    def lines(dumper: Any, text: str) -> Any:
        """What has several is written as they are, to be read."""
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)

    Plain.add_representer(str, lines)
    text: str = yaml.dump_all(documents, Dumper=Plain, sort_keys=False, width=110, allow_unicode=True)
    return text
