"""Triton's model control: what is loaded, loading and unloading. Only a Triton in explicit mode allows the last two."""

from __future__ import annotations

import http.client
import json
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlsplit

from compress.errors import ServerError

__all__ = ["Loaded", "list_models", "load_alone", "load_model", "unload_model"]

TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Loaded:
    """A model version that Triton knows.

    Attributes:
        name, version: of the model; version is "" where none was ever loaded.
        state: "READY", "UNAVAILABLE", "LOADING", "UNLOADING" or "".
        reason: why it is not ready.
    """

    name: str
    version: str
    state: str
    reason: str


def list_models(url: str) -> list[Loaded]:
    """What stands in the repository, and what of it is loaded.

    Args:
        url: of Triton's own HTTP endpoint.

    Raises:
        ServerError: there is no Triton.
    """
    found = _post(url, "/v2/repository/index")
    return [Loaded(row["name"], row.get("version", ""), row.get("state", ""), row.get("reason", "")) for row in found]


def load_model(url: str, name: str) -> None:
    """Load a model, or load it again with what its folder holds now; requests go on meanwhile.

    The parts of a packed model are loaded first, the one that is asked for last.

    Raises:
        ServerError: Triton refuses; what was loaded before stays.
    """
    known = {model.name for model in list_models(url)}
    for part in (*(f"{name}{suffix}" for suffix in ("_preprocess", "_network", "_postprocess")), name):
        if part in known or part == name:
            load_alone(url, part)


def load_alone(url: str, name: str) -> None:
    """Load one model, or load it again, and nothing else.

    Raises:
        ServerError: Triton refuses; what was loaded before stays.
    """
    _post(url, f"/v2/repository/models/{quote(name, safe='')}/load")


def unload_model(url: str, name: str) -> None:
    """Unload a model and what it is made of; requests in flight are answered first.

    Raises:
        ServerError: Triton refuses.
    """
    _post(url, f"/v2/repository/models/{quote(name, safe='')}/unload", {"parameters": {"unload_dependents": True}})


def _post(url: str, path: str, body: dict[str, Any] | None = None) -> Any:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "127.0.0.1", parts.port or 8000, timeout=TIMEOUT_S)
    try:
        connection.request("POST", path, json.dumps(body or {}), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        text = answer.read().decode("utf-8", errors="replace")
    except (OSError, http.client.HTTPException) as err:
        raise ServerError(
            f"can't reach Triton at {url}", why=str(err) or type(err).__name__,
            mend="start it, or give --url: of Triton itself, not of the gateway",
        ) from err  # fmt: skip
    finally:
        connection.close()
    try:
        found = json.loads(text) if text else {}
    except ValueError:
        found = {}
    if answer.status == 200:
        return found
    reason = found.get("error", "") if isinstance(found, dict) else ""
    reason = reason.partition("\n\nAt:\n")[0].strip().rstrip(";") or f"it answers {answer.status}"
    mend = "start it with `serve up --model-control`" if "explicit" in reason else "see `serve lint` of its repository"
    raise ServerError(f"Triton refuses {path}", why=reason, mend=mend)
