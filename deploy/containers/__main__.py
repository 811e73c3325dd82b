"""`python -m deploy.containers build | up REPOSITORY | roll REPOSITORY | down | check`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from cyclopts import App

from compress.errors import ToolkitError
from deploy.containers.build import IMAGES, build_all, check_machine
from deploy.containers.engine import find_engine
from deploy.containers.stack import Stack

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build/containers"
MODELS = ROOT / "model_repository"
PLAYED = ("gateway", "triton-cpu", "prometheus")
app = App(name="python -m deploy.containers", help="Images, and the pods that Podman plays from them, on this machine.")


def _stack(gateway_port: int = 8080, prometheus_port: int = 9090) -> Stack:
    return Stack(find_engine(), FOLDER, gateway_port=gateway_port, prometheus_port=prometheus_port)


@app.command
def build(*names: str, repository: Path = MODELS) -> None:
    """Build images: all, or those that are named (gateway, triton-cpu, prometheus, compress, models).

    Parameters
    ----------
    names
        Of images.
    repository
        Whose hooks the Triton shall be able to run.
    """
    engine = find_engine()
    chosen = names or tuple(image.name for image in IMAGES)
    check_machine(engine, chosen, play=False)
    build_all(engine, chosen, repository, FOLDER)


@app.command
def up(repository: Path = MODELS, *, gateway_port: int = 8080, prometheus_port: int = 9090) -> None:
    """Triton, gateway and Prometheus for a model repository; build the images before.

    Parameters
    ----------
    repository
        What `serve pack` wrote.
    gateway_port
        On 127.0.0.1.
    prometheus_port
        On 127.0.0.1.
    """
    stack = _stack(gateway_port, prometheus_port)
    check_machine(stack.engine, (), play=True)
    stack.up(repository)
    print(f"gateway {stack.url}, Prometheus {stack.prometheus}; clients' key: SERVE_API_KEY=$(cat {FOLDER}/client-key)")


@app.command
def roll(repository: Path) -> None:
    """Put another repository in the place of the one that is served, without a pause.

    Parameters
    ----------
    repository
        What `serve pack` wrote.
    """
    print(f"{_stack().roll(repository)} serves now")


@app.command
def down() -> None:
    """Stop gateway, Prometheus and Triton, in this order; keys and releases stay."""
    _stack().down()


@app.command
def check(*, gateway_port: int = 8080, prometheus_port: int = 9090, twice: bool = True) -> None:
    """Build all, and prove it: see deploy/README.md.

    Parameters
    ----------
    gateway_port
        On 127.0.0.1.
    prometheus_port
        On 127.0.0.1.
    twice
        Build the images that serve once more, and compare them.
    """
    from deploy.containers.check import run

    engine = find_engine()
    check_machine(engine, [image.name for image in IMAGES], play=True)
    stack = _stack(gateway_port, prometheus_port)
    print(json.dumps(run(stack, twice=twice)))


if __name__ == "__main__":
    try:
        app()
    except ToolkitError as err:
        print(err, file=sys.stderr)
        sys.exit(2)
