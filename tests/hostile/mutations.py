"""Changes of files that stay whole on the outside: of JSON's values, of an archive's entries, of ONNX's fields.

Checksums and lengths are made again after a change, so that it gets to where it is used.
"""

from __future__ import annotations

import copy
import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import onnx

from tests.hostile.watch import MARK

__all__ = ["TEXTS", "bytes_changed", "onnx_changed", "placed", "rezipped", "toml_of", "tree_changed"]

NUMBERS = (0, 1, -1, 2, 7, 64, 255, 65536, 2**31 - 1, 2**31, 2**32, 2**53, 2**62, 2**63 - 1, 2**63, 2**64, 10**400)
FLOATS = (0.0, -1.0, 0.5, 1e300, -1e-300, float("nan"), float("inf"), float("-inf"))
TEXTS = (
    "", "x", "batch", "a" * 5000, "/etc/passwd", "..", ".", "../outside/canary_secret", "../../etc/passwd", "a/b", "a\0b",
    "model.onnx", "artifact.json", "__class__", "__init__", "self", "forward", "None", "True", "'", '"', "it's \"one\"",
    "a\nb", "a\r", "\x1b[2J", "\u202eabc", "[/red]", "[bold", "{x}", "{0.__class__}", "%s%n", "<script>1</script>", "é" * 300,
    "\ud800", "nan", "1e999", "-0", "x:float32[batch,4]", "y:float32[batch,3]", "x:float32[1073741824,1073741824]", "x:string[batch]",
    "x:float32[batch,99999999999]", "x\x1b:float32[batch,4]", "x y:int64[]", "x:float32[batch,seq,seq]", "tensorrt", "plan", "onnx",
    "top1", "canary_module:run", "canary_module", "float32", "0", "9" * 5000,
)  # fmt: skip


def _value(random: Random, outside: Path) -> Any:
    code = f"__import__('pathlib').Path({str(outside / MARK)!r}).touch()"
    deep: Any = 1
    for _ in range(random.choice((3, 200, 900))):
        deep = [deep] if random.random() < 0.5 else {"a": deep}
    makers: tuple[Callable[[], Any], ...] = (
        lambda: random.choice(NUMBERS), lambda: random.choice(NUMBERS), lambda: random.choice(FLOATS), lambda: random.choice(TEXTS),
        lambda: random.choice(TEXTS), lambda: code, lambda: str(outside / f"{MARK}_secret"), lambda: None, lambda: True, lambda: False,
        list, dict, lambda: [None] * 3, lambda: deep, lambda: [random.choice(NUMBERS)] * random.choice((1, 5, 3000)),
        lambda: {random.choice(TEXTS): random.choice(NUMBERS)}, lambda: [random.choice(TEXTS)],
    )  # fmt: skip
    return random.choice(makers)()


def tree_changed(whole: Any, random: Random, outside: Path, changes: int | None = None) -> Any:
    """Plain data, in some places other data: values of another kind or size, keys that are gone, new or twice."""
    whole = copy.deepcopy(whole)
    for _ in range(changes or random.choice((1, 1, 1, 2, 3))):
        places = [place for place in places_in(whole, deepest=12) if place]
        if not places:
            return _value(random, outside)
        holder = whole
        *path, last = random.choice(places)
        for step in path:
            holder = holder[step]
        match random.randrange(8):
            case 0 if isinstance(holder, dict):
                holder[random.choice(TEXTS)] = holder.pop(last)
            case 1:
                del holder[last]
            case 2:
                other = whole
                for step in random.choice(places):
                    other = other[step]
                holder[last] = copy.deepcopy(other)
            case 3 if isinstance(holder, dict):
                holder[random.choice(TEXTS)] = _value(random, outside)
            case 4 if isinstance(holder, list):
                holder.insert(last, copy.deepcopy(holder[last]))
            case _:
                holder[last] = _near(holder[last], random) if random.random() < 0.3 else _value(random, outside)
    return whole


def _near(value: Any, random: Random) -> Any:
    """One of the same kind, which more checks let through."""
    if type(value) is int:
        return random.choice((value + 1, value - 1, -value, value * 1000, *NUMBERS))
    if type(value) is float:
        return random.choice((-value, value * 1e6, *FLOATS))
    if type(value) is str:
        at = random.randrange(len(value) + 1)
        return value[:at] + random.choice(TEXTS) + value[at + random.choice((0, 1)) :]
    if type(value) is list:
        return value * random.choice((2, 50))
    return value


def places_in(value: Any, path: tuple[Any, ...] = (), deepest: int | None = None) -> list[tuple[Any, ...]]:
    """Paths to all that is in plain data, itself first.

    Args:
        path: to the data.
        deepest: how long a path may be; None for any.
    """
    found = [path]
    if deepest is None or len(path) < deepest:
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, item in items:
            found += places_in(item, (*path, key), deepest)
    return found


def placed(value: Any) -> bytes:
    """As JSON; surrogates and NaN as Python writes them."""
    return json.dumps(value).encode("utf-8", "surrogatepass")


def toml_of(values: dict[str, Any]) -> str:
    """As TOML, as far as it goes."""
    return "".join(f"{json.dumps(key)} = {json.dumps(value)}\n" for key, value in values.items())


def bytes_changed(whole: bytes, random: Random) -> bytes:
    """A few bytes others, gone, or twice."""
    data = bytearray(whole)
    for _ in range(random.randint(1, 4)):
        at = random.randrange(len(data) + 1)
        match random.randrange(6):
            case 0:
                del data[at : at + random.choice((1, 4, 64))]
            case 1:
                data[at:at] = random.randbytes(random.choice((1, 2, 8)))
            case 2:
                data[at:at] = data[at : at + random.choice((4, 64, 1024))]
            case 3:
                width = random.choice((1, 2, 4, 8))
                data[at : at + width] = (random.choice(NUMBERS) % (1 << 8 * width)).to_bytes(width, "little")
            case _ if at < len(data):
                data[at] = random.randrange(256)
    return bytes(data)


def rezipped(whole: bytes, random: Random, change: Callable[[str, bytes], bytes] | None = None) -> bytes:
    """An archive of which one entry's content is changed, with the checksum that fits; else an entry is moved.

    Args:
        whole, random: the archive; what decides.
        change: of a name and a content; bytes at random by default.
    """
    with zipfile.ZipFile(io.BytesIO(whole)) as archive:
        entries = [(info, archive.read(info)) for info in archive.infolist()]
    at = random.randrange(len(entries))
    info, content = entries[at]
    match random.randrange(12):
        case 0:
            del entries[at]
        case 1:
            entries.insert(at, (copy.copy(info), content))
        case 2:
            info.filename = info.filename.rpartition("/")[0] + "/" + random.choice(TEXTS)
        case 3:
            info.compress_type = zipfile.ZIP_DEFLATED
        case _:
            entries[at] = (info, (change or (lambda _name, data: bytes_changed(data, random)))(info.filename, content))
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for info, content in entries:
            kept = zipfile.ZipInfo(info.filename.encode("utf-8", "replace").decode(), info.date_time)
            kept.compress_type = info.compress_type
            archive.writestr(kept, content)
    return out.getvalue()


def onnx_changed(made: onnx.ModelProto, random: Random, outside: Path) -> bytes:
    """A model of which some fields are others, at any depth."""
    made = copy.deepcopy(made)
    for _ in range(random.randint(1, 3)):
        message: Any = made
        while True:
            fields = [(field, value) for field, value in message.ListFields()]
            if not fields:
                break
            field, value = random.choice(fields)
            several = list(value) if hasattr(value, "extend") else [value]
            inner = random.choice(several) if several else None
            if hasattr(inner, "ListFields") and random.random() < 0.85:
                message = inner
                continue
            _field_changed(message, field, value, random, outside)
            break
    return made.SerializeToString()  # type: ignore[no-any-return]


def _field_changed(message: Any, field: Any, value: Any, random: Random, outside: Path) -> None:
    several = hasattr(value, "extend")
    try:
        if isinstance(message, onnx.TensorProto) and random.random() < 0.3:
            _moved_outside(message, random, outside)
        elif field.message_type is not None:
            if several and random.random() < 0.6:
                value.add().CopyFrom(random.choice(list(value)))
            elif several:
                del value[random.randrange(len(value))]
            else:
                message.ClearField(field.name)
        elif field.cpp_type == field.CPPTYPE_STRING:
            new: Any = random.choice(
                (*TEXTS, "If", "Loop", "Scan", "ConstantOfShape", "EPContext", "com.canary", "Resize")
            )
            new = new.encode("utf-8", "surrogatepass") if field.type == field.TYPE_BYTES else new
            _assigned(message, field, new, random)
        else:
            _assigned(message, field, random.choice((*NUMBERS, *FLOATS)), random)
    except (ValueError, TypeError, UnicodeError):  # out of the field's range
        pass


def _moved_outside(tensor: Any, random: Random, outside: Path) -> None:
    tensor.data_location = 1
    if random.random() < 0.7:
        tensor.ClearField("raw_data")
    secret = outside / f"{MARK}_secret"
    inside = ("weights.bin", "./weights.bin", "weights.bin/", "model.onnx", "a/../weights.bin")
    out = (
        str(secret),
        "../outside/canary_secret",
        "file://" + str(secret),
        "link",
        "linked/canary_secret",
        "*/_ORT_MEM_ADDR_/*",
    )
    tensor.external_data.add(key="location", value=random.choice((*inside, *out)))
    for key in ("offset", "length"):
        if random.random() < 0.5:
            value = random.choice(("0", "64", "-1", "+1", " 1", "1_0", "٣", str(2**63), str(2**64 - 16), "1e3", ""))
            tensor.external_data.add(key=key, value=value)


def _assigned(message: Any, field: Any, value: Any, random: Random) -> None:
    now = getattr(message, field.name)
    if hasattr(now, "append"):
        at = random.randrange(len(now) + 1)
        now[:] = [*now[:at], value, *now[at + random.choice((0, 1)) :]]
    else:
        setattr(message, field.name, value)
