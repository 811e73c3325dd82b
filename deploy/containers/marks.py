"""Volumes of an application: what it says of itself where its pods are, and that it takes nobody else's.

What is said is in a volume's labels: Podman makes a volume with them at once, or not at all, and every checkout that
changes this application sees them.
"""

from __future__ import annotations

import base64
import binascii
import json

from compress.errors import ServerError
from deploy.containers.application import PART_OF
from deploy.containers.engine import Engine

__all__ = [
    "FOLDER", "is_up", "is_volume", "keep_signer", "keys_folder", "make_volume", "mark_up", "remove_volume", "signer",
    "unmark",
]  # fmt: skip

UP, SIGNER = "up", "signer"  # NAME-up, NAME-signer
PEM = "compress-serve/signer"
FOLDER = "compress-serve/keys"  # of NAME-keys: where the clients' keys are


def make_volume(engine: Engine, name: str, volume: str, **labels: str) -> None:
    """Make one with the application's label, unless it is there.

    Args:
        engine: Podman.
        name: of the application.
        volume: the whole name of it.
        labels: what else it says.

    Raises:
        ServerError: somebody else made one of that name.
    """
    if not _theirs(engine, name, volume):
        words = [word for key, text in {PART_OF: name, **labels}.items() for word in ("--label", f"{key}={text}")]
        engine.run("volume", "create", *words, volume)


def remove_volume(engine: Engine, name: str, volume: str) -> None:
    """Remove one of the application's, where it is there.

    Raises:
        ServerError: somebody else made it, or uses it.
    """
    if _theirs(engine, name, volume):
        engine.run("volume", "rm", volume)


def is_volume(engine: Engine, name: str, volume: str) -> bool:
    """Whether the application has one of that name."""
    return (_labels(engine, volume) or {}).get(PART_OF) == name


def mark_up(engine: Engine, name: str) -> None:
    """Say that all has come up."""
    make_volume(engine, name, f"{name}-{UP}")


def is_up(engine: Engine, name: str) -> bool:
    """Whether all had come up, and nobody has begun to take it down."""
    return is_volume(engine, name, f"{name}-{UP}")


def unmark(engine: Engine, name: str) -> None:
    """Say nothing any more; whatever refuses."""
    for part in (UP, SIGNER):
        if is_volume(engine, name, f"{name}-{part}"):
            engine.run("volume", "rm", f"{name}-{part}", check=False)


def keep_signer(engine: Engine, name: str, pem: str) -> None:
    """Keep whose signature is asked for as long as it is served; "" where none is.

    One that is killed in between leaves none, which is told as unknown.
    """
    if signer(engine, name) != pem:
        remove_volume(engine, name, f"{name}-{SIGNER}")
        make_volume(engine, name, f"{name}-{SIGNER}", **{PEM: base64.b64encode(pem.encode()).decode()})


def signer(engine: Engine, name: str) -> str | None:
    """Whose signature is asked for, as PEM; "" where none is, None where that is not known."""
    labels = _labels(engine, f"{name}-{SIGNER}") or {}
    if labels.get(PART_OF) != name or PEM not in labels:
        return None
    try:
        return base64.b64decode(labels[PEM], validate=True).decode("ascii")
    except (binascii.Error, UnicodeDecodeError):
        return None


def keys_folder(engine: Engine, name: str) -> str:
    """Where the keys stand that clients have; "" where that is not known."""
    return (_labels(engine, f"{name}-keys") or {}).get(FOLDER, "")


def _theirs(engine: Engine, name: str, volume: str) -> bool:
    """Whether it is there; refused where it is another's."""
    labels = _labels(engine, volume)
    if labels is not None and labels.get(PART_OF) != name:
        raise ServerError(
            f"can't bring {name} up",
            why=f"Podman has a volume {volume} that this application has not made",
            mend=f"podman volume rm {volume}; or another --name",
        )
    return labels is not None


def _labels(engine: Engine, volume: str) -> dict[str, str] | None:
    """None where there is no volume of that very name: Podman takes the beginning of another's for its name, too."""
    found = engine.run("volume", "inspect", volume, check=False)
    (told,) = json.loads(found.stdout) if found.returncode == 0 else ({},)
    return dict(told.get("Labels") or {}) if told.get("Name") == volume else None
