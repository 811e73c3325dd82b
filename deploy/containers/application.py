"""Where an application stands on this machine, whatever plays it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from compress.errors import ResourceError, ServerError
from compress.storage.files import locked
from compress.vetting.replace import mend_of
from deploy.containers.engine import Engine

__all__ = ["PART_OF", "Application"]

PART_OF = "app.kubernetes.io/part-of"
"""The label of what belongs to an application, by its name."""


@dataclass(frozen=True)
class Application:
    """One application on this machine.

    Attributes:
        engine: Podman or Docker.
        folder: for keys, and what is written for the engine.
        gateway_port: on 127.0.0.1.
        prometheus_port: on 127.0.0.1.
    """

    engine: Engine
    folder: Path
    gateway_port: int = 8080
    prometheus_port: int = 9090

    @property
    def url(self) -> str:
        """The gateway's."""
        return f"http://127.0.0.1:{self.gateway_port}"

    @property
    def prometheus(self) -> str:
        """The URL of Prometheus."""
        return f"http://127.0.0.1:{self.prometheus_port}"

    @property
    def key(self) -> str:
        """What clients show to the gateway."""
        return (self.folder / "client-key").read_text().strip()

    def places(self) -> list[Path]:
        """Folders that one command at a time holds, in this order."""
        return [self.folder]

    @contextmanager
    def held(self) -> Iterator[None]:
        """Alone, until the end: two that change what runs would each take the other's for what was there before.

        Raises:
            ServerError: another process changes it now (which one is told), or a folder can't be written.
        """
        with ExitStack() as kept:
            for place in self.places():
                _hold(kept, place)
            yield


def _hold(kept: ExitStack, place: Path) -> None:
    try:
        if not place.is_dir():
            place.parent.mkdir(parents=True, exist_ok=True)
            place.mkdir(mode=0o700, exist_ok=True)
        kept.enter_context(locked(place, inside=True))
    except ResourceError as err:
        if isinstance(err.__cause__, BlockingIOError):
            raise ServerError(
                "can't change what runs in containers while another command does",
                why=f"{place}: {err.why}",
                mend="wait until that process has ended, then the same command again",
            ) from None
        raise _unwritable(place, err.why, err.__cause__) from None
    except OSError as err:
        raise _unwritable(place, str(err), err) from None


def _unwritable(place: Path, why: str, error: BaseException | None) -> ServerError:
    mend = mend_of(error, f"make {place} a folder that you may write")
    return ServerError("can't change what runs in containers", why=why, mend=mend)
