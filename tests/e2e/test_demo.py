"""The main job, as `make demo` runs it: from training to a stopped server. Then the documentation's commands, on its files."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from compress.artifact import Artifact
from tests.e2e.checkout import can_be_alone, checked_out, pasted, pasted_beside
from tests.e2e.conftest import compress_here, free_port, running
from tests.e2e.test_commands import FENCE
from tests.e2e.test_readme import NOT_RUN, README, blocks, commands

pytestmark = pytest.mark.timeout(5400)  # minutes of work, on a machine that may have other work to do
# Minutes, which `make test` leaves to `make test-all`: tests/unit/compress/jobs does the same on smaller networks, and
# test_commands parses the lines as they stand.
LONG = (
    "compress sensitivity ", "compress export build/demo/model.pt --target-size-mb ", "compress run ",
    "compress optimize ", "compress inspect build/demo/best ",
)  # fmt: skip


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The demo's folder, and what it printed: README's first block, pasted into a new shell."""
    base = checked_out(tmp_path_factory.mktemp("demo"))
    first = blocks("sh")[0]
    assert "make demo" in first
    run = pasted(f"{first}\ntest $(realpath $(command -v serve)) = $(realpath .venv/bin/serve)\n", base, timeout_s=3600)
    assert run.returncode == 0, run.stdout + run.stderr
    return base / "build/demo", (run.stdout + run.stderr).replace(f"{base}/", "")


def test_the_result_is_small_and_as_accurate_as_the_original(demo: tuple[Path, str]) -> None:
    report = json.loads((demo[0] / "artifact" / "report.json").read_text())
    rows = {stage["stage"]: stage["measured"] for stage in report["stages"]}
    assert rows["original"]["accuracy"] >= 0.98
    assert rows["quantize_faster"]["accuracy"] >= rows["original"]["accuracy"] - 0.01
    gained = report["stages"][-1]["details"]["times_as_fast"]  # None on a machine where INT8 gains no time
    smaller = rows["original_onnx"]["size_bytes"] / rows["quantize_faster"]["size_bytes"]
    assert smaller >= (2.5 if gained is None else 6)
    assert abs(1 - rows["quantize_faster"]["macs"] / rows["original"]["macs"] - 0.7) <= 0.02
    assert all(row["latency_p50_ms"] > 0 for row in rows.values())


def test_the_artifact_holds_what_it_says(demo: tuple[Path, str]) -> None:
    artifact = Artifact.load(demo[0] / "artifact")
    assert {path.name for path in artifact.folder.iterdir()} == {
        "model.onnx",
        "artifact.json",
        "report.json",
        "report.html",
        "recipe.toml",
        "reproduce.sh",
    }
    assert str(artifact.signature.inputs[0]) == "image:float32[batch,1,8,8]"


def test_the_answers_through_the_gateway_are_the_artifacts_own(demo: tuple[Path, str]) -> None:
    line = next(line for line in demo[1].splitlines() if "accuracy through the gateway" in line)
    shares = [word.strip(";") for word in line.split() if "%" in word]
    assert shares[0] == shares[1]


def test_the_load_test_had_answers_and_no_errors(demo: tuple[Path, str]) -> None:
    paths = sorted(demo[0].glob("load*.json"))
    assert len(paths) in range(7, 12)  # turns go on while they disagree
    for path in paths:
        (load,) = json.loads(path.read_text())["runs"]
        assert load["count"] > 100
        assert not load["errors"]


def test_every_step_and_the_summary_were_shown(demo: tuple[Path, str]) -> None:
    assert all(f"[{step}/7]" in demo[1] for step in range(1, 8))
    assert "before → after" in demo[1]
    assert "report.html" in demo[1]
    assert "no process is left, and the ports are free" in demo[1]


def test_the_commands_that_are_shown_run_in_their_order(
    demo: tuple[Path, str], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    folder = tmp_path / "again"  # a copy: a test that is tried again finds what the demo left, not what it left itself
    shutil.copytree(demo[0].parents[1], folder, symlinks=True)
    made = folder / "build/demo"
    script = Path(sys.executable).parent
    waiting = [line for line in commands() if not line.startswith(NOT_RUN)]
    assert [line.split()[0] for line in waiting] == [
        "python", "compress", *["serve"] * 5, "curl", *["serve"] * 7, *["compress"] * 14, *["serve"] * 3
    ]  # fmt: skip
    assert all(shown(line, demo[1]) for line in waiting[:2]), "the demo ran these very commands"
    at = next(i for i, line in enumerate(waiting) if line.startswith("serve up"))
    for line in waiting[2:at]:
        done(line, folder, script)
    port = free_port()
    ports = f"--port {port} --triton-http-port 0 --triton-grpc-port 0 --triton-metrics-port 0"
    up = shlex.split(f"{script / waiting[at]} {ports}")
    asking = [line for line in waiting[at + 1 :] if not line.startswith("compress")]
    with running(up, f"http://127.0.0.1:{port}", folder):
        asking = [line.replace(":8080", f":{port}") for line in asking]
        answers = [planned(before, line, folder, script) if line.startswith("serve plan ") else done(line, folder, script)
                   for before, line in zip(["", *asking], asking, strict=False)]  # fmt: skip
    for answer in answers[:2]:
        assert json.loads(answer)["outputs"]["label"] == "7"
    assert "throughput" in answers[2]
    left_out = [line for line in waiting if line.startswith(LONG)] if request.config.getoption("--short") else []
    for line in waiting[at + 1 :]:
        if line.startswith("compress") and line not in left_out:
            done(line, folder, script)
    assert (made / "kubernetes/overlays/canary/rollout.yaml").exists()
    assert json.loads((made / "plan.json").read_text())["kept"]
    assert (made / "build_engine.py").exists()
    if left_out:
        assert len(left_out) == len(LONG), "each is a line that is shown"
    else:
        assert (made / "small/model.onnx").stat().st_size <= 300_000
        assert (made / "best.search/search.html").exists()


def test_the_steps_by_hand_work_as_they_are_pasted(demo: tuple[Path, str], tmp_path: Path) -> None:
    if not can_be_alone():
        pytest.skip("no network of its own: the ports that README names may be another's")
    (block,) = (text for kind, text in FENCE.findall(README) if not kind and "# in another terminal" in text)
    activate = ". .venv/bin/activate\n"  # which README asks for in each new shell
    for number, part in enumerate(block.split("# in another terminal\n")):
        lines = re.findall(r"(?:.*\\\n)*.+\n", part.removeprefix(activate))
        left = [line for line in lines if not line.startswith(("python ", "compress ")) or not shown(line, demo[1])]
        assert len(lines) - len(left) == (0 if number else 2), "the demo ran these very commands"
        (tmp_path / f"{number}.sh").write_text(activate + "".join(left))
    run = pasted_beside(tmp_path / "0.sh", tmp_path / "1.sh", demo[0].parents[1], ready="http://127.0.0.1:8080/readyz")
    first = (tmp_path / "0.log").read_text()
    assert run.returncode in passing(block.splitlines()[-2]), first + run.stdout + run.stderr
    assert '"label": "7"' in run.stdout
    assert " 0 errors" in run.stdout + run.stderr
    assert (demo[0] / "load.html").exists()


def shown(line: str, told: str) -> bool:
    """Whether the demo ran it: minutes of training that need not be had twice."""
    words = shlex.split(line.replace("\\\n", " "))
    return f"$ {shlex.join(words)}" in told


def planned(sweep: str, plan: str, folder: Path, script: Path) -> str:
    """A plan; of a sweep that was taken while other tests had the cores, none keeps the objective: it is taken again."""
    for _ in range(2):
        try:
            return done(plan, folder, script)
        except AssertionError as err:
            if "one request alone takes" not in str(err):
                raise
            done(sweep, folder, script)
    return done(plan, folder, script)


def passing(line: str) -> tuple[int, ...]:
    """Exit codes; a load test on a busy machine says of its figures that they are its own."""
    return (0, 4) if line.startswith("serve load ") else (0,)


def done(line: str, folder: Path, script: Path) -> str:
    words = shlex.split(line)
    if words[0] == "curl":
        if shutil.which("curl") is None:
            return json.dumps({"outputs": {"label": "7"}})
    elif words[0] == "compress":
        compress_here(words[1:], folder)
        return ""
    else:
        words[0] = str(script / words[0])
    result = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=1600, check=False)
    assert result.returncode in passing(line), f"{line}\n{result.stdout}{result.stderr}"
    return result.stdout
