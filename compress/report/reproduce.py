"""reproduce.sh: the very command of a run, after its inputs have been found unchanged."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from compress.data.images import SUFFIXES

__all__ = ["script"]

NAMED = "\\( " + " -o ".join(f"-iname '?*{ending}'" for ending in SUFFIXES) + " \\)"  # as Path.suffix has it


def script(
    command: str,
    folder: Path,
    inputs: Mapping[Path, str],
    versions: Mapping[str, str],
    listings: Mapping[tuple[Path, str], int] = MappingProxyType({}),
    images: Mapping[Path, int] = MappingProxyType({}),
    unseen: Sequence[str] = (),
) -> str:
    """A shell script that checks the inputs' SHA-256 and runs the command in the folder it was run in.

    With the files of a folder all there and unchanged, as many of them as there were says that none came to them.

    Any path goes: each stands quoted in a line of its own, and is read through a redirection, which takes no name for
    an option. Bytes that are no UTF-8 are Python's surrogates here; `os.fsencode` gives them back.

    Args:
        command: as a shell would take it.
        folder: where it was run; another can be named as the script's argument.
        inputs: files that went in, with their hashes.
        versions: releases of the packages that decide the result, as a comment.
        listings: how many files of an ending, as ".npz", a folder that went in holds.
        images: how many images such a folder holds, those in its folders too.
        unseen: what went in and can't be compared, in words: the script says it.
    """
    checks = "\n".join(
        [
            *(f"same {digest} {shlex.quote(str(path))}" for path, digest in inputs.items()),
            *(f"holds {count} {ending} {shlex.quote(str(path))}" for (path, ending), count in listings.items()),
            *(f"pictures {count} {shlex.quote(str(path))}" for path, count in images.items()),
            *(f"unseen {shlex.quote(words)}" for words in unseen),
        ]
    )
    packages = " ".join(f"{name}=={version}" for name, version in versions.items()).replace("\n", " ")
    return f"""#!/bin/sh
# Runs again what wrote this folder. Usage: reproduce.sh [FOLDER], by default where it was run.
# With {packages}
set -eu
folder={shlex.quote(str(folder))}
CDPATH= cd -- "${{1:-$folder}}"
same() {{
    [ "$(sha256sum <"$2" | cut -c 1-64)" = "$1" ] && return
    printf '%s is not what it was\\n' "$2" >&2
    exit 1
}}
holds() {{
    found=0
    for path in "$3"/*"$2" "$3"/.*"$2" "$3/$2"; do
        if [ -e "$path" ] || [ -L "$path" ]; then found=$((found + 1)); fi
    done
    [ "$found" = "$1" ] && return
    printf '%s has not as many files *%s as it had: %s, not %s\\n' "$3" "$2" "$found" "$1" >&2
    exit 1
}}
pictures() {{
    case $2 in /*) path=$2 ;; *) path=./$2 ;; esac
    found=$(find -L "$path" -mindepth 1 -maxdepth 2 {NAMED} ! -name '._*' ! -type d -exec printf . \\; | wc -c)
    [ "$found" -eq "$1" ] && return
    printf '%s has not as many images as it had: %s, not %s\n' "$2" "$found" "$1" >&2
    exit 1
}}
unseen() {{
    printf '! %s\n' "$1" >&2
}}
{checks}
# What an earlier run made is not taken again, of the cache or beside the result.
export COMPRESS_CACHE_GB=0 "COMPRESS_AFRESH=$(date +%s)"
{command}
"""
