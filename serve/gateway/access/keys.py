"""API keys in a file: who may ask which models, how often, and with what priority.

A key is 256 random bits behind its id, and only its SHA-256 is stored: with so much entropy there is nothing to guess,
so a slow password hash would cost time and protect nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from compress.errors import ServerError
from compress.vetting.ours import check_ours
from compress.vetting.replace import mend_of, replace_file
from serve.repository.lock import hold

__all__ = ["Key", "add_key", "digest_of", "in_days", "read_keys", "revoke_key"]

FORMAT = 1
LOWEST = 9
MOST_ID = 64
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,63}")


@dataclass(frozen=True)
class Key:
    """What is stored of a key.

    Attributes:
        id: its public part, which also begins the key itself.
        name: whose it is; not secret, shown in metrics and logs.
        digest: SHA-256 of the whole key, in hexadecimal.
        models: the models it may ask, shell patterns.
        rate: requests a second over any longer time; None for no limit.
        burst: requests that may come at once; None takes a second's worth of `rate`, at least one.
        tokens_per_minute: tokens of texts that models may read for it at the routes that count them, over any longer
            time and at once; None for no limit.
        priority: 1 (served first) to 9, where requests have to wait.
        admin: whether it may control models and read what concerns all clients.
        metrics: whether it may read the gateway's metrics, as Prometheus does; an admin may.
        feedback: whether it may say which answers to it were correct; an admin may.
        created: when, in UTC.
        expires: from when on it is worth nothing, in ISO 8601 with a time zone; "" for never.
    """

    id: str
    name: str
    digest: str
    models: tuple[str, ...] = ("*",)
    rate: float | None = None
    burst: int | None = None
    tokens_per_minute: int | None = None
    priority: int = 5
    admin: bool = False
    metrics: bool = False
    feedback: bool = False
    created: str = ""
    expires: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not NAME.fullmatch(self.name):
            _refuse(f"its name is {self.name!r}", "take letters, digits and _ . @ -, 64 at most")
        if not isinstance(self.id, str) or len(self.id) > MOST_ID:
            _refuse(f"the id of {self.name} is {self.id!r}", "add keys with `serve keys add`")
        if not isinstance(self.digest, str) or not re.fullmatch("[0-9a-f]{64}", self.digest):
            _refuse(f"the digest of {self.name} is no SHA-256", "add keys with `serve keys add`")
        if not self.models or not all(isinstance(model, str) and model for model in self.models):
            _refuse(f"{self.name} may ask no model", "name models or patterns, or * for all")
        if self.rate is not None and not (_number(self.rate) and 0 < self.rate < 1e9):
            _refuse(f"the rate of {self.name} is {self.rate!r}", "give requests a second, above 0")
        if self.burst is not None and not (type(self.burst) is int and 1 <= self.burst < 1e9):
            _refuse(f"the burst of {self.name} is {self.burst!r}", "give a whole number of requests, from 1")
        if self.burst is not None and self.rate is None:
            _refuse(f"{self.name} has a burst without a rate", "give a rate, too")
        if self.tokens_per_minute is not None and not (
            type(self.tokens_per_minute) is int and 1 <= self.tokens_per_minute < 1e12
        ):
            _refuse(
                f"the tokens_per_minute of {self.name} are {self.tokens_per_minute!r}",
                "give a whole number of tokens, from 1",
            )
        if type(self.priority) is not int or not 1 <= self.priority <= LOWEST:
            _refuse(f"the priority of {self.name} is {self.priority!r}", f"give 1 (first) to {LOWEST}")
        try:
            self.expires_at  # noqa: B018  is read for what it raises
        except (TypeError, ValueError):
            _refuse(
                f"{self.name} expires at {self.expires!r}", "give a date with a time zone, as 2030-01-31T00:00:00+00:00"
            )
        for right in ("admin", "metrics", "feedback"):
            if type(getattr(self, right)) is not bool:
                _refuse(f"{right} of {self.name} is {getattr(self, right)!r}", "give true or false")

    @property
    def expires_at(self) -> float | None:
        """The same in seconds since 1970; None for never.

        Raises:
            ValueError: it is no date, or has no time zone.
        """
        if not self.expires:
            return None
        date = datetime.fromisoformat(self.expires)
        if date.tzinfo is None:
            raise ValueError("it has no time zone")
        return date.timestamp()


def digest_of(key: bytes) -> bytes:
    """What a key is looked up by."""
    return hashlib.sha256(key).digest()


def in_days(days: float) -> str:
    """A date so many days from now, as `Key.expires` has it; raises ServerError."""
    try:
        if not days > 0:
            raise ValueError("give more than 0")
        return (datetime.now(UTC) + timedelta(days=days)).isoformat(timespec="seconds")
    except (OverflowError, ValueError) as err:
        raise ServerError(f"a key can't hold for {days:g} days", why=str(err), mend="give fewer, above 0") from err


def read_keys(path: Path) -> list[Key]:
    """The keys of a file.

    Raises:
        ServerError: it is missing, no file of keys, or other users may have a say in it (`check_ours`).
    """
    try:
        check_ours(path)
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as err:
        raise ServerError(
            f"can't read the keys in {path}", why=err.strerror or str(err), mend="make one with `serve keys add`"
        ) from err
    except (RecursionError, ValueError) as err:
        raise ServerError(f"can't read the keys in {path}", why=f"not JSON: {err}", mend="mend that line") from err
    return _parse(path, data)


def add_key(path: Path, name: str, **given: Any) -> tuple[str, Key]:
    """Make a key and store its digest.

    Args:
        path: the file; made, readable by its owner alone, where there is none.
        name: whose it is; no other key may have it.
        given: fields of `Key`: models, rate, burst, tokens_per_minute, priority, admin, metrics, feedback,
            expires.

    Returns:
        The key itself, which is nowhere else, and what was stored.

    Raises:
        ServerError: a value that can't work, a name that is taken, or a file that can't be written.
    """
    secret = f"sk-{secrets.token_hex(4)}-{secrets.token_urlsafe(32)}"
    key = Key(
        id=secret[:11],
        name=name,
        digest=digest_of(secret.encode()).hex(),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        **given,
    )
    with _locked(path):
        keys = read_keys(path) if path.exists() else []
        if any(other.name == name for other in keys):
            raise ServerError(
                f"can't add a key for {name}",
                why="it has one",
                mend=f"choose another name, or `serve keys revoke {name}`",
            )
        _write(path, [*keys, key])
    return secret, key


def revoke_key(path: Path, which: str) -> Key:
    """Take a key away, by its id or name.

    Raises:
        ServerError: there is none, or the file can't be written.
    """
    with _locked(path):
        keys = read_keys(path)
        for key in keys:
            if which in (key.id, key.name):
                _write(path, [other for other in keys if other is not key])
                return key
    known = ", ".join(key.name for key in keys) or "none"
    raise ServerError(f"can't revoke {which}", why=f"the file has these keys: {known}", mend="name one of them")


def _parse(path: Path, data: Any) -> list[Key]:
    names = {field.name for field in fields(Key)}
    if not isinstance(data, dict) or data.get("format") != FORMAT or not isinstance(data.get("keys"), list):
        raise ServerError(
            f"can't read the keys in {path}", why=f"it is no file of keys of format {FORMAT}",
            mend="make one with `serve keys add`",
        )  # fmt: skip
    keys = []
    for item in data["keys"]:
        if not isinstance(item, dict) or not {"id", "name", "digest"} <= item.keys() <= names:
            wrong = sorted(item.keys() - names) if isinstance(item, dict) else item
            _refuse(f"an entry has unknown or missing fields: {wrong}", "add keys with `serve keys add`")
        if not item["id"]:
            _refuse(f"the key {item['name']!r} has no id", "add keys with `serve keys add`")
        if not isinstance(item.get("models", []), list):
            _refuse(f"the models of {item['name']} are no list", 'write them as ["digits"]')
        keys.append(Key(**{**item, "models": tuple(item.get("models", ("*",)))}))
    return keys


def _write(path: Path, keys: list[Key]) -> None:
    text = json.dumps({"format": FORMAT, "keys": [asdict(key) for key in keys]}, indent=2) + "\n"
    try:
        replace_file(path, text, mode=0o600)
    except OSError as err:
        raise _unwritable(path, err) from err


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One writer at a time."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = hold(path.parent)
    except OSError as err:
        raise _unwritable(path, err) from err
    try:
        yield
    finally:
        os.close(folder)


def _unwritable(path: Path, err: OSError) -> ServerError:
    mend = mend_of(err, "name a file in a folder of yours")
    return ServerError(f"can't write the keys to {path}", why=err.strerror or str(err), mend=mend)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _refuse(why: str, mend: str) -> None:
    raise ServerError("can't use the key", why=why, mend=mend)
