"""Instances and threads chosen for a machine, and why they are so, beside them in config.pbtxt."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from compress.host.cores import Cores, cores_here
from serve.config.pbtxt import from_message, text_of
from serve.config.threads import Threads, choice, threads_of
from serve.pack.options import PackOptions

__all__ = ["fitted", "instances_of", "with_reason"]


def fitted(options: PackOptions) -> tuple[PackOptions, str]:
    """Options with the instances and threads that `cores` asks for, and who chose them, in words."""
    if options.cores is None:
        return options, "by --instances and --threads, or their defaults"
    if options.cores == "here":
        cores = cores_here()
        told = f"for {cores.told()}, by --cores here"
    else:
        cores = Cores((), options.cores, options.cores, None, "")
        told = f"by --cores {options.cores}"
    instances, threads = choice(cores)
    return replace(options, instances=instances, threads=threads, cores=None), told


def instances_of(message: Any) -> Threads | None:
    """What a protobuf message of config.pbtxt says of both."""
    return threads_of(from_message(message))


def with_reason(message: Any, chosen: str) -> str:
    """The text of config.pbtxt, with a comment before its instances: how many threads compute, and who chose that.

    Args:
        message: the configuration.
        chosen: in words, after a colon.
    """
    text, threads = text_of(message), threads_of(from_message(message))
    if threads is None:
        return text
    each = f"{threads.each} thread{'s' * (threads.each != 1)}" if threads.total else "every core"
    said = f"# {threads.instances} x {each}: {' '.join(chosen.split())}.\n"
    return re.sub(r"^instance_group", lambda found: said + found[0], text, count=1, flags=re.MULTILINE)
