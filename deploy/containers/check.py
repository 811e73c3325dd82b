"""`make images-check`: what is claimed of the images, and of what plays them, tried on this machine.

By Podman two versions of the digits network are served one after the other, and asked through the gateway; the server
that runs them is killed under load, and replaced under load; commands are killed, and come at once. By Docker, one is
served and killed.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from compress.errors import ServerError
from deploy.containers.build import IMAGES, MB, ROOT, Built, build, build_all
from deploy.containers.composed import SERVICES, Composed
from deploy.containers.disturbed import apart, at_once, bounded, half_up, hold, hung_up, interrupted
from deploy.containers.say import say
from deploy.containers.stack import Stack
from serve.load.report.report import read_report

__all__ = ["run", "run_composed"]

Serving = Stack | Composed

DIGITS = ROOT / "examples/digits"
MODELS = ROOT / "model_repository"  # as `make images` has it: what is left here afterwards is what it would build
RATE, LOAD_S, SETTLE_S = 50, 20, 5.0
STARTED_S = 60.0  # for the load to begin, on a machine with other work
ANSWERED = re.compile(r'^gateway_requests_total\{.*/infer".*\} (\S+)$', re.MULTILINE)
SCRAPED_S = 60.0  # a look each 15 s, and a rule after it
SERVING = ("gateway", "triton-cpu")
# What the kernel says of the first process of each container.
STATUS = "grep -E '^(Uid|NoNewPrivs|CapEff|CapBnd):' /proc/1/status; touch /anywhere 2>&1; true"


def run(stack: Stack, *, twice: bool) -> dict[str, Any]:
    """Build, serve, disturb, and stop.

    Args:
        stack: where; nothing of its name may run.
        twice: build those that serve once more.

    Returns:
        The figures.

    Raises:
        ServerError: a claim does not hold.
    """
    versions = [_version(stack.folder, name, flags) for name, flags in (
        ("first", []), ("second", ["--int8", "static", "--calibration", "calibration.npz"]),
    )]  # fmt: skip
    images = build_all(stack.engine, [image.name for image in IMAGES], MODELS, stack.folder)
    found: dict[str, Any] = {"images_mb": {each.tag: round(each.size_bytes / MB) for each in images}}
    if twice:
        found["same_when_built_again"] = [_again(stack, each) for each in images if _serves(each)]
    try:
        _said("an up whose terminal is closed", hung_up, stack, versions[0])
        _said("an up that is killed, and a roll after it", half_up, stack, versions[0])
        begun = time.perf_counter()
        pod = _said("Triton, gateway and Prometheus come up", stack.up, versions[0])
        found["up_s"] = round(time.perf_counter() - begun, 1)
        for container in (f"{pod}-triton", f"{stack.name}-gateway-gateway", f"{stack.name}-prometheus-prometheus"):
            _confined(stack, container)
        apart(stack, pod)
        bounded(stack, pod)
        found["accuracy_first"] = _verify(stack, "first")
        left = ["exec", f"{pod}-triton", "find", "/dev/shm/left", "/tmp/left"]  # noqa: S108  the pod's own
        stack.engine.run("exec", f"{pod}-triton", "touch", *left[-2:])
        with _load(stack, "kill_alone") as alone:
            _kill(stack, f"{pod}-triton")
        hold(not stack.engine.run(*left, check=False).stdout, "nothing is left of what the one before left behind")
        found["killed_alone"] = _counted(alone)
        second = _said("a second version beside the first", stack.add, versions[1])
        with _load(stack, "kill_one_of_two") as one:
            _kill(stack, f"{pod}-triton")
        found["killed_one_of_two"] = _counted(one)
        with _load(stack, "roll") as roll:
            _said("the first goes, under load", stack.take_away, pod)
        found["rolled"] = _counted(roll)
        hold(stack.tritons() == [second], "the second version alone is left")
        _said("a roll that is killed, and the same again", interrupted, stack, versions[0])
        _said("two rolls at once", at_once, stack, versions[1], versions[0])
        hold(stack.tritons() == [second], "the second version alone is left")
        found["accuracy_second"] = _verify(stack, "second")
        found["scraped"] = _scraped(stack)
        for each in ("killed_one_of_two", "rolled"):
            hold(not found[each]["failed"], f"no request failed: {each}, {found[each]}")
        begun = time.perf_counter()
    finally:
        stack.down()
    found["down_s"] = round(time.perf_counter() - begun, 1)
    hold(not stack.pods(), "nothing is left")
    return found


def run_composed(composed: Composed) -> dict[str, Any]:
    """Serve by Docker Compose what was built, disturb, and stop.

    Args:
        composed: where; nothing of its name may run.

    Returns:
        The figures.

    Raises:
        ServerError: a claim does not hold.
    """
    repository = _version(composed.folder, "first", [])
    found: dict[str, Any] = {}
    try:
        begun = time.perf_counter()
        _said("the repository's check, Triton, gateway and Prometheus come up", composed.up, repository)
        found["up_s"] = round(time.perf_counter() - begun, 1)
        for service in SERVICES:
            _confined(composed, composed.container(service))
        found["accuracy"] = _verify(composed, "first")
        with _load(composed, "kill_composed") as alone:
            _kill(composed, composed.container("triton"))
        found["killed"] = _counted(alone)
        with _load(composed, "watched"):  # of the one that was killed, a look or none at its last requests
            found["scraped"] = _scraped(composed)
        begun = time.perf_counter()
    finally:
        composed.down()
    found["down_s"] = round(time.perf_counter() - begun, 1)
    return found


def _serves(image: Built) -> bool:
    return any(f"-{name}:" in image.tag for name in SERVING)


def _again(stack: Stack, before: Built) -> str:
    """A build from nothing has the same layers."""
    (image,) = [each for each in IMAGES if f"-{each.name}:" in before.tag]
    after = build(stack.engine, image, MODELS, cache=False)
    hold(after.layers == before.layers, f"{before.tag} built again holds the same bytes")
    return before.tag


def _version(folder: Path, name: str, flags: list[str]) -> Path:
    """The repository of a network that is trained and packed once; beside it its artifact and the evaluation images."""
    data, repository = folder / "digits", folder / name
    if repository.exists():
        return repository
    if not (data / "model.pt").exists():
        _python(str(DIGITS / "train.py"), str(data))
        _python(str(DIGITS / "images.py"), str(data / "eval.npz"), str(data / "images"))
    artifact = str(data / name)
    _python("-m", "compress", "export", str(data / "model.pt"), *flags, "--eval", "eval.npz", "-o", artifact)
    _python("-m", "serve", "pack", artifact, "--repository", str(repository), "--name", "digits",
            "--hooks", str(DIGITS / "hooks.py"))  # fmt: skip
    return repository


def _python(*words: str, environ: dict[str, str] | None = None, fails: bool = False) -> str:
    """A command of ours, quiet; what it says on stdout."""
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=environ, check=False, stdout=subprocess.PIPE, text=True
    )  # fmt: skip
    if done.returncode and not fails:
        raise ServerError(f"{' '.join(words[:4])} failed", why=done.stdout[-500:], mend="see what it said above")
    return done.stdout


def _said(what: str, call: Callable[..., Any], *given: Any) -> Any:
    begun = time.perf_counter()
    result = call(*given)
    say(f"{what}: {time.perf_counter() - begun:.1f} s")
    return result


def _confined(serving: Serving, container: str) -> None:
    told = serving.engine.run("exec", container, "sh", "-c", STATUS).stdout
    status = {line.partition(":")[0]: line.split()[1:] for line in told.splitlines() if ":\t" in line}
    hold(
        status["Uid"] == ["1000"] * 4 and status["NoNewPrivs"] == ["1"] and "Read-only file system" in told
        and int(status["CapEff"][0], 16) == int(status["CapBnd"][0], 16) == 0,
        f"{container} is not root, has no capabilities and a read-only root",
    )  # fmt: skip
    hold(_passes(serving, container), f"{container} passes its probe")


def _passes(serving: Serving, container: str) -> bool:
    """By Podman it is run now; Docker runs it itself, and tells."""
    if serving.engine.podman:
        return serving.engine.run("healthcheck", "run", container, check=False).returncode == 0
    (told,) = serving.engine.ask("container", "inspect", container)
    return bool(told["State"]["Health"]["Status"] == "healthy")


def _keyed(serving: Serving) -> dict[str, str]:
    return os.environ | {"SERVE_API_KEY": serving.key}


def _verify(serving: Serving, name: str) -> str:
    """Each evaluation image through the gateway; fails unless the artifact's own accuracy comes out."""
    data = serving.folder / "digits"
    words = ["--eval", str(data / "images"), "--artifact", str(data / name), "--output", "label", "--tolerance", "0"]
    said = _python("-m", "serve", "verify", "digits", *words, "--url", serving.url, environ=_keyed(serving))
    say(said.strip())
    return said.splitlines()[0]


@contextmanager
def _load(serving: Serving, name: str) -> Iterator[Path]:
    """Requests at a steady rate, meanwhile; the body begins when some seconds of them were answered."""
    path = serving.folder / f"{name}.json"
    path.unlink(missing_ok=True)
    words = ["--model", "digits", "--rate", str(RATE), "--duration", str(LOAD_S), "--warmup", "1"]
    command = ["-m", "serve", "load", serving.url, *words, "--output", str(path)]
    thread = threading.Thread(target=_python, args=command, kwargs={"environ": _keyed(serving), "fails": True})
    before, deadline = _answers(serving), time.monotonic() + STARTED_S
    thread.start()
    try:
        while _answers(serving) < before + RATE * SETTLE_S and time.monotonic() < deadline:
            time.sleep(0.2)
        yield path
    finally:
        thread.join()


def _answers(serving: Serving) -> float:
    """How many requests for inference the gateway has answered."""
    key = (serving.folder / "metrics-key").read_text().strip()
    asked = urllib.request.Request(f"{serving.url}/metrics", headers={"Authorization": f"Bearer {key}"})  # noqa: S310
    with urllib.request.urlopen(asked, timeout=5) as answer:  # noqa: S310  on this machine
        return sum(map(float, ANSWERED.findall(answer.read().decode())))


def _counted(path: Path) -> dict[str, Any]:
    (result,) = read_report(path).runs
    failed = sum(result.errors.values()) + result.unfinished
    slowest = result.latency.at("max")
    found = {"answered": result.count, "failed": failed, "errors": dict(result.errors), "max_ms": slowest}
    say(f"{path.stem}: {found}")
    return found


def _kill(serving: Serving, container: str) -> None:
    """As the kernel does when memory runs out; the engine starts it again."""
    before = _pid(serving, container)
    os.kill(before, signal.SIGKILL)  # `podman kill` would be taken for a wish that it stays away
    begun = time.perf_counter()
    ready = ["exec", container, "http-ok", "http://127.0.0.1:8000/v2/health/ready"]
    while _pid(serving, container) == before or serving.engine.run(*ready, check=False).returncode:
        if time.perf_counter() - begun > 60:
            raise ServerError(
                f"{container} did not come back", why="60 s went by", mend=f"look at the logs of {container}"
            )
        time.sleep(0.1)
    say(f"{container} was killed, and is ready again after {time.perf_counter() - begun:.1f} s")


def _pid(serving: Serving, container: str) -> int:
    (told,) = serving.engine.ask("container", "inspect", container)
    return int(told["State"]["Pid"])


def _scraped(serving: Serving) -> dict[str, float]:
    """What Prometheus has of both, by the names that autoscalers and alerts use, once it has looked again."""
    wanted = {"gateway": 1, "triton": 1}
    deadline = time.monotonic() + SCRAPED_S
    while (up := _targets_up(serving)) != wanted and time.monotonic() < deadline:
        time.sleep(1)
    hold(up == wanted, f"Prometheus scrapes the one Triton and the one gateway: {up}")
    queries = {
        "most requests a second": "max_over_time(autoscale:requests:rate1m[10m])",
        "inferences": "sum(nv_inference_request_success)",
    }
    while not all((found := {name: _asked(serving, query) for name, query in queries.items()}).values()):
        if time.monotonic() > deadline:
            break
        time.sleep(1)
    hold(all(found.values()), f"it has recorded what an autoscaler looks at: {found}")
    return found


def _targets_up(serving: Serving) -> dict[str, int]:
    """How many answer, by their job; an address that stands under two names counts as often."""
    with urllib.request.urlopen(f"{serving.prometheus}/api/v1/targets?state=active", timeout=5) as answer:  # noqa: S310
        targets = json.load(answer)["data"]["activeTargets"]
    return dict(Counter(each["labels"]["job"] for each in targets if each["health"] == "up"))


def _asked(serving: Serving, query: str) -> float:
    url = f"{serving.prometheus}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
    with urllib.request.urlopen(url, timeout=5) as answer:  # noqa: S310  on this machine
        rows = json.load(answer)["data"]["result"]
    return float(rows[0]["value"][1]) if rows else 0.0
