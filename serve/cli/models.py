"""`serve models`: parse, call, print."""

from __future__ import annotations

from pathlib import Path

from cyclopts import App
from rich.console import Console
from rich.markup import escape
from rich.table import Table

__all__ = ["models"]

models = App(name="models", help="List, load and unload models of a running Triton; go back to an earlier version.")
TRITON = "http://127.0.0.1:8000"
out = Console(highlight=False, soft_wrap=True)


@models.command(name="list")
def list_(*, url: str = TRITON) -> None:
    """Say which models a running Triton knows, and which versions are ready.

    Parameters
    ----------
    url
        Triton's own HTTP endpoint.
    """
    from serve.triton.control import list_models

    table = Table("model", "version", "state", "why not")
    for row in list_models(url):
        table.add_row(row.name, row.version, row.state or "not loaded", escape(row.reason))
    out.print(table)


@models.command
def load(name: str, *, url: str = TRITON) -> None:
    """Load a model into a running Triton, or load it again with what its folder holds now.

    Parameters
    ----------
    name
        Of the model; the parts of a packed one are loaded first.
    url
        Triton's own HTTP endpoint.
    """
    from serve.triton.control import list_models, load_model

    load_model(url, name)
    ready = [row.version for row in list_models(url) if row.name == name and row.state == "READY"]
    out.print(f"{name} is served at version {', '.join(ready)}")


@models.command
def unload(name: str, *, url: str = TRITON) -> None:
    """Take a model out of a running Triton; requests in flight are answered first.

    Parameters
    ----------
    name
        Of the model.
    url
        Triton's own HTTP endpoint.
    """
    from serve.triton.control import unload_model

    unload_model(url, name)
    out.print(f"{name} is no longer served")


@models.command
def rollback(name: str, *, repository: Path, url: str | None = None) -> None:
    """Go back to the version before the one that is served.

    Parameters
    ----------
    name
        That the model was packed under.
    repository
        Where it stands.
    url
        Triton's own HTTP endpoint, to load it at once.
    """
    from serve.repository.versions import roll_back
    from serve.triton.control import load_model

    now, before = roll_back(repository, name)
    if url is not None:
        load_model(url, name)
    out.print(f"{name}: version {before} in place of {now}" + ("" if url else ", from the next load or start on"))
