"""Dockerfiles and compose.yaml: what their own tools say, and the rules that we keep beside."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

DEPLOY = Path(__file__).parents[4] / "deploy"
BIN = Path(sys.executable).parent
DOCKERFILES = sorted((DEPLOY / "docker").glob("*.Dockerfile"))


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_hadolint_has_nothing_to_say(path: Path) -> None:
    done = subprocess.run([BIN / "hadolint", path], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize(
    "path", [path for path in DOCKERFILES if path.name != "models.Dockerfile"], ids=lambda path: path.name
)
def test_an_image_is_pinned_by_an_argument_not_root_and_says_how_it_is(path: Path) -> None:
    lines = path.read_text().splitlines()
    bases = [line for line in lines if line.startswith("FROM ")]
    assert bases
    assert all(re.match(r"FROM \$\{\w+\}( AS \w+)?$", line) for line in bases)
    named = {line[len("FROM ${") :].partition("}")[0] for line in bases}
    defaults = [line.partition("=")[2] for line in lines if any(line.startswith(f"ARG {name}=") for name in named)]
    assert defaults
    assert all(re.search(r":(?!latest)[\w.-]+$", image) for image in defaults)
    assert [line for line in lines if line.startswith("USER ")][-1] == "USER 1000:1000"
    assert any(line.startswith("HEALTHCHECK") for line in lines)
    assert any(line.startswith('ENTRYPOINT ["') for line in lines)
    assert not any(re.search(r"(?i)(password|token|secret)=", line) for line in lines)


def test_what_an_image_copies_is_there() -> None:
    root = DEPLOY.parent
    for name in ("gateway", "compress", "triton-cpu", "prometheus"):
        for line in (DEPLOY / f"docker/{name}.Dockerfile").read_text().splitlines():
            if line.startswith("COPY ") and "--from" not in line:
                words = [word for word in line.split()[1:-1] if not word.startswith(("--", "deploy/docker/hooks."))]
                assert all((root / word).exists() for word in words)


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_a_file_for_another_python_in_a_package_ends_no_build(path: Path) -> None:
    """torch's wheels have one of 3.12's syntax, in each release."""
    steps = path.read_text().replace("\\\n", " ").splitlines()
    for step in steps:
        if "compileall" in step:
            assert re.search(r"&& \(python -m compileall [^|&()]* \|\| true\)$", step)


def composed() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    return found


def said_by_compose(path: Path) -> str:
    """It ends with 0 either way, as pip installs it: what it says counts."""
    command = [str(BIN / "docker-compose"), "-f", str(path), "config", "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def test_compose_takes_its_file(tmp_path: Path) -> None:
    assert said_by_compose(DEPLOY / "compose.yaml") == ""
    broken = tmp_path / "compose.yaml"
    broken.write_text((DEPLOY / "compose.yaml").read_text().replace("read_only", "readonly"))
    assert "not allowed" in said_by_compose(broken)


@pytest.mark.parametrize("name", ["check", "triton", "gateway", "prometheus", "grafana", "collector"])
def test_a_service_can_do_as_little_as_possible(name: str) -> None:
    service = composed()["services"][name]
    assert service["read_only"]
    assert service["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in service["security_opt"]
    assert not re.search(r":latest$|^[^:]+$", service["image"])
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))


def test_only_the_gateway_and_the_watchers_can_be_reached() -> None:
    whole = composed()
    published = {name for name, service in whole["services"].items() if "ports" in service}
    assert published == {"gateway", "prometheus", "grafana"}
    assert all(whole["networks"][name]["internal"] for name in whole["services"]["triton"]["networks"])
    for service in whole["services"].values():
        for volume in service.get("volumes", ()):
            source = volume["source"] if isinstance(volume, dict) else volume.partition(":")[0]
            assert not source.startswith("./") or (DEPLOY / source).exists()


def test_what_is_run_is_what_make_images_built_and_the_rest_is_asked_for() -> None:
    services = composed()["services"]
    built = {name for name, service in services.items() if "localhost/compress-serve-" in service["image"]}
    assert built == {"check", "triton", "gateway", "prometheus"} == {
        name for name, service in services.items() if "profiles" not in service
    }  # fmt: skip
    assert not any("build" in service for service in services.values())


def test_nothing_is_served_before_it_was_checked() -> None:
    services = composed()["services"]
    assert services["check"]["volumes"] == services["triton"]["volumes"]
    assert services["triton"]["depends_on"] == {"check": {"condition": "service_completed_successfully"}}


def test_the_scraped_names_are_the_services() -> None:
    config = yaml.safe_load((DEPLOY / "prometheus/compose.yml").read_text())
    targets = {job["job_name"]: job["static_configs"][0]["targets"] for job in config["scrape_configs"]}
    assert targets == {"gateway": ["gateway:8080"], "triton": ["triton:8002"]}
    assert all((DEPLOY / "prometheus" / name).is_file() for name in config["rule_files"])


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_a_user_is_of_no_day_so_that_a_build_of_tomorrow_holds_the_same_bytes(path: Path) -> None:
    """/etc/shadow has the day on which an account was made; Debian's tools take it from this variable."""
    steps = re.findall(r"[^&|;\n]*\b(?:useradd|apt-get install)\b", path.read_text().replace("\\\n", " "))
    assert [step for step in steps if "SOURCE_DATE_EPOCH=0 " not in step] == []
