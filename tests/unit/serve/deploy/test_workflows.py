"""Every step of a workflow is run by `make workflows-check`, or named as one that is not; what stands in does its part."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.workflows.run import DONE, FOLDER, NOT_RUN, Runner, reason_not_to
from deploy.workflows.steps import Step, filled, read_steps

WORKFLOWS = sorted(FOLDER.glob("*.yml"))
ROOT = FOLDER.parents[1]


def step(run: str = "", uses: str = "", env: dict[str, str] | None = None, **inputs: Any) -> Step:
    return Step("a", "b", uses, run, env or {}, inputs, ("bash", "-e"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_every_step_is_run_or_named_with_why_not(path: Path, tmp_path: Path) -> None:
    steps = read_steps(path)
    assert steps
    values = Runner(tmp_path).values
    for each in steps:
        if not reason_not_to(each):
            assert bool(each.run) != (each.uses in DONE), each
            for text in (each.run, *each.env.values(), *map(str, each.inputs.values())):
                filled(text, values)


def test_what_is_named_as_not_run_is_in_a_workflow() -> None:
    steps = [each for path in WORKFLOWS for each in read_steps(path)]
    assert NOT_RUN.keys() == {each.uses or each.run.strip() for each in steps if reason_not_to(each)}
    assert DONE.keys() == {each.uses for each in steps if each.uses and not reason_not_to(each)}
    assert not any(reason_not_to(each, whole=True) for each in steps if each.run)


@pytest.mark.parametrize("setting", ["if", "working-directory", "shell", "continue-on-error"])
def test_a_setting_that_is_not_known_is_not_left_out_in_silence(tmp_path: Path, setting: str) -> None:
    for path in ((), ("jobs", "a"), ("jobs", "a", "steps", 0)):
        told: Any = {"jobs": {"a": {"steps": [{"run": "true"}]}}}
        place = told
        for each in path:
            place = place[each]
        place[setting] = "x"
        (tmp_path / "a.yml").write_text(yaml.safe_dump(told))
        with pytest.raises(ValueError, match=setting):
            read_steps(tmp_path / "a.yml")


def test_a_step_has_the_environment_of_its_job_and_workflow(tmp_path: Path) -> None:
    told = {
        "env": {"A": 1, "B": 1, "C": 1},
        "jobs": {"a": {"env": {"B": 2, "C": 2}, "steps": [{"run": "true", "env": {"C": 3}}]}},
    }
    (tmp_path / "a.yml").write_text(yaml.safe_dump(told))
    assert read_steps(tmp_path / "a.yml")[0].env == {"A": "1", "B": "2", "C": "3"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a ${{ vars.A }}b", "a 1b"),
        ("${{ vars.B || 'x y' }}", "x y"),
        ("${{vars.B||vars.A}}", "1"),
        ("${{ vars.B }}", None),
        ("${{ hashFiles('a') }}", None),
    ],
)
def test_expressions_have_the_first_value_that_is_there(text: str, expected: str | None) -> None:
    values = {"vars.A": "1"}
    if expected is not None:
        assert filled(text, values) == expected
        return
    with pytest.raises(ValueError, match="no value here"):
        filled(text, values)


@pytest.mark.parametrize(
    ("inputs", "context"),
    [
        ({"file": "deploy/docker/gateway.Dockerfile"}, ""),
        ({"file": "deploy/docker/models.Dockerfile", "context": "released/candidate"}, "released/candidate"),
    ],
)
def test_an_image_is_built_from_what_the_action_names(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, inputs: dict[str, Any], context: str
) -> None:
    podman = tmp_path / "podman"
    told = '[{"Id": "a", "RootFS": {"Layers": []}, "Size": 1}]'
    podman.write_text(f"#!/bin/sh\necho \"$@\" >> {tmp_path}/said\n[ $1 = build ] || echo '{told}'\n")
    podman.chmod(0o755)
    monkeypatch.setenv("ENGINE", str(podman))
    Runner(tmp_path).step(step(uses="docker/build-push-action", **inputs))
    (built,) = [line.split() for line in (tmp_path / "said").read_text().splitlines() if line.startswith("build ")]
    clone = tmp_path / "a-b"
    assert built[built.index("--file") + 1] == str(clone / inputs["file"])
    assert built[-1] == str(clone / context)


def test_artifacts_lie_below_what_their_paths_have_in_common(tmp_path: Path) -> None:
    runner = Runner(tmp_path)
    for name in ("out/models/.hidden", "out/key.pem", "else/c"):
        (tmp_path / "a-b" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "a-b" / name).write_text(name)
    runner.step(step(uses="actions/upload-artifact", name="n", path="out/models\nout/key.pem\n"))
    runner.step(step(uses="actions/download-artifact", name="n", path="back"))
    back = tmp_path / "a-b/back"
    assert {str(path.relative_to(back)) for path in back.rglob("*") if path.is_file()} == {"models/.hidden", "key.pem"}
    with pytest.raises(FileNotFoundError):
        runner.step(step(uses="actions/upload-artifact", name="m", path="out/models\nout/nothing\n"))


def test_a_step_whose_lines_fail_fails_and_an_action_that_nothing_stands_in_for_does_too(tmp_path: Path) -> None:
    runner = Runner(tmp_path)
    (tmp_path / "a-b").mkdir()
    runner.step(step(run='test "$A" = 1; touch "$B-${{ github.sha }}"', env={"A": "1", "B": "made"}))
    assert list((tmp_path / "a-b").glob("made-*"))
    with pytest.raises(subprocess.CalledProcessError):
        runner.step(step(run="false\ntrue\n"))
    with pytest.raises(ValueError, match="nothing stands in for some/action"):
        runner.step(step(uses="some/action"))


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not there")
def test_the_release_renders_its_canary_and_waits_for_what_it_applied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last job's own lines, on the repository that is here, with the packages that are here."""
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    runner = Runner(tmp_path)
    clone = tmp_path / "release-canary"
    shutil.copytree(ROOT / "model_repository", clone / "released/candidate")
    render, apply = [each for each in read_steps(FOLDER / "release.yml") if each.job == "canary" and each.run][-2:]
    runner.step(render)
    runner.step(apply)
    assert (clone / "kubeconfig").stat().st_mode & 0o777 == 0o600
    other = Step(**{**vars(apply), "run": apply.run.replace("rollout/serving-triton", "rollout/other")})
    with pytest.raises(subprocess.CalledProcessError):
        runner.step(other)
