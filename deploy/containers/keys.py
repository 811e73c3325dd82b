"""Keys of a client and of Prometheus, made once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from compress.errors import ServerError
from compress.vetting.replace import mend_of, replace_file
from serve.gateway.access.keys import add_key, digest_of, read_keys, revoke_key

__all__ = ["is_known", "make_keys"]

KEYS: dict[str, tuple[str, dict[str, Any]]] = {
    "client": ("client-key", {}),
    "prometheus": ("metrics-key", {"metrics": True, "models": ("none",)}),
}


def make_keys(folder: Path) -> None:
    """Write keys.json, which the gateway reads, client-key and metrics-key, as far as they don't fit together.

    A key is known once, and its file comes last: where that is missing, nobody has the key that stands in keys.json,
    and a new one takes its place. Other keys of keys.json stay, and one that was revoked is not made again.

    Raises:
        ServerError: they can't be written, or keys.json is something else.
    """
    keys = folder / "keys.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not keys.exists():
            for file, _ in KEYS.values():
                (folder / file).unlink(missing_ok=True)
        for name, (file, given) in KEYS.items():
            path = folder / file
            stored = {key.name: key.digest for key in read_keys(keys)} if keys.exists() else {}
            if path.exists():
                if stored.get(name) in (None, digest_of(path.read_bytes().strip()).hex()):
                    continue
                path.unlink()
            if name in stored:
                revoke_key(keys, name)
            secret, _ = add_key(keys, name, **given)
            replace_file(path, f"{secret}\n", mode=0o600)
    except OSError as err:
        mend = mend_of(err, f"make {folder} a folder that you may write")
        raise ServerError(f"can't write keys into {folder}", why=str(err), mend=mend) from err


def is_known(folder: Path, name: str) -> bool:
    """Whether keys.json has the key of a name."""
    return any(key.name == name for key in read_keys(folder / "keys.json"))
