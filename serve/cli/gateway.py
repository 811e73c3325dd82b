"""`serve gateway`: the gateway alone, in front of Tritons that run already."""

from __future__ import annotations

import dataclasses
import os
from contextlib import suppress
from pathlib import Path
from typing import Annotated

from cyclopts import App, ArgumentCollection, Parameter
from rich.console import Console

from serve.config.flags import fill_flags
from serve.gateway.settings import ModelSettings, Settings

__all__ = ["gateway", "settings_of_file"]

out = Console(highlight=False)


def gateway(
    *, config: Path | None = None, check: bool = False, settings: Annotated[Settings | None, Parameter(name="*")] = None
) -> None:
    """Start the gateway alone, in front of Tritons that already run.

    Each flag can also be set in the file of --config (max_body_bytes = 1000000), and in the environment
    (SERVE_GATEWAY_MAX_BODY_BYTES); a flag comes before the environment, and that before the file.

    Parameters
    ----------
    config
        A TOML file of settings; tables [models.NAME] set those of single models.
    check
        Check settings, keys and certificate, say what holds, and end.
    """
    from serve.gateway.server import check_settings, run_gateway
    from serve.gateway.settings_file import read_settings

    settings = settings or Settings()
    if config is not None:
        tables = read_settings(config, {}).get("models", {})
        settings = dataclasses.replace(
            settings, models={name: ModelSettings(**table) for name, table in tables.items()}
        )
    if check:
        keys = check_settings(settings)
        for field in dataclasses.fields(settings):
            value = getattr(settings, field.name)
            print(f"{field.name:<18} {value if value or value == 0 else 'none'}")
        out.print(f"the settings can be used; {keys} keys are known" if settings.keys else "the settings can be used")
        return

    def ready(url: str) -> None:
        """What can't be told, to a disk that is full or a pipe that nobody reads, ends nothing."""
        with suppress(Exception, SystemExit):
            out.print(f"gateway  {url}   try it: {url}/docs")

    run_gateway(settings, on_ready=ready)


def settings_of_file(_app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Give each flag of `serve gateway` that was not given what file and environment say; cyclopts calls it.

    Raises:
        ServerError: the file can't be read, or one of them has a setting that there is not.
    """
    if commands != ("gateway",):
        return
    from serve.gateway.settings_file import read_settings

    config = next(argument for argument in arguments if "--config" in argument.names)
    path = Path(config.tokens[0].value) if config.tokens else None
    values = read_settings(path, os.environ)
    values.pop("models", None)
    fill_flags(arguments, values, str(path or "the environment"))
