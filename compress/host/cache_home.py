"""Where a user's caches lie."""

from __future__ import annotations

import os
import pwd
from collections.abc import Mapping
from pathlib import Path

__all__ = ["NO_HOME", "cache_home"]

NO_HOME = "neither XDG_CACHE_HOME nor HOME says where, and this user is in no list of users (passwd)"


def cache_home(environ: Mapping[str, str] = os.environ) -> Path | None:
    """XDG_CACHE_HOME, else .cache in the home folder; None where the user has none, as in a container.

    Args:
        environ: of the process. A relative XDG_CACHE_HOME is passed over, as its convention is.
    """
    said = Path(environ.get("XDG_CACHE_HOME", ""))
    if said.is_absolute():
        return said
    home = environ.get("HOME")
    if not home:
        try:
            home = pwd.getpwuid(os.getuid()).pw_dir
        except KeyError:
            return None
    return Path(home) / ".cache"
