"""`python -m deploy.workflows [NAME …]`: run what can be run of the workflows, and name what can't."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from cyclopts import App

from compress.errors import ToolkitError
from deploy.workflows.run import DONE, FOLDER, Runner

app = App(name="python -m deploy.workflows", help="The steps of .github/workflows, in fresh clones on this machine.")


@app.default
def run(*names: str, whole: bool = False) -> None:
    """Run them in order; the first that fails ends it.

    Parameters
    ----------
    names
        Of workflows; all by default.
    whole
        The steps that CI runs anyway, too, in environments that make and pip fill: an hour, and gigabytes.
    """
    paths = [FOLDER / f"{name}.yml" for name in names] or sorted(FOLDER.glob("*.yml"))
    left = []
    with tempfile.TemporaryDirectory(prefix="workflows-") as folder:
        runner = Runner(Path(folder), whole=whole)
        for path in paths:
            try:
                for step, why in runner.workflow(path):
                    print(f"== {step}: {f'not run: {why}' if why else DONE.get(step.uses, 'run')}", flush=True)
                    left += [f"{step}: {why}"] if why else []
            except (subprocess.CalledProcessError, ToolkitError, ValueError, OSError) as err:
                print(f"== {path.name}: {err}", file=sys.stderr)
                sys.exit(1)
    print("\nNot run here:", *left, sep="\n  ")


if __name__ == "__main__":
    app()
