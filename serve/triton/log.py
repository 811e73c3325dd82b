"""What Triton's log says in a few words: why it did not start."""

from __future__ import annotations

import json
import re

__all__ = ["failed_models", "failures"]

# severity and date, time, process, file:line] "message", the message escaped as in JSON
_LINE = re.compile(r'^(?P<severity>[EWF])\d{4} \S+ +\d+ [\w.]+:\d+\] (?P<message>".*")\s*$', re.MULTILINE)
_MODEL = re.compile(r"failed to load (?:model )?'(?P<model>[^']+)'(?: version \d+)?: (?P<reason>.+)", re.DOTALL)
_POLL = re.compile(r"Poll failed for model directory '(?P<model>[^']+)': (?P<reason>.+)", re.DOTALL)
_PROTOBUF = re.compile(r"Error parsing text-format inference\.ModelConfig: (.+)")
_START = re.compile(r"^(?:error: |failed to start )(.+)$", re.MULTILINE)
# Said on every machine without an NVIDIA driver, where they mean nothing.
_NOISE = re.compile(r"CUDA|Cuda|NVML|DCGM|pinned|unable to create stream")
_STATUS = re.compile(r"^(Internal|Invalid argument|Unavailable|Not found|Unknown|Unsupported|Already exists): ")
_HOOKS_FRAME = re.compile(r"hooks\.py\((\d+)\)")


def failures(log: str) -> list[str]:
    """Why models did not load, or the server did not start: one line each, without tracebacks and without noise.

    Args:
        log: what Triton wrote.

    Returns:
        "MODEL: reason" for each model at fault; what else went wrong when none is; empty when the log says nothing.
    """
    if by_model := failed_models(log):
        details = _PROTOBUF.findall(log)
        return [f"{model}: {reason}" for model, reason in by_model.items()] + details
    others = [_short(message) for message in _errors(log) if not _NOISE.search(message)]
    return list(dict.fromkeys(others)) or list(dict.fromkeys(_START.findall(log)))


def failed_models(log: str) -> dict[str, str]:
    """Why models did not load, by model."""
    by_model: dict[str, str] = {}
    for message in _errors(log):
        match = _MODEL.match(message) or _POLL.match(message)
        if match is not None:
            by_model.setdefault(match["model"], _short(match["reason"]))
    return by_model


def _errors(log: str) -> list[str]:
    return [_unescaped(match["message"]) for match in _LINE.finditer(log) if match["severity"] in "EF"]


def _unescaped(text: str) -> str:
    try:
        return str(json.loads(text, strict=False))
    except ValueError:
        return text.strip('"')


def _short(reason: str) -> str:
    """Without the status word and the traceback, of which only the line of the user's hooks is kept."""
    told, _, traceback = _STATUS.sub("", reason.strip()).partition("\n\nAt:\n")
    line = _HOOKS_FRAME.search(traceback)
    where = f" (hooks.py, line {line[1]})" if line else ""
    return " ".join(told.split()).rstrip(";") + where
