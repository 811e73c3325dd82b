"""What a workflow's file says: its jobs' steps, and the values that GitHub puts into them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

__all__ = ["Step", "filled", "read_steps"]

EXPRESSION = re.compile(r"\$\{\{\s*(.+?)\s*\}\}")
NAME = re.compile(r"[A-Za-z_][\w.-]*")
# What a workflow, a job and a step may say: what is not here would be left out in silence.
WORKFLOW = {"name", True, "permissions", "concurrency", "env", "jobs"}  # YAML 1.1 takes the key `on` for true
JOB = {"runs-on", "container", "timeout-minutes", "needs", "permissions", "outputs", "environment", "env", "steps"}
STEP = {"id", "name", "uses", "with", "run", "env"}


@dataclass(frozen=True)
class Step:
    """One step of a job.

    Attributes:
        workflow, job: where it stands.
        uses: the action without its version; "" for shell lines.
        run: the shell lines; "" for an action.
        env: of workflow, job and step.
        inputs: of the action.
        shell: what GitHub runs the lines with: in a container it is sh, else bash; either ends at the first failure.
    """

    workflow: str
    job: str
    uses: str
    run: str
    env: Mapping[str, str]
    inputs: Mapping[str, Any]
    shell: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.workflow}/{self.job}: {self.uses or self.run.strip().splitlines()[0]}"


def read_steps(path: Path) -> list[Step]:
    """Every step of a workflow, in the jobs' order.

    Raises:
        ValueError: there is a setting that is not known here.
    """
    found = []
    whole = yaml.safe_load(path.read_text())
    _known(whole, WORKFLOW, path.name)
    for job, told in whole["jobs"].items():
        _known(told, JOB, f"{path.name}: {job}")
        shell = ("sh", "-e") if "container" in told else ("bash", "-e")
        for step in told["steps"]:
            _known(step, STEP, f"{path.name}: a step of {job}")
            uses = step.get("uses", "").partition("@")[0]
            env = {key: str(value) for each in (whole, told, step) for key, value in each.get("env", {}).items()}
            found.append(Step(path.stem, job, uses, step.get("run", ""), env, step.get("with", {}), shell))
    return found


def _known(told: Mapping[Any, Any], names: set[Any], where: str) -> None:
    if unknown := told.keys() - names:
        raise ValueError(f"{where} has {', '.join(sorted(map(str, unknown)))}")


def filled(text: str, values: Mapping[str, str]) -> str:
    """A text with its expressions' values; the first that is there of those that `||` joins.

    Raises:
        ValueError: an expression is of another kind, or its name has no value here.
    """

    def of(found: re.Match[str]) -> str:
        for part in found[1].split("||"):
            word = part.strip()
            if word.startswith("'") and word.endswith("'"):
                return word[1:-1]
            if not NAME.fullmatch(word):
                break
            if values.get(word):
                return values[word]
        raise ValueError(f"{found[0]} has no value here")

    return EXPRESSION.sub(of, text)
