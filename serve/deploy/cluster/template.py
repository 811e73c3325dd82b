"""Objects as Helm's templates: what stands at a path becomes the default of a value, and a reference takes its place.

Placeholders are plain words of letters and digits, so that YAML writes them without quotes; they become Helm's actions
in the text. Values are written by `toJson`, which is YAML, too: whatever a user gives stays one value.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from serve.deploy.cluster.yaml_text import several, yaml_text

__all__ = ["NAMESPACE", "RELEASE", "Values"]

Object = dict[str, Any]
RELEASE = "helmrelease0name"
NAMESPACE = "helmspace0name"
"""They stand for the release's name and namespace, wherever options have them."""
VALUE, OPTIONAL = re.compile(r"'?helmvalue(\d+)x'?"), re.compile(r"^( *)helmoptional(\d+)x: null$", re.MULTILINE)
NAMED = {RELEASE: ".Release.Name", NAMESPACE: ".Release.Namespace"}
ALONE, INSIDE = (re.compile(text, re.MULTILINE) for text in (rf"(?<=: )({'|'.join(NAMED)})$", "|".join(NAMED)))


class Values:
    """What of a chart its users may change.

    Attributes:
        defaults: as values.yaml has them.
    """

    def __init__(self) -> None:
        self.defaults: Object = {}
        self._leaves: dict[tuple[str, ...], str] = {}
        self._actions: list[str] = []
        self._optional: list[tuple[str, str]] = []

    def add(self, name: str, default: Any, comment: str = "") -> None:
        """A value by its dotted name."""
        *above, last = path = tuple(name.split("."))
        inner = self.defaults
        for each in above:
            inner = inner.setdefault(each, {})
        if inner.setdefault(last, default) != default:
            raise ValueError(f"{name} stands for both {inner[last]!r} and {default!r}")
        self._leaves[path] = comment or self._leaves.get(path, "")

    def take(self, holder: Any, key: str | int, name: str, comment: str = "") -> None:
        """What stands there becomes the value's default."""
        self.add(name, holder[key], comment)
        self.put(holder, key, f"toJson .Values.{name}")

    def put(self, holder: Any, key: str | int, action: str) -> None:
        """An action of Helm's in place of what stands there."""
        holder[key] = f"helmvalue{len(self._actions)}x"
        self._actions.append(action)

    def optional(self, holder: Object, key: str, name: str, default: Any, comment: str = "", only: str = "") -> None:
        """A key that is there when its value is not empty, and `only` holds."""
        self.add(name, default, comment)
        holder[f"helmoptional{len(self._optional)}x"] = None
        self._optional.append((only or f".Values.{name}", f"{key}: {{{{ toJson .Values.{name} }}}}"))

    def template(self, objects: Sequence[Object], only: str = "") -> str:
        """A file of templates.

        Args:
            objects: with placeholders.
            only: the value that decides whether they are there; "" where nothing does.
        """
        text = several(objects).replace("{{", "{{ `{{` }}")  # of somebody else's templates: alerts have some
        text = ALONE.sub(lambda found: f"{{{{ {NAMED[found[0]]} | quote }}}}", text)
        text = INSIDE.sub(lambda found: f"{{{{ {NAMED[found[0]]} }}}}", text)
        text = VALUE.sub(lambda found: f"{{{{ {self._actions[int(found[1])]} }}}}", text)
        text = OPTIONAL.sub(self._block, text)
        return f"{{{{- if .Values.{only} }}}}\n{text}{{{{- end }}}}\n" if only else text

    def _block(self, found: re.Match[str]) -> str:
        condition, line = self._optional[int(found[2])]
        return f"{found[1]}{{{{- if {condition} }}}}\n{found[1]}{line}\n{found[1]}{{{{- end }}}}"

    def text(self, head: str) -> str:
        """values.yaml, each value under its comment."""
        return head + "".join(self._lines(self.defaults, ()))

    def schema(self) -> Object:
        """values.schema.json: no others, and each of its default's kind."""
        return {"$schema": "http://json-schema.org/draft-07/schema#", **self._kind(self.defaults, ())}

    def _lines(self, values: Mapping[str, Any], above: tuple[str, ...]) -> list[str]:
        found = []
        indent = "  " * len(above)
        for key, value in values.items():
            path = (*above, key)
            if comment := self._leaves.get(path):
                found.append(f"{indent}# {comment}\n")
            if path in self._leaves:
                found += [f"{indent}{line}\n" for line in yaml_text({key: value}, head="").splitlines()]
            else:
                found += [f"{indent}{key}:\n", *self._lines(value, path)]
        return found

    def _kind(self, value: Any, path: tuple[str, ...]) -> Object:
        if path in self._leaves:
            name = {bool: "boolean", int: "integer", str: "string", list: "array", dict: "object"}[type(value)]
            return {"type": name}
        parts = {key: self._kind(each, (*path, key)) for key, each in value.items()}
        needed = list(parts)  # a null takes a value away
        if not path:
            parts["global"] = {"type": "object"}  # Helm's own, for charts that hold this one
        return {"type": "object", "properties": parts, "required": needed, "additionalProperties": False}
