"""Ask a model through a gateway, from the command line."""

from __future__ import annotations

import json
import mimetypes
from pathlib import Path
from typing import Any
from urllib.parse import quote

from compress.errors import ServerError
from compress.vetting.texts import read_bytes
from serve.config.named import LARGEST_DATA
from serve.http.message import Address
from serve.http.once import ask_once

__all__ = ["config_of", "infer_content", "infer_file", "rollouts_of"]

NO_SUCH_PATH = (400, 404, 405)


def infer_file(url: str, model: str, path: Path, *, timeout_s: float = 30.0, key: str = "") -> dict[str, Any]:
    """Send a file to a gateway's /predict/{model}.

    A .json file holds values by input name; any other is the content of the model's one BYTES input.

    Args:
        url: the gateway, http://host:port.
        timeout_s: for each step of the exchange, in seconds.
        key: where the gateway asks for one.

    Returns:
        The answer: "model", "version" and "outputs".

    Raises:
        ServerError: the file can't be read, the gateway can't be reached, or it refuses.
    """
    try:
        content = read_bytes(path, LARGEST_DATA, named=True)
    except (OSError, ValueError) as err:
        why = getattr(err, "strerror", None) or str(err)
        raise ServerError(f"can't read {path}", why=why, mend="name a file to send") from err
    media = mimetypes.guess_type(path.name)[0] or ""
    if media != "application/json" and not media.startswith("image/"):
        media = "application/octet-stream"
    return infer_content(url, model, content, media, timeout_s=timeout_s, key=key)


def infer_content(
    url: str, model: str, content: bytes, content_type: str, *, timeout_s: float = 30.0, key: str = ""
) -> dict[str, Any]:
    """Send bytes to a gateway's /predict/{model}; otherwise as `infer_file`."""
    headers = {"Content-Type": content_type}
    status, body = _ask(url, "POST", f"/predict/{quote(model, safe='')}", content, headers, timeout_s, key)
    if status in NO_SUCH_PATH and _is_triton(url, body, timeout_s):
        raise ServerError(
            f"can't ask {url} for {model!r}",
            why="that is Triton's own port, where no files are taken",
            mend="name the gateway with --url: `serve up` shows its address (http://127.0.0.1:8080 by default)",
        )
    return _read(status, body, model)


def _is_triton(url: str, body: bytes, timeout_s: float) -> bool:
    """Whether a Triton answered by itself: a gateway says why, passes /v2 on, and knows /rollouts."""
    if b'"why"' in body or b'"mend"' in body:
        return False
    try:
        status, told = _ask(url, "GET", "/v2", b"", {}, timeout_s, "")
        if status != 200 or json.loads(told)["name"] != "triton":
            return False
        return _ask(url, "GET", "/rollouts", b"", {}, timeout_s, "")[0] in NO_SUCH_PATH
    except (ServerError, ValueError, KeyError, TypeError):
        return False


def config_of(
    url: str, model: str, version: str | None = None, *, timeout_s: float = 30.0, key: str = ""
) -> dict[str, Any]:
    """A model's configuration as Triton has it, through a gateway; arguments and errors as `infer_file`."""
    path = f"/v2/models/{quote(model, safe='')}" + (f"/versions/{quote(version, safe='')}" if version else "")
    return _read(*_ask(url, "GET", f"{path}/config", b"", {}, timeout_s, key), model)


def rollouts_of(url: str, *, timeout_s: float = 30.0, key: str = "") -> list[dict[str, Any]]:
    """The rollouts that decide what a gateway serves; arguments and errors as `infer_file`."""
    status, body = _ask(url, "GET", "/rollouts", b"", {}, timeout_s, key)
    try:
        rows = json.loads(body) if status == 200 else None
    except ValueError:
        rows = None
    if not isinstance(rows, list):
        raise ServerError(
            f"the gateway at {url} tells of no rollouts",
            why=f"it answered with status {status}",
            mend="is it a gateway of `serve` that listens there?",
        )
    return [row for row in rows if isinstance(row, dict)]


def _ask(
    url: str, method: str, path: str, content: bytes, headers: dict[str, str], timeout_s: float, key: str
) -> tuple[int, bytes]:
    """Status and body."""
    try:
        address = Address.parse(url)
    except ValueError as err:
        raise ServerError("can't ask the gateway", why=str(err), mend="name it as http://host:port") from err
    headers = headers | ({"Authorization": f"Bearer {key}"} if key else {})
    try:
        return ask_once(address, method, path, content, headers, timeout_s=timeout_s)
    except OSError as err:
        raise ServerError(
            f"can't reach the gateway at {url}",
            why=str(err) or type(err).__name__,
            mend="start it (`serve up` or `serve gateway`), or name the right one with --url",
        ) from err


def _read(status: int, body: bytes, model: str) -> dict[str, Any]:
    try:
        data = json.loads(body)
    except ValueError:
        data = None
    if status == 200 and isinstance(data, dict):
        return data
    said = data if isinstance(data, dict) else {}
    raise ServerError(
        str(said.get("error") or f"the model {model!r} gave no answer"),
        why=str(said.get("why") or f"the gateway answered with status {status}"),
        mend=str(said.get("mend") or "is it a gateway of `serve` that listens there?"),
    )
