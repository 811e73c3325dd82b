"""What runs in containers is changed by one command at a time, and what ends in the middle can be gone on with.

The engine is a program that remembers pods, volumes and networks; `make images-check` has the real one.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from compress.errors import ServerError, ToolkitError
from deploy.containers.composed import Composed
from deploy.containers.engine import Engine
from deploy.containers.fence import Fence, rules
from deploy.containers.keys import is_known, make_keys
from deploy.containers.renewed import renew_keys
from deploy.containers.stack import Stack
from deploy.containers.volumes import digest
from serve.gateway.access.keys import add_key, digest_of, read_keys, revoke_key

ROOT = Path(__file__).parents[4]
BIN = Path(sys.executable).parent
MODELS = ROOT / "model_repository"
OURS = '"labels": {"app.kubernetes.io/part-of": "serving"}'
PODMAN = r"""
echo "$*" >> said
last() { for last in "$@"; do :; done; echo "$last"; }
without() { grep -vx -- "$2" $1 > $1.new; mv $1.new $1; }
[ ! -e fails ] || case "$*" in $(cat fails)*) echo "it refuses" >&2; exit 125;; esac
case "$*" in
unshare*) shift; exec "$@";;
"pod ps"*) cat pods;;
"pod rm"*) without pods $(last "$@");;
"pod inspect"*) echo first;;
"inspect"*) echo 1;;
"pod start"*) echo $(last "$@") >> ready; [ ! -e interrupt ] || kill -INT $PPID;;
"exec"*) grep -qx -- "${2%-triton}" ready;;
"kube play"*) awk '/^kind:/ {pod = $2 == "Pod"} pod && /^  name:/ {print $2; exit}' $(last "$@") >> pods;;
"volume create"*) echo $(last "$@") >> volumes;;
"volume ls"*) cat volumes;;
"volume rm"*) without volumes $(last "$@");;
"network inspect"*) cat network-$(last "$@") 2>/dev/null || exit 125;;
"network create"*) echo '[{"labels": {"app.kubernetes.io/part-of": "serving"}, "subnets": [
  {"subnet": "10.89.0.0/24", "gateway": "10.89.0.1"}]}]' > network-$(last "$@");;
"network rm"*) rm network-$(last "$@");;
esac
"""


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the engine remembers."""
    folder = tmp_path / "engine"
    folder.mkdir()
    for name in ("pods", "volumes", "ready", "said"):
        (folder / name).touch()
    for name, text in (("podman", PODMAN), ("nsenter", "echo rules >> said; cat >> rules")):
        (folder / name).write_text(f"#!/bin/sh\ncd {folder}\n{text}")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return folder


@pytest.fixture
def stack(state: Path, tmp_path: Path) -> Stack:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
        gateway, prometheus = (each.getsockname()[1] for each in (one, two))
    engine = Engine(str(state / "podman"), podman=True)
    return Stack(engine, tmp_path / "own", gateway_port=gateway, prometheus_port=prometheus)


def runs(state: Path, *pods: str) -> None:
    for name in ("pods", "ready"):
        (state / name).write_text("".join(f"{pod}\n" for pod in pods))
    for part in ("models", "front"):
        (state / f"network-serving-{part}").write_text(f'[{{{OURS}, "subnets": [{{"subnet": "10.89.0.0/24"}}]}}]')


def pod_of(repository: Path) -> str:
    return f"serving-triton-models-{digest(repository)}"


def said(state: Path) -> list[str]:
    return (state / "said").read_text().splitlines()


def test_a_roll_that_was_interrupted_is_finished_by_the_same_command(
    stack: Stack, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deploy.containers.stack.NOTICE_S", 0)
    new = pod_of(MODELS)
    runs(state, "serving-gateway", "serving-triton-models-0", new)
    (state / "volumes").write_text("models-0\nserving-triton-models-0-shm\nserving-gateway-state\n")
    for _ in range(2):
        assert stack.roll(MODELS) == new
        assert stack.tritons() == [new]
    assert not any(line.startswith("kube play") for line in said(state))
    assert (state / "volumes").read_text() == "serving-gateway-state\n"


@pytest.mark.parametrize("number", [signal.SIGINT, None])
def test_what_is_interrupted_leaves_the_version_that_served_and_no_other(
    stack: Stack, state: Path, number: signal.Signals | None
) -> None:
    runs(state, "serving-gateway", "serving-triton-models-0")
    (state / ("interrupt" if number else "fails")).write_text("pod start")
    program = (
        "import sys; from pathlib import Path; from deploy.containers.engine import Engine\n"
        "from deploy.containers.stack import Stack\n"
        "Stack(Engine(sys.argv[1], podman=True), Path(sys.argv[2])).roll(Path(sys.argv[3]))"
    )
    command = [sys.executable, "-c", program, stack.engine.command, str(stack.folder), str(MODELS)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ("KeyboardInterrupt" if number else "it refuses") in done.stderr
    assert stack.pods() == ["serving-gateway", "serving-triton-models-0"]
    assert not (state / "volumes").read_text()
    assert not list(stack.folder.glob("*.tar"))


def test_a_second_command_is_told_who_is_at_it(stack: Stack) -> None:
    composed = Composed(stack.engine, stack.folder)
    with stack.held():
        for call in (stack.down, composed.down, lambda: stack.roll(MODELS), lambda: stack.up(MODELS)):
            with pytest.raises(ServerError, match="while another command does") as told:
                call()
            assert "process " in told.value.why
            assert "wait until that process has ended" in told.value.mend
    stack.down()


def test_a_folder_that_cant_be_written_is_told(stack: Stack) -> None:
    stack.folder.write_text("a file")
    with pytest.raises(ServerError, match="can't change what runs") as told:
        stack.down()
    assert str(stack.folder) in told.value.mend


def test_nothing_is_rolled_out_where_nothing_is_served(stack: Stack) -> None:
    with pytest.raises(ServerError, match="can't roll") as told:
        stack.roll(MODELS)
    assert f"up {MODELS}" in told.value.mend


def test_down_takes_all_away_whatever_refuses_on_the_way(stack: Stack, state: Path) -> None:
    runs(state, "serving-gateway", "serving-prometheus", "serving-triton-models-0", "serving-triton-models-1")
    (state / "volumes").write_text(
        "models-0\nmodels-2\nserving-triton-models-1-tmp\nserving-keys\nserving-gateway-tmp\n"
    )
    (state / "fails").write_text("pod stop")
    stack.down()
    assert not stack.pods()
    assert (state / "volumes").read_text() == "serving-keys\n"
    assert not list(state.glob("network-*"))
    (state / "fails").write_text("pod rm")
    runs(state, "serving-gateway")
    with pytest.raises(ServerError, match="can't take serving-gateway away"):
        stack.down()


def test_a_network_of_that_name_that_is_another_is_neither_taken_nor_removed(stack: Stack, state: Path) -> None:
    other = state / "network-serving-models"
    other.write_text('[{"internal": false, "subnets": []}]')
    with pytest.raises(ServerError, match="can't bring serving up") as told:
        stack.up(MODELS)
    assert told.value.mend == "podman network rm serving-models"
    stack.down()
    assert other.exists()
    assert not any(line.startswith("kube play") for line in said(state))


def test_the_own_networks_are_made_anew(stack: Stack, state: Path) -> None:
    runs(state)
    (state / "fails").write_text("kube play")
    with pytest.raises(ServerError):
        stack.up(MODELS)
    order = [line.partition(" --label")[0] for line in said(state) if line.startswith(("network create", "network rm"))]
    assert order[:3] == ["network rm serving-models", "network create --internal", "network rm serving-front"]
    assert not stack.pods()


def test_rules_stand_before_a_pods_first_container_starts_and_logs_are_bounded(stack: Stack, state: Path) -> None:
    runs(state, "serving-gateway")
    stack.add(MODELS)
    words = ("kube play", "start first", "rules", "pod start")
    order = [word for line in said(state) for word in words if line.startswith(word)]
    assert list(dict.fromkeys(order)) == list(words)
    (play,) = [line for line in said(state) if line.startswith("kube play")]
    assert "--start=false" in play
    assert "--log-driver=k8s-file --log-opt=max-size=10mb" in play
    assert ":OUTPUT DROP" in (state / "rules").read_text()


def test_without_its_rules_no_container_starts(stack: Stack, state: Path) -> None:
    (state / "nsenter").write_text("#!/bin/sh\necho 'no such module' >&2; exit 2\n")
    runs(state, "serving-gateway")
    with pytest.raises(ServerError, match="keep a pod's network to itself") as told:
        stack.add(MODELS)
    assert "no such module" in told.value.why
    assert not any(line.startswith("pod start") for line in said(state))
    assert stack.pods() == ["serving-gateway"]


def test_a_pod_is_asked_by_members_of_its_networks_and_triton_asks_nobody() -> None:
    triton = rules(Fence(("10.89.0.0/24",), ("10.89.0.1",), asks=False)).splitlines()
    assert {":INPUT DROP [0:0]", ":OUTPUT DROP [0:0]", ":FORWARD DROP [0:0]"} <= set(triton)
    assert triton.index("-A INPUT -s 10.89.0.1 -j DROP") < triton.index("-A INPUT -s 10.89.0.0/24 -j ACCEPT")
    assert [line for line in triton if "OUTPUT" in line and "ACCEPT" in line] == [
        "-A OUTPUT -o lo -j ACCEPT",
        "-A OUTPUT -m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT",
    ]
    gateway = rules(Fence(("10.89.0.0/24", "fd00::/64")))
    assert ":OUTPUT ACCEPT" in gateway
    assert "fd00::" not in gateway
    assert "10.89" not in rules(Fence(("10.89.0.0/24", "fd00::/64")), version=6)


def test_whose_signature_is_asked_for_holds_for_what_is_rolled_out_too(
    stack: Stack, state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deploy.containers.stack._answers", lambda _: True)
    monkeypatch.setattr("deploy.containers.stack.NOTICE_S", 0)
    key, public = tmp_path / "key.pem", tmp_path / "public.pem"
    make = ["openssl", "genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256", "-out", str(key)]
    subprocess.run(make, check=True, capture_output=True)
    tell = ["openssl", "pkey", "-in", str(key), "-pubout", "-out", str(public)]
    subprocess.run(tell, check=True)
    pod = stack.up(MODELS, public)
    assert pod != pod_of(MODELS)
    assert stack.roll(MODELS) == pod
    config = json.loads((stack.folder / "signer.json").read_text())
    objects = list(yaml.safe_load_all((stack.folder / "kubernetes/podman/triton.yaml").read_text()))
    volumes = [volume for each in objects if each["kind"] == "Pod" for volume in each["spec"]["volumes"]]
    (trusted,) = [each["configMap"]["name"] for each in volumes if "configMap" in each]
    assert (config["metadata"]["name"], config["data"]) == (trusted, {"public.pem": public.read_text()})
    assert any("--configmap" in line for line in said(state) if line.startswith("kube play"))
    stack.down()
    assert stack.up(MODELS) == pod_of(MODELS)
    with pytest.raises(ServerError, match="can't verify a signature by Docker"):
        Composed(stack.engine, stack.folder).up(MODELS, public)


def test_a_port_that_is_taken_and_images_that_are_not_built_are_told_first(stack: Stack, state: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ServerError, match="can't listen at") as told:
        Stack(stack.engine, stack.folder, gateway_port=taken.getsockname()[1]).up(MODELS)
    assert "--gateway-port" in told.value.mend
    (state / "fails").write_text("image inspect")
    with pytest.raises(ServerError, match="can't run containers here") as told:
        stack.up(MODELS)
    assert "make images" in told.value.mend
    assert not any(line.startswith("network create") for line in said(state))


FILES = ("keys.json", "client-key", "metrics-key")


@pytest.mark.parametrize("lost", [(), *((name,) for name in FILES), FILES[1:], FILES[:2]])
def test_keys_fit_together_whatever_ended_their_making(tmp_path: Path, lost: tuple[str, ...]) -> None:
    make_keys(tmp_path)
    if "keys.json" not in lost:
        add_key(tmp_path / "keys.json", "mine")
    for name in lost:
        (tmp_path / name).unlink()
    make_keys(tmp_path)
    before = {name: (tmp_path / name).read_bytes() for name in FILES}
    make_keys(tmp_path)
    assert {name: (tmp_path / name).read_bytes() for name in FILES} == before
    stored = {key.name: key for key in read_keys(tmp_path / "keys.json")}
    assert set(stored) == {"client", "prometheus"} | (set() if "keys.json" in lost else {"mine"})
    assert stored["client"].digest == digest_of(before["client-key"].strip()).hex()
    assert stored["prometheus"].digest == digest_of(before["metrics-key"].strip()).hex()
    assert stored["prometheus"].metrics
    assert (tmp_path / "client-key").stat().st_mode & 0o777 == 0o600


def test_a_key_that_was_revoked_is_not_made_again(tmp_path: Path) -> None:
    make_keys(tmp_path)
    revoke_key(tmp_path / "keys.json", "client")
    make_keys(tmp_path)
    assert [key.name for key in read_keys(tmp_path / "keys.json")] == ["prometheus"]


def test_a_name_that_is_no_text_has_a_digest(tmp_path: Path) -> None:
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff")).write_text("x")
    assert len(digest(tmp_path)) == 10


def test_a_path_with_a_colon_is_one_path_to_compose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = tmp_path / "a:b"
    repository.mkdir()
    monkeypatch.setenv("MODEL_REPOSITORY", str(repository))
    command = [str(BIN / "docker-compose"), "-f", str(ROOT / "deploy/compose.yaml"), "config", "--format", "json"]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    for service in ("check", "triton"):
        (mount,) = [each for each in found["services"][service]["volumes"] if each["target"] == "/models"]
        assert (mount["type"], mount["source"], mount["read_only"]) == ("bind", str(repository), True)


def test_keys_that_were_added_and_revoked_are_brought_to_the_gateway_that_runs(stack: Stack, state: Path) -> None:
    make_keys(stack.folder)
    with pytest.raises(ServerError, match="no gateway runs"):
        renew_keys(stack)
    runs(state, "serving-gateway")
    revoke_key(stack.folder / "keys.json", "client")
    add_key(stack.folder / "keys.json", "alice")
    assert not is_known(stack.folder, "client")
    assert renew_keys(stack) == 2
    assert [line for line in said(state) if line.startswith("volume")] == [
        f"volume import serving-keys {stack.folder}/serving-keys.tar"
    ]
    (stack.folder / "keys.json").write_text("{")
    with pytest.raises(ToolkitError):
        renew_keys(stack)


def test_what_serves_by_a_key_that_is_not_here_is_not_replaced_by_what_nobody_signed(stack: Stack, state: Path) -> None:
    runs(state, "serving-gateway", "serving-triton-models-0")
    (state / "volumes").write_text("models-0\nserving-triton-models-0-key\n")
    for call in (stack.roll, stack.add):
        with pytest.raises(ServerError, match="can't tell whose signature"):
            call(MODELS)
    assert stack.tritons() == ["serving-triton-models-0"]
