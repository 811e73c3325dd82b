"""A long call that tells nothing of itself, told of while it goes on."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from compress.console.durations import duration

__all__ = ["told_meanwhile"]


@contextlib.contextmanager
def told_meanwhile(tell: Callable[[str], None], note: str, every: float) -> Iterator[None]:
    """Within it, tell time and again how long it has gone on.

    Args:
        tell: is given a line, in another thread.
        note: what goes on.
        every: seconds between two lines, and before the first.

    Raises:
        BaseException: of `tell`, once the call is over.
    """
    ended, begun = threading.Event(), time.monotonic()
    failed: list[BaseException] = []

    def work() -> None:
        while not ended.wait(every) and not failed:
            try:
                tell(f"{note} ({duration(time.monotonic() - begun)} so far)")
            except KeyboardInterrupt:  # which ends the main thread's work
                pass
            except BaseException as err:  # such as of a reader that is gone: the main thread's, too
                failed.append(err)

    worker = threading.Thread(target=work, name="meanwhile", daemon=True)
    worker.start()
    try:
        yield
    finally:
        ended.set()
        worker.join()
    if failed:
        raise failed[0]
