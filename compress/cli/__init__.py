"""The `compress` command: parse, call, print. `commands` has those that make something, `looking` those that tell."""

from compress.cli.commands import app, main

__all__ = ["app", "main"]
