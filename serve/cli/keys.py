"""`serve keys`: who may ask the gateway."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter
from rich.console import Console
from rich.table import Table

__all__ = ["keys"]

keys = App(name="keys", help="Who may ask the gateway: make, list and revoke API keys.")
out = Console(highlight=False)
told = Console(highlight=False, stderr=True)

File = Annotated[Path, Parameter(name=["--file", "-f"])]
DEFAULT = Path("keys.json")


@keys.command
def add(
    name: str,
    *,
    file: File = DEFAULT,
    model: tuple[str, ...] = ("*",),
    rate: float | None = None,
    burst: int | None = None,
    tokens_per_minute: int | None = None,
    priority: int = 5,
    admin: bool = False,
    metrics: bool = False,
    feedback: bool = False,
    days: float | None = None,
) -> None:
    """Make a key and print it, this once: the file keeps its digest only. A running gateway takes it within a second.

    Parameters
    ----------
    name
        Whose it is; shown in metrics and logs.
    file
        The file of keys, which `serve gateway --keys` reads.
    model
        A model it may ask, or a pattern such as digits*; may be given again.
    rate
        Requests a second that it may send; no limit by default.
    burst
        Requests that it may send at once; by default a second's worth.
    tokens_per_minute
        Tokens of texts that it may have read at /v1/embeddings and /v1/rerank; no limit by default.
    priority
        1 (served first) to 9, where requests have to wait.
    admin
        It may load and unload models, and read metrics and statistics of all.
    metrics
        It may read the gateway's metrics, as Prometheus does.
    feedback
        It may say which of the answers to it were correct, by which releases are judged.
    days
        From so many days on it is worth nothing; by default it holds until it is revoked.
    """
    from serve.gateway.access.keys import add_key, in_days

    secret, key = add_key(
        file, name, models=model, rate=rate, burst=burst, tokens_per_minute=tokens_per_minute, priority=priority,
        admin=admin, metrics=metrics, feedback=feedback, expires="" if days is None else in_days(days),
    )  # fmt: skip
    told.print(f"the key of {key.name}, {key.id}…, is in {file}; this is the only time that it is shown:", markup=False)
    print(secret)


@keys.command(name="list")
def list_(*, file: File = DEFAULT, json_: Annotated[bool, Parameter(name="--json")] = False) -> None:
    """Show the keys of a file, without what is secret.

    Parameters
    ----------
    file
        The file of keys.
    json_
        Print a list of {id, name, models, rate, burst, tokens_per_minute, priority, admin, metrics, feedback, created,
        expires}.
    """
    from serve.gateway.access.keys import read_keys

    found = read_keys(file)
    if json_:
        shown = [{name: value for name, value in vars(key).items() if name != "digest"} for key in found]
        print(json.dumps(shown, indent=2))
        return
    table = Table("name", "id", "models", "rate", "burst", "tokens/min", "priority", "rights", "created", "expires")
    for key in found:
        rate = "" if key.rate is None else f"{key.rate:g}/s"
        burst = "" if key.burst is None else str(key.burst)
        tokens = "" if key.tokens_per_minute is None else str(key.tokens_per_minute)
        rights = " ".join(right for right in ("admin", "metrics", "feedback") if getattr(key, right))
        table.add_row(
            key.name, key.id, " ".join(key.models), rate, burst, tokens, str(key.priority), rights, key.created,
            key.expires,
        )  # fmt: skip
    Console(highlight=False, width=None if sys.stdout.isatty() else 140).print(table)


@keys.command
def revoke(which: str, *, file: File = DEFAULT) -> None:
    """Take a key away; a running gateway refuses it within a second.

    Parameters
    ----------
    which
        Its name or id.
    file
        The file of keys.
    """
    from serve.gateway.access.keys import revoke_key

    key = revoke_key(file, which)
    out.print(f"the key of {key.name}, {key.id}…, is revoked", markup=False)
