"""Triton's model control: what is loaded, loading and unloading. Only a Triton in explicit mode allows the last two."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal
from urllib.parse import quote

from compress.errors import ServerError
from serve.http.message import Address
from serve.http.once import ask_once

__all__ = ["Loaded", "control_call", "list_models", "load_alone", "load_model", "reload_alone", "tell", "unload_model"]

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


def list_models(url: str, control: Mapping[str, str] = MappingProxyType({})) -> list[Loaded]:
    """What stands in the repository, and what of it is loaded.

    A Triton whose model control belongs to another process tells what is loaded alone.

    Args:
        url: of Triton's own HTTP endpoint.
        control: headers that its model control asks for.

    Raises:
        ServerError: there is no Triton.
    """
    try:
        found = _post(url, "/v2/repository/index", control=control)
    except ServerError as err:
        if "restricted" not in err.why:
            raise
        stats = _post(url, "/v2/models/stats", method="GET")
        return [Loaded(row["name"], row.get("version", ""), "READY", "") for row in stats["model_stats"]]
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


def load_alone(url: str, name: str, control: Mapping[str, str] = MappingProxyType({})) -> None:
    """Load one model, or load it again, and nothing else.

    Args:
        url: of Triton's own HTTP endpoint.
        name: of the model.
        control: headers that its model control asks for.

    Raises:
        ServerError: Triton refuses; what was loaded before stays.
    """
    _post(url, f"/v2/repository/models/{quote(name, safe='')}/load", control=control)


async def reload_alone(grpc_address: str, name: str, control: Mapping[str, str]) -> None:
    """Take one model out and load it again, with processes of its own that are new; can be cancelled.

    Triton does not load a model again whose files are as they were. What is made of this model comes back with it.
    Over gRPC, as a load over HTTP holds one of Triton's few threads for HTTP, and with it all of its connections.

    Args:
        grpc_address: host:port of Triton's gRPC endpoint.
        name: of the model.
        control: headers that its model control asks for, as over HTTP.

    Raises:
        ServerError: Triton refuses; the model may then be out.
    """
    import grpc  # takes a while

    async with grpc.aio.insecure_channel(grpc_address) as channel:
        for act in ("Unload", "Load"):
            await control_call(channel, act, name, control, TIMEOUT_S)


async def control_call(
    channel: Any, act: Literal["Load", "Unload"], name: str, control: Mapping[str, str], timeout_s: float | None
) -> None:
    """Load or unload one model over gRPC, and nothing else.

    Args:
        channel: to Triton's gRPC endpoint.
        act: what it is to do.
        name, control: as for `reload_alone`.
        timeout_s: that it may take; None for as long as it takes.

    Raises:
        ServerError: Triton refuses, or can't be reached; its cause says which.
    """
    import grpc

    method, message, words = _call(channel, act, name, control)
    try:
        await method(message.SerializeToString(), metadata=words, timeout=timeout_s)
    except grpc.aio.AioRpcError as err:
        raise _refused_call(act, name, err) from err


def tell(
    grpc_address: str,
    act: Literal["Load", "Unload"],
    name: str,
    control: Mapping[str, str],
    on_call: Callable[[Callable[[], object]], object] = lambda _cancel: None,
) -> None:
    """Load one model, or unload one and what it is made of, however long that takes: over gRPC, as `reload_alone`.

    Args:
        grpc_address, name, control: as for `reload_alone`.
        act: what Triton is to do.
        on_call: is given what ends the wait, from another thread.

    Raises:
        ServerError: Triton refuses, and what was loaded before stays; or it can't be reached: the cause is an OSError.
        concurrent.futures.CancelledError: the wait was ended.
    """
    import grpc

    with grpc.insecure_channel(grpc_address) as channel:
        method, message, words = _call(channel, act, name, control)
        if act == "Unload":
            message.parameters["unload_dependents"].bool_param = True
        call = method.future(message.SerializeToString(), metadata=words)
        on_call(call.cancel)
        try:
            call.result()
        except grpc.FutureCancelledError:
            raise CancelledError from None
        except grpc.RpcError as err:
            if err.code() is grpc.StatusCode.UNAVAILABLE:
                told = err.details() or ""
                raise ServerError(
                    f"can't reach Triton at {grpc_address}", why=told, mend="look whether it runs"
                ) from OSError(told)
            raise _refused_call(act, name, err) from err


def _call(channel: Any, act: str, name: str, control: Mapping[str, str]) -> tuple[Any, Any, list[tuple[str, str]]]:
    """The method, its message, and the words that Triton asks for."""
    from tritonclient.grpc import service_pb2 as messages

    words = [(f"triton-grpc-protocol-{key}", value) for key, value in control.items()]
    message = getattr(messages, f"RepositoryModel{act}Request")(model_name=name)
    return channel.unary_unary(f"/inference.GRPCInferenceService/RepositoryModel{act}"), message, words


def _refused_call(act: str, name: str, err: Any) -> ServerError:
    return _refused(f"{act.lower()} of {name}", 500, json.dumps({"error": err.details() or ""}))


def unload_model(url: str, name: str, control: Mapping[str, str] = MappingProxyType({})) -> None:
    """Unload a model and what it is made of; requests in flight are answered first.

    Args:
        url, name, control: as for `load_alone`.

    Raises:
        ServerError: Triton refuses.
    """
    parameters = {"parameters": {"unload_dependents": True}}
    _post(url, f"/v2/repository/models/{quote(name, safe='')}/unload", parameters, control=control)


def _post(
    url: str,
    path: str,
    body: dict[str, Any] | None = None,
    *,
    control: Mapping[str, str] = MappingProxyType({}),
    method: str = "POST",
) -> Any:
    content = json.dumps(body or {}).encode() if method == "POST" else None
    headers = {"Content-Type": "application/json", **control}
    try:
        address = Address.parse(url if "://" in url else f"http://{url}", default_port=8000)
        status, answer = ask_once(address, method, path, content, headers, timeout_s=TIMEOUT_S)
    except (OSError, ValueError) as err:
        raise ServerError(
            f"can't reach Triton at {url}", why=str(err) or type(err).__name__,
            mend="start it, or give --url: of Triton itself, not of the gateway",
        ) from err  # fmt: skip
    text = answer.decode("utf-8", errors="replace")
    if status == 200:
        return json.loads(text) if text else {}
    raise _refused(path, status, text)


def _refused(path: str, status: int, text: str) -> ServerError:
    try:
        found = json.loads(text)
    except ValueError:
        found = {}
    if isinstance(found, dict) and "mend" in found:  # no Triton writes that
        return ServerError(
            f"can't control Triton through a gateway: it refuses {path}",
            why=": ".join(str(found[key]) for key in ("error", "why") if found.get(key)),
            mend="give --url of Triton itself, not of the gateway",
        )
    reason = found.get("error", "") if isinstance(found, dict) else ""
    reason = reason.partition("\n\nAt:\n")[0].strip().rstrip(";") or f"it answers {status}"
    closed = "explicit" in reason or "restricted" in reason
    mend = "start it with `serve up --model-control`" if closed else "see `serve lint` of its repository"
    return ServerError(f"Triton refuses {path}", why=reason, mend=mend)
