"""What somebody changed by hand in a config.pbtxt, kept when the model is packed again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["Conflict", "Edits", "merge"]

Edits = Literal["merge", "keep", "drop"]
"""What becomes of edits: merged, or a conflict told; preferred over what pack writes; dropped."""


@dataclass(frozen=True)
class Conflict:
    """A field that was edited by hand and that this pack would set to something else, too.

    Attributes:
        field: its path, such as "dynamic_batching.max_queue_delay_microseconds".
        edited, packed: the two values, as config.pbtxt shows them.
    """

    field: str
    edited: str
    packed: str


def merge(base: Any, edited: Any, packed: Any, path: str = "") -> tuple[list[str], list[Conflict]]:
    """A three-way merge: into `packed` goes each field in which `edited` differs from `base`.

    Messages are merged field by field, maps key by key, lists as a whole. Where packed and edited both differ from base
    and from each other, there is a conflict, and packed stays.

    Args:
        base: the protobuf message that the earlier pack wrote.
        edited: what stands in the repository.
        packed: what this pack writes; is changed.
        path: of the message within the whole.

    Returns:
        The fields that were kept, and the conflicts.
    """
    kept: list[str] = []
    conflicts: list[Conflict] = []
    for field in base.DESCRIPTOR.fields:
        name = f"{path}.{field.name}" if path else field.name
        is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
        if is_map:
            more, clash = _merge_map(field, name, base, edited, packed)
            kept += more
            conflicts += clash
            continue
        values = [_value(message, field) for message in (base, edited, packed)]
        if values[1] in (values[0], values[2]):
            continue
        single = field.message_type is not None and not field.is_repeated
        if single and all(message.HasField(field.name) for message in (base, edited, packed)):
            inner = [getattr(message, field.name) for message in (base, edited, packed)]
            more, clash = merge(inner[0], inner[1], inner[2], name)
            kept += more
            conflicts += clash
        elif values[2] == values[0]:
            _copy(edited, packed, field)
            kept.append(name)
        else:
            conflicts.append(Conflict(name, _shown(values[1]), _shown(values[2])))
    return kept, conflicts


def _merge_map(field: Any, name: str, base: Any, edited: Any, packed: Any) -> tuple[list[str], list[Conflict]]:
    kept: list[str] = []
    conflicts: list[Conflict] = []
    maps = [getattr(message, field.name) for message in (base, edited, packed)]
    for key in sorted({*maps[0], *maps[1]}, key=str):
        before, now, new = (_entry(each, key) for each in maps)
        if now in (before, new):
            continue
        if new != before:
            conflicts.append(Conflict(f"{name}.{key}", _shown(now), _shown(new)))
            continue
        kept.append(f"{name}.{key}")
        if now is None:
            del maps[2][key]
        elif hasattr(now, "SerializeToString"):
            maps[2][key].CopyFrom(now)
        else:
            maps[2][key] = now
    return kept, conflicts


def _entry(values: Any, key: Any) -> Any:
    return values[key] if key in values else None  # noqa: SIM401 - a message map's get() would make the entry


def _value(message: Any, field: Any) -> Any:
    if field.is_repeated:
        return list(getattr(message, field.name))
    if field.has_presence and not message.HasField(field.name):
        return None
    return getattr(message, field.name)


def _copy(source: Any, target: Any, field: Any) -> None:
    target.ClearField(field.name)
    if field.is_repeated:
        getattr(target, field.name).MergeFrom(getattr(source, field.name))
    elif field.has_presence and not source.HasField(field.name):
        return
    elif field.message_type is not None:
        getattr(target, field.name).SetInParent()
        getattr(target, field.name).CopyFrom(getattr(source, field.name))
    else:
        setattr(target, field.name, getattr(source, field.name))


def _shown(value: Any) -> str:
    return "nothing" if value is None or value == [] else " ".join(str(value).split())[:80]
