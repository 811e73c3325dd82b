"""What runs in containers is changed by one command at a time, and what ends in the middle can be gone on with.

The engine is a program that remembers pods, volumes and networks; `make images-check` has the real one.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from compress.errors import RepositoryError, ServerError, ToolkitError
from deploy.containers import limits
from deploy.containers.application import PART_OF
from deploy.containers.composed import Composed
from deploy.containers.engine import Engine
from deploy.containers.fence import Fence, rules
from deploy.containers.keys import is_known, make_keys
from deploy.containers.leaving import ASK, Asked, Silent, asked
from deploy.containers.marks import PEM
from deploy.containers.ready import within
from deploy.containers.renewed import renew_keys
from deploy.containers.stack import Stack
from deploy.containers.volumes import digest, packed
from serve.gateway.access.keys import add_key, digest_of, read_keys, revoke_key
from serve.repository.signing import sign

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
info*) pwd;;
"ps --all"*) [ ! -e containers ] || cat containers;;
unshare*) shift; exec "$@";;
"pod ps"*) cat pods;;
"pod rm"*) without pods $(last "$@");;
"pod inspect"*"{{.Id}}"*) echo 0123abcd;;
"pod inspect"*) echo first;;
"inspect"*Networks*) echo "serving-front=10.89.1.9 serving-models=10.89.0.$(cat address 2>/dev/null)";;
"inspect"*) echo 1;;
"pod start"*) echo $(last "$@") >> ready; [ ! -e interrupt ] || kill -INT $PPID;;
"exec --interactive serving-gateway-gateway"*) cat > key; head -n 1 told; [ $(wc -l < told) = 1 ] || sed -i 1d told;;
"exec serving-gateway-gateway"*) grep -qx serving-gateway ready;;
"exec"*) grep -qx -- "${2%-triton}" ready;;
"kube play"*) awk '/^kind:/ {pod = $2 == "Pod"} pod && /^  name:/ {print $2; exit}' $(last "$@") >> pods;;
"volume create"*) echo $(last "$@") >> volumes; shift 2; json=
  while [ "$1" = --label ]; do json="$json,\"${2%%=*}\":\"${2#*=}\""; shift 2; done
  echo "{${json#,}}" > labels-$1;;
"volume inspect --format"*) pwd;;
"volume inspect"*) found=$(grep -x -- $3 volumes others || grep -h -m1 -- "^$3" volumes others) || exit 125
  found=${found#*:}; labels='{"app.kubernetes.io/part-of": "serving"}'
  [ ! -e labels-$found ] || labels=$(cat labels-$found); echo "[{\"Name\": \"$found\", \"Labels\": $labels}]";;
"volume ls"*) cat volumes;;
"volume rm"*) without volumes $3; rm -f labels-$3;;
"network inspect"*) cat network-$(last "$@") 2>/dev/null || exit 125;;
"network create"*) echo '[{"labels": {"app.kubernetes.io/part-of": "serving"}, "subnets": [
  {"subnet": "10.89.0.0/24", "gateway": "10.89.0.1"}]}]' > network-$(last "$@");;
"network rm"*) rm network-$(last "$@");;
esac
"""


LIMITS = """Limit                     Soft Limit           Hard Limit           Units
Max processes             4096                 4096                 processes
Max open files            20000                20000                files
"""


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the engine remembers."""
    folder = tmp_path / "engine"
    folder.mkdir()
    for name in ("pods", "volumes", "others", "ready", "said"):
        (folder / name).touch()
    for name, text in (("podman", PODMAN), ("nsenter", "echo rules >> said; cat >> rules")):
        (folder / name).write_text(f"#!/bin/sh\ncd {folder}\n{text}")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    (folder / "1").mkdir()
    (folder / "1/cgroup").write_text("0::/machine.slice/pod_0123abcd.slice/first.scope\n")
    (folder / "1/limits").write_text(LIMITS)
    (folder / "machine.slice/pod_0123abcd.slice").mkdir(parents=True)
    for name in ("PROC", "CGROUPS"):
        monkeypatch.setattr(limits, name, folder)
    return folder


@pytest.fixture
def stack(state: Path, tmp_path: Path) -> Stack:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
        gateway, prometheus = (each.getsockname()[1] for each in (one, two))
    engine = Engine(str(state / "podman"), podman=True)
    return Stack(engine, tmp_path / "own", gateway_port=gateway, prometheus_port=prometheus)


def runs(state: Path, *pods: str, signer: str | None = "") -> None:
    """These pods, of an `up` that came to its end."""
    with (state / "volumes").open("a") as volumes:
        volumes.write("serving-up\n" + ("" if signer is None else "serving-signer\n"))
    if signer is not None:
        labels = {PART_OF: "serving", PEM: base64.b64encode(signer.encode()).decode()}
        (state / "labels-serving-signer").write_text(json.dumps(labels))
    for name in ("pods", "ready"):
        (state / name).write_text("".join(f"{pod}\n" for pod in pods))
    for part in ("models", "front"):
        (state / f"network-serving-{part}").write_text(f'[{{{OURS}, "subnets": [{{"subnet": "10.89.0.0/24"}}]}}]')


def pod_of(repository: Path) -> str:
    return f"serving-triton-models-{digest(repository)}"


def volumes(state: Path) -> set[str]:
    return set((state / "volumes").read_text().split()) - {"serving-up", "serving-signer"}


def said(state: Path) -> list[str]:
    return (state / "said").read_text().splitlines()


def test_a_roll_that_was_interrupted_is_finished_by_the_same_command(
    stack: Stack, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deploy.containers.stack.NOTICE_S", 0)
    new = pod_of(MODELS)
    runs(state, "serving-gateway", "serving-triton-models-0", new)
    with (state / "volumes").open("a") as file:
        file.write("serving-models-0\nserving-triton-models-0-shm\nserving-gateway-state\n")
    for _ in range(2):
        assert stack.roll(MODELS) == new
        assert stack.tritons() == [new]
    assert not any(line.startswith("kube play") for line in said(state))
    assert volumes(state) == {"serving-gateway-state"}


@pytest.mark.parametrize("number", [signal.SIGINT, None])
def test_what_is_interrupted_leaves_the_version_that_served_and_no_other(
    stack: Stack, state: Path, number: signal.Signals | None
) -> None:
    runs(state, "serving-gateway", "serving-triton-models-0")
    (state / ("interrupt" if number else "fails")).write_text("pod start")
    program = (
        "import sys; from pathlib import Path; from deploy.containers.engine import Engine\n"
        "from deploy.containers import limits; limits.PROC = limits.CGROUPS = Path(sys.argv[1]).parent\n"
        "from deploy.containers.stack import Stack\n"
        "Stack(Engine(sys.argv[1], podman=True), Path(sys.argv[2])).roll(Path(sys.argv[3]))"
    )
    command = [sys.executable, "-c", program, stack.engine.command, str(stack.folder), str(MODELS)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ("KeyboardInterrupt" if number else "it refuses") in done.stderr
    assert stack.pods() == ["serving-gateway", "serving-triton-models-0"]
    assert not volumes(state)
    assert not list(stack.folder.glob("*.tar"))


def test_a_second_command_is_told_who_is_at_it_whichever_checkout_it_comes_from(
    stack: Stack, state: Path, tmp_path: Path
) -> None:
    composed = Composed(stack.engine, stack.folder)
    elsewhere = replace(stack, folder=tmp_path / "elsewhere")
    with stack.held():
        assert (state / "compress-serve/serving").stat().st_mode & 0o777 == 0o700
        replace(stack, folder=tmp_path / "second", name="second").pods()
        with replace(stack, folder=tmp_path / "second", name="second").held():
            pass
        for call in (elsewhere.down, stack.down, composed.down, lambda: stack.roll(MODELS), lambda: stack.up(MODELS)):
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
        "serving-models-0\nserving-models-2\nserving-triton-models-1-tmp\nserving-keys\nserving-gateway-tmp\n"
    )
    (state / "fails").write_text("pod stop")
    stack.down()
    assert not stack.pods()
    assert volumes(state) == {"serving-keys"}
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
    assert told.value.mend == "podman network rm serving-models; or another --name"
    stack.down()
    assert other.exists()
    assert not any(line.startswith("kube play") for line in said(state))


def test_the_own_networks_are_made_anew(stack: Stack, state: Path) -> None:
    runs(state)
    (state / "volumes").write_text("")
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


def tell(state: Path, *told: tuple[int, int]) -> None:
    """What the gateway says of the Triton at 10.89.0.7, one time after the other: whether it asks it, and in flight."""
    (state / "key").write_text("metrics-key\n")
    (state / "address").write_text("7")
    rows = [f'gateway_upstream_up{{upstream="10.89.0.7:8000"}} {up}.0' for up, _ in told]
    flying = [f'gateway_upstream_in_flight{{upstream="10.89.0.7:8000"}} {count}.0' for _, count in told]
    other = 'gateway_upstream_up{upstream="10.89.0.8:8000"} 1.0'
    lines = [f"{up}\\n{count}\\n{other}" for up, count in zip(rows, flying, strict=True)]
    (state / "told").write_text("".join(f"{line}\n" for line in lines))
    (state / "podman").write_text(
        (state / "podman").read_text().replace("head -n 1 told", 'printf "$(head -n 1 told)"')
    )


def test_a_triton_is_taken_away_once_the_gateway_asks_it_no_more_and_has_its_answers(stack: Stack, state: Path) -> None:
    """Who ends it while it is asked loses what it has, and its clients' requests are suspected of its death."""
    runs(state, "serving-gateway", "serving-triton-models-0")
    tell(state, (1, 2), (0, 1), (0, 0))
    stack.take_away("serving-triton-models-0")
    order = [line for line in said(state) if line.startswith(("rules", "exec --interactive", "kill", "pod rm"))]
    assert [line.split()[0] for line in order if line != "rules"] == ["exec", "exec", "exec", "kill", "pod"]
    assert order[0] == "rules"
    assert "-p tcp --syn -j REJECT" in (state / "rules").read_text()
    assert (state / "key").read_text() == "metrics-key\n"
    assert stack.pods() == ["serving-gateway"]


def test_a_triton_goes_whatever_the_gateway_says(stack: Stack, state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.containers.stack.LEAVE_S", 0.5)
    runs(state, "serving-gateway", "serving-triton-models-0", "serving-triton-models-1")
    stack.take_away("serving-triton-models-0")  # it says nothing
    tell(state, (1, 1))
    (state / "nsenter").write_text("#!/bin/sh\nexit 2\n")
    stack.take_away("serving-triton-models-1")
    assert stack.pods() == ["serving-gateway"]


def test_the_first_version_goes_when_the_gateway_asks_the_second(
    stack: Stack, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is ready before that: the gateway looks for it, and at it, in its own time."""
    monkeypatch.setattr("deploy.containers.stack.LEAVE_S", 0.1)
    new = pod_of(MODELS)
    runs(state, "serving-gateway", "serving-triton-models-0")
    tell(state, (0, 0), (0, 0), (1, 0))
    assert stack.roll(MODELS) == new
    asked = [line.split()[0] for line in said(state) if line.startswith(("exec --interactive", "kill"))]
    assert asked[:4] == ["exec"] * 4
    assert asked.index("kill") > 3


def test_the_first_version_stays_where_the_gateway_does_not_ask_the_second(
    stack: Stack, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deploy.containers.stack.READY_S", 0.5)
    runs(state, "serving-gateway", "serving-triton-models-0")
    tell(state, (0, 0))
    with pytest.raises(ServerError, match="can't roll") as caught:
        stack.roll(MODELS)
    assert "does not ask it" in caught.value.why
    assert stack.tritons() == ["serving-triton-models-0"], "which serves on"


def test_one_that_was_to_go_and_stays_takes_connections_again(stack: Stack, state: Path) -> None:
    """As by a roll that was interrupted, and then the one back."""
    new = pod_of(MODELS)
    runs(state, "serving-gateway", new)
    stack.roll(MODELS)
    assert "-A INPUT -s 10.89.0.0/24 -j ACCEPT" in (state / "rules").read_text()
    assert "REJECT" not in (state / "rules").read_text()


def test_a_pod_that_is_closed_goes_on_with_the_connections_that_it_has() -> None:
    closed = rules(Fence(("10.89.0.0/24",), ("10.89.0.1",), asks=False, closed=True)).splitlines()
    refuses = "-A INPUT -s 10.89.0.0/24 -p tcp --syn -j REJECT --reject-with tcp-reset"
    kept = "-A INPUT -m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT"
    assert closed.index(kept) < closed.index(refuses) < closed.index("-A INPUT -s 10.89.0.0/24 -j ACCEPT")
    assert "REJECT" not in rules(Fence(("10.89.0.0/24",)))


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
    monkeypatch.setattr("deploy.containers.stack.answers", lambda _: True)
    monkeypatch.setattr("deploy.containers.stack.NOTICE_S", 0)
    models, public = signed(tmp_path)
    pod = stack.up(models, public)
    assert pod != pod_of(models)
    elsewhere = replace(stack, folder=tmp_path / "elsewhere")
    for each in (stack, elsewhere):
        assert each.roll(models) == pod
    begun = len(said(state))
    for call in (elsewhere.roll, elsewhere.add):
        with pytest.raises(RepositoryError, match="is not signed"):
            call(MODELS)
    assert not [line for line in said(state)[begun:] if line.startswith(("kube", "pod rm", "volume create"))]
    config = json.loads((stack.folder / "signer.json").read_text())
    objects = list(yaml.safe_load_all((stack.folder / "kubernetes/podman/triton.yaml").read_text()))
    volumes = [volume for each in objects if each["kind"] == "Pod" for volume in each["spec"]["volumes"]]
    (trusted,) = [each["configMap"]["name"] for each in volumes if "configMap" in each]
    assert (config["metadata"]["name"], config["data"]) == (trusted, {"public.pem": public.read_text()})
    assert any("--configmap" in line for line in said(state) if line.startswith("kube play"))
    elsewhere.down()
    assert stack.up(MODELS) == pod_of(MODELS)
    with pytest.raises(ServerError, match="can't verify a signature by Docker"):
        Composed(stack.engine, stack.folder).up(MODELS, public)


def signed(tmp_path: Path) -> tuple[Path, Path]:
    """A repository, and the key of who signed it."""
    key, public, models = tmp_path / "key.pem", tmp_path / "public.pem", tmp_path / "signed"
    make = ["openssl", "genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256", "-out", str(key)]
    subprocess.run(make, check=True, capture_output=True)
    tell = ["openssl", "pkey", "-in", str(key), "-pubout", "-out", str(public)]
    subprocess.run(tell, check=True)
    shutil.copytree(MODELS, models, ignore=shutil.ignore_patterns("__pycache__", "SHA256SUMS*", "model.sig"))
    sign(models, key)
    return models, public


def test_what_is_not_signed_is_told_before_anything_is_started(stack: Stack, state: Path, tmp_path: Path) -> None:
    _, public = signed(tmp_path)
    with pytest.raises(RepositoryError, match="is not signed"):
        stack.up(MODELS, public)
    assert not [line for line in said(state) if line.startswith(("network", "kube", "volume create"))]


def test_an_up_that_was_killed_is_told_by_roll_and_cleared_by_the_next_one(
    stack: Stack, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deploy.containers.stack.answers", lambda _: True)
    runs(state, "serving-gateway", "serving-triton-models-0")
    (state / "volumes").write_text("serving-models-0\n")
    with pytest.raises(ServerError, match="can't roll") as told:
        stack.roll(MODELS)
    assert "was not finished" in told.value.why
    assert f"up {MODELS}" in told.value.mend
    (state / "others").write_text("serving-gateway-state\n")  # whose beginning is the name of another
    (state / "labels-serving-gateway-state").write_text("{}")
    new = stack.up(MODELS)
    assert set(stack.pods()) == {new, "serving-gateway", "serving-prometheus"}
    assert "pod rm --force --time 0 serving-triton-models-0" in said(state)
    with pytest.raises(ServerError, match="can't bring serving up") as told:
        stack.up(MODELS)
    assert told.value.why == "it runs already"


def test_roll_says_so_where_the_gateway_does_not_answer(
    stack: Stack, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deploy.containers.stack.ALIVE_S", 0)
    runs(state, "serving-gateway", "serving-triton-models-0")
    (state / "ready").write_text("serving-triton-models-0\n")
    with pytest.raises(ServerError, match="can't roll") as told:
        stack.roll(MODELS)
    assert told.value.why == "the gateway does not answer"
    assert not any(line.startswith("kube play") for line in said(state))


def test_a_gateway_that_is_not_ready_with_the_new_version_keeps_the_first(
    stack: Stack, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deploy.containers.ready.READY_S", 1)
    runs(state, "serving-gateway", "serving-triton-models-0")
    (state / "fails").write_text("exec serving-gateway-gateway http-ok http://127.0.0.1:8080/readyz")
    with pytest.raises(ServerError, match="can't bring the gateway up"):
        stack.roll(MODELS)
    assert stack.tritons() == ["serving-triton-models-0"]


def test_a_volume_that_somebody_else_made_is_neither_taken_nor_removed(stack: Stack, state: Path) -> None:
    (state / "others").write_text("serving-gateway-state\nserving-keys\n")  # Podman tells the first for its beginning
    (state / "labels-serving-keys").write_text("{}")
    with pytest.raises(ServerError, match="can't bring serving up") as told:
        stack.up(MODELS)
    assert told.value.mend == "podman volume rm serving-keys; or another --name"
    assert not any(line.startswith("volume rm") and line.endswith("serving-keys") for line in said(state))


def test_volumes_that_podman_does_not_tell_keep_nothing_from_going(stack: Stack, state: Path) -> None:
    runs(state, "serving-gateway", "serving-triton-models-0")
    (state / "fails").write_text("volume ls")
    stack.down()
    assert not stack.pods()
    assert not list(state.glob("network-*"))


def test_what_is_written_while_it_is_packed_is_not_served_under_the_name_of_what_it_was(
    stack: Stack, state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = tmp_path / "models"
    shutil.copytree(MODELS, models, ignore=shutil.ignore_patterns("__pycache__"))
    before = digest(models)
    with packed(models, ".", tmp_path / "all.tar") as archive:
        (models / "more").write_text("x")
        assert digest(archive) == before != digest(models)
    (models / "more").unlink()
    runs(state, "serving-gateway")
    render = "deploy.containers.stack.render"
    monkeypatch.setattr(render, lambda *_: (models / "more").write_text("x"))
    with pytest.raises(ServerError, match="can't serve") as told:
        stack.add(models)
    assert "written to while it was packed" in told.value.why
    assert not any(line.startswith("volume import") for line in said(state))
    assert stack.pods() == ["serving-gateway"]


def test_what_python_compiled_and_when_files_were_written_make_no_other_version(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x")
    before = digest(tmp_path)
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__/a.pyc").write_text("x")
    os.utime(tmp_path / "a", (1, 1))
    assert digest(tmp_path) == before


def test_a_pods_processes_are_bounded_before_its_first_container_starts(stack: Stack, state: Path) -> None:
    runs(state, "serving-gateway")
    stack.add(MODELS)
    assert (state / "machine.slice/pod_0123abcd.slice/pids.max").read_text() == "1536\n"
    assert sum(limits.SHARES.values()) + limits.SHARES["triton"] < 1


def test_without_a_bound_on_its_processes_no_container_starts(stack: Stack, state: Path) -> None:
    (state / "1/cgroup").write_text("0::/\n")
    runs(state, "serving-gateway")
    with pytest.raises(ServerError, match="can't bound the number of a pod's processes"):
        stack.add(MODELS)
    assert not any(line.startswith("pod start") for line in said(state))
    assert stack.pods() == ["serving-gateway"]


def test_control_groups_of_the_first_version_have_one_for_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "PROC", tmp_path)
    monkeypatch.setattr(limits, "CGROUPS", tmp_path)
    (tmp_path / "7").mkdir()
    (tmp_path / "7/cgroup").write_text("9:cpu,cpuacct:/a/0123/x\n8:pids:/b/0123/libpod-7\n0::/c/0123/libpod-7\n")
    (tmp_path / "pids/b/0123").mkdir(parents=True)
    for text, most in ((LIMITS, 512), (LIMITS.replace("4096", "unlimited"), 2048), ("", 2048)):
        (tmp_path / "7/limits").write_text(text)
        limits.limit("gateway", "0123", 7)
        assert (tmp_path / "pids/b/0123/pids.max").read_text() == f"{most}\n"


@pytest.mark.parametrize("name", ["", "A", "a" * 19, "a_b", "../a"])
def test_a_name_that_pods_cant_have_is_told(stack: Stack, name: str) -> None:
    with pytest.raises(ServerError, match="can't use --name"):
        replace(stack, name=name)


def test_podman_is_started_where_nothing_can_be_written(stack: Stack, state: Path) -> None:
    """What watches a container leaves a file where it was started from, once memory runs out."""
    (state / "podman").write_text("#!/bin/sh\npwd\n")
    assert stack.engine.run("start").stdout in {"/proc\n", "/\n"}


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
    assert [line for line in said(state) if line.startswith("volume import")] == [
        f"volume import serving-keys {stack.folder}/serving-keys.tar"
    ]
    (stack.folder / "keys.json").write_text("{")
    with pytest.raises(ToolkitError):
        renew_keys(stack)


def test_keys_of_another_checkout_dont_take_the_place_of_those_that_clients_have(
    stack: Stack, state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deploy.containers.stack.answers", lambda _: True)
    stack.up(MODELS)
    elsewhere = replace(stack, folder=tmp_path / "elsewhere")
    make_keys(elsewhere.folder)
    with pytest.raises(ServerError, match="can't renew the gateway's keys") as told:
        renew_keys(elsewhere)
    assert str(stack.folder) in told.value.why
    assert renew_keys(stack) == 2


@pytest.mark.parametrize("signer", ["", None])
def test_what_serves_by_a_key_that_is_not_here_is_not_replaced_by_what_nobody_signed(
    stack: Stack, state: Path, signer: str | None
) -> None:
    runs(state, "serving-gateway", "serving-triton-models-0", signer=signer)
    with (state / "volumes").open("a") as file:
        file.write("serving-models-0\nserving-models-0-key\n")
    for call in (stack.roll, stack.add):
        with pytest.raises(ServerError, match="can't tell whose signature"):
            call(MODELS)
    assert stack.tritons() == ["serving-triton-models-0"]


COMMANDS = """import sys
from pathlib import Path
from deploy.containers import commands, limits, stack
from deploy.containers.engine import Engine
limits.PROC = limits.CGROUPS = Path(sys.argv[1]).parent
stack.answers = lambda _: True
own = stack.Stack(Engine(sys.argv[1], podman=True), Path(sys.argv[2]), *map(int, sys.argv[3:5]))
commands._serving = lambda *_, **__: own
commands.check_machine = lambda *_, **__: None
sys.argv[1:] = sys.argv[5:]
commands.run()
"""


def command(stack: Stack, *words: object) -> list[str]:
    """As `python -m deploy.containers`, of this engine."""
    given = (stack.engine.command, stack.folder, stack.gateway_port, stack.prometheus_port, *words)
    return [sys.executable, "-c", COMMANDS, *map(str, given)]


def test_a_terminal_that_is_closed_in_the_middle_of_an_up_leaves_nothing(stack: Stack, state: Path) -> None:
    """What is left of the terminal refuses each line, and its shell says once more that it is gone."""
    (state / "podman").write_text(
        (state / "podman")
        .read_text()
        .replace('"pod start"*)', '"pod start"*gateway) touch at; sleep 3;;\n"pod start"*)')
    )
    mine, its = os.openpty()
    with subprocess.Popen(
        command(stack, "up", MODELS), cwd=ROOT, stdin=its, stdout=its, stderr=its, start_new_session=True
    ) as up:
        os.close(its)
        until(lambda: (state / "at").exists())
        os.close(mine)
        os.kill(up.pid, signal.SIGHUP)
        until(lambda: "pod stop" in (state / "said").read_text())
        os.kill(up.pid, signal.SIGHUP)
    assert up.returncode == 130
    assert "pod stop --time 0 serving-gateway" in (state / "said").read_text()
    assert not stack.pods()
    assert volumes(state) <= {"serving-keys", "serving-metrics-key"}
    assert not list(state.glob("network-*"))


def until(holds: Callable[[], bool]) -> None:
    assert within(30, holds)


def test_a_reader_that_has_seen_enough_keeps_nothing_from_going(stack: Stack, state: Path) -> None:
    runs(state, "serving-gateway", "serving-prometheus", "serving-triton-models-0")
    reads, writes = os.pipe()
    os.close(reads)
    with os.fdopen(writes, "wb") as pipe:
        down = subprocess.run(
            command(stack, "down"), cwd=ROOT, stdout=pipe, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (down.returncode, down.stderr) == (0, "")
    assert not stack.pods()
    assert not list(state.glob("network-*"))


SAYS = """from deploy.containers.say import say
for _ in range(3):
    say("\\u00e4")
    say("x", error=True)
"""


@pytest.mark.parametrize("way", [">&-", "2>&-", ">/dev/full 2>/dev/full"])
def test_nothing_that_is_said_fails(way: str, tmp_path: Path) -> None:
    (tmp_path / "says.py").write_text(SAYS)
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii"}
    shell = ["/bin/sh", "-c", f"{sys.executable} {tmp_path}/says.py {way}"]
    done = subprocess.run(shell, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert set((done.stderr + done.stdout).split()) <= {"x", r"\xe4"}


def test_who_interrupts_while_modules_are_imported_sees_no_traceback(tmp_path: Path) -> None:
    package = tmp_path / "cyclopts.py"
    package.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "deploy.containers", "down"], cwd=ROOT, env=environ, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (130, "")


METRICS = """import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        known = self.headers["Authorization"] == "Bearer known"
        self.send_response(200 if known else int(sys.argv[1]))
        self.end_headers()
    log_message = lambda *_: None
server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""


@pytest.mark.parametrize(
    ("key", "code", "told"),
    [
        ("known", 401, Asked(up=False, in_flight=0)), ("revoked", 401, Silent.REFUSES), ("none", 403, Silent.REFUSES),
        ("known", 0, Silent.NOW), ("revoked", 503, Silent.NOW), ("revoked", 429, Silent.NOW),
    ],
)  # fmt: skip
def test_a_gateway_that_does_not_answer_is_told_from_one_that_has_no_such_key(
    stack: Stack, state: Path, monkeypatch: pytest.MonkeyPatch, key: str, code: int, told: object
) -> None:
    """By what runs in its container, against a server; code 0: it listens, and nobody answers."""
    (state / "key").write_text(key)
    text = (state / "podman").read_text()
    (state / "podman").write_text(text.replace("cat > key; head", 'shift 3; exec "$@";;\n"no such"*) head'))
    python = f'#!/bin/sh\nexec {sys.executable} "$@"\n'
    (state / "python3").write_text(python)
    (state / "python3").chmod(0o755)
    with contextlib.ExitStack() as kept:
        if code:
            words = [sys.executable, "-c", METRICS, str(code)]
            server = kept.enter_context(subprocess.Popen(words, stdout=subprocess.PIPE, text=True))
            kept.callback(server.kill)
            assert server.stdout is not None
            port = int(server.stdout.readline())
        else:
            port = kept.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
        ask = ASK.replace(":8080/", f":{port}/").replace("timeout=5", "timeout=1")
        monkeypatch.setattr("deploy.containers.leaving.ASK", ask)
        assert asked(stack.engine, stack.name, "serving-triton-models-0") == told


def test_the_first_version_stays_where_the_gateway_is_silent(
    stack: Stack, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Silence is no word that it asks the second; it may be at work with the first."""
    monkeypatch.setattr("deploy.containers.stack.READY_S", 0.5)
    runs(state, "serving-gateway", "serving-triton-models-0")
    (state / "key").write_text("metrics-key\n")
    (state / "fails").write_text("exec --interactive serving-gateway-gateway")
    with pytest.raises(ServerError, match="can't roll") as caught:
        stack.roll(MODELS)
    assert "does not say what it asks" in caught.value.why
    assert stack.tritons() == ["serving-triton-models-0"]


SAID = r"""I1128 03:17:43.8 1 model_lifecycle.cc:472] "loading: tiny:1"
E1128 03:17:43.9 1 server.cc:241] "CudaDriverHelper has not been initialized."
E1128 03:17:45.6 1 model_lifecycle.cc:642] "failed to load 'tiny' version 1: Internal: no model.\n\nAt:\n  /opt/a.py(1): b"
I1128 03:17:45.7 1 model_lifecycle.cc:777] "failed to load 'tiny'"
"""


def test_what_ends_again_and_again_is_not_waited_for_and_its_reason_is_told(
    stack: Stack, state: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs(state, "serving-gateway", "serving-triton-models-0")
    (state / "logs").write_text(SAID + "I1128 03:17:46.0 1 server.cc:1] | a table |\n" * 50 + SAID)
    (state / "count").write_text("0")
    text = (state / "podman").read_text()
    text = text.replace(
        '"inspect"*) echo 1',
        '"inspect"*RestartCount*) cat count; echo $(($(cat count)+1)) > count;;\n"logs"*) cat logs;;\n"inspect"*) echo 1',
    )
    (state / "podman").write_text(text.replace('"exec"*) grep -qx -- "${2%-triton}" ready', '"exec"*) false'))
    begun = time.monotonic()
    with pytest.raises(ServerError, match="can't bring Triton up") as told:
        stack.roll(MODELS)
    assert time.monotonic() - begun < 60
    assert told.value.why == "it ended 2 times: failed to load 'tiny' version 1: Internal: no model."
    assert capsys.readouterr().err == "\"failed to load 'tiny' version 1: Internal: no model.\n"
    assert stack.tritons() == ["serving-triton-models-0"]


@pytest.mark.parametrize("there", ["pods", "containers"])
def test_a_name_that_is_another_applications_pod_is_told_before_anything_is_made(
    stack: Stack, state: Path, there: str
) -> None:
    """`serving-gateway` beside `serving`: Podman has one list of names for pods and containers."""
    (state / there).write_text("serving-prometheus-prometheus\n" if there == "containers" else "")
    if there == "pods":
        text = (state / "podman").read_text()
        (state / "podman").write_text(
            text.replace('"pod ps"*)', '"pod ps --format"*) echo serving-gateway;;\n"pod ps"*)')
        )
    with pytest.raises(ServerError, match="can't bring serving up") as told:
        stack.up(MODELS)
    assert "take another --name" in told.value.mend
    assert not any(line.startswith(("network create", "kube", "volume create")) for line in said(state))
