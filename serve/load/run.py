"""The load test from options to result."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable

import uvloop

from serve.load.generator import Progress, generate
from serve.load.options import LoadOptions
from serve.load.report import write_json
from serve.load.result import LoadResult
from serve.load.target import find_target

__all__ = ["run_load"]


def run_load(options: LoadOptions, *, on_progress: Callable[[Progress], None] | None = None) -> LoadResult:
    """Find the target, send the load, measure, and write the result where `options.output` says.

    Ctrl-C ends it early, with the figures up to then.

    Args:
        on_progress: `show_progress` gives one.

    Raises:
        ServerError: the target can't be used, or the file can't be written.
    """
    result = uvloop.run(_run(options, on_progress))
    if options.output is not None:
        write_json(result, options.output)
    return result


async def _run(options: LoadOptions, on_progress: Callable[[Progress], None] | None) -> LoadResult:
    target = await find_target(options)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    ours = threading.current_thread() is threading.main_thread()
    if ours:
        loop.add_signal_handler(signal.SIGINT, stop.set)
    try:
        return await generate(target, options, stop=stop, on_progress=on_progress)
    finally:
        if ours:
            loop.remove_signal_handler(signal.SIGINT)
