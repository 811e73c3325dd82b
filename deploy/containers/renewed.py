"""Keys that were added or revoked, brought to a gateway that runs."""

from __future__ import annotations

from compress.errors import ServerError
from deploy.containers import marks
from deploy.containers.composed import Composed
from deploy.containers.stack import Stack
from deploy.containers.volumes import packed
from serve.gateway.access.keys import read_keys

__all__ = ["renew_keys"]


def renew_keys(serving: Stack | Composed) -> int:
    """Give the gateway `keys.json` as it is now; it looks each second.

    The file is replaced where the gateway has mounted it: in Podman's volume of that name, or in the copy for Docker.

    Returns:
        How many keys there are.

    Raises:
        ServerError: no gateway runs, or it has the keys of another folder: clients of those would be locked out.
        ConfigError: the file is none that a gateway would take; it goes on with the keys that it has.
    """
    with serving.held():
        runs = f"{serving.name}-gateway" in serving.pods() if isinstance(serving, Stack) else serving.health("gateway")
        if not runs:
            raise ServerError(
                "can't renew the gateway's keys",
                why="no gateway runs in containers",
                mend="python -m deploy.containers up REPOSITORY, which takes the keys as they are",
            )
        keys = serving.folder / "keys.json"
        count = len(read_keys(keys))
        if isinstance(serving, Composed):
            (serving.folder / "secrets/keys.json").write_bytes(keys.read_bytes())  # Docker mounts the file itself
            return count
        folder = marks.keys_folder(serving.engine, serving.name)
        if folder and folder != str(serving.folder.resolve()):
            raise ServerError(
                "can't renew the gateway's keys",
                why=f"clients have those of {folder}, as it was brought up from there",
                mend="the same command from there; or take it down, and bring it up from here",
            )
        with packed(keys, "keys.json", serving.folder / f"{serving.name}-keys.tar") as archive:
            serving.engine.run("volume", "import", f"{serving.name}-keys", str(archive))
        return count
