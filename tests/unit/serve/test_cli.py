"""A user's mistake gives three lines and exit code 2, no traceback, and leaves what was there."""

from __future__ import annotations

import os
import shutil
import socket
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from serve.cli.main import main
from serve.up.claim import claimed
from tests.full_disk import full_disk
from tests.serve_models import tiny_artifact


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def pack(folder: Path, *more: Any, name: str = "tiny") -> list[Any]:
    artifact = folder / "artifact"
    if not artifact.exists():
        tiny_artifact(artifact)
    return ["pack", artifact, "--repository", folder / "models", "--name", name, *more]


def hooks(folder: Path, text: str) -> Path:
    (folder / "hooks.py").write_text(text)
    return folder / "hooks.py"


def packed(folder: Path) -> Path:
    main_ok(pack(folder))
    return folder / "models"


def main_ok(words: list[Any]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([str(word) for word in words])
    assert not caught.value.code


def checkpoint(folder: Path) -> Path:
    path = folder / "weights.pth"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("weights/data.pkl", b"\x80\x02}.")
    return path


def broken_artifact(folder: Path) -> list[Any]:
    words = pack(folder)
    (folder / "artifact" / "model.onnx").write_bytes(b"changed")
    return words


def served_already(folder: Path, port: int) -> list[Any]:
    repository = packed(folder)
    HELD.enter_context(claimed(repository))
    return ["up", repository, "--port", port]


HELD = ExitStack()
MISTAKES: dict[str, tuple[Callable[[Path, int], list[Any]], str]] = {
    "no artifact": (lambda f, _: ["pack", f, "--repository", f / "m", "--name", "x"], "no artifact.json"),
    "a checkpoint": (
        lambda f, _: ["pack", checkpoint(f), "--repository", f / "m", "--name", "x"], "compress export",
    ),
    "data for a model": (
        lambda f, _: ["pack", hooks(f, "{}"), "--repository", f / "m", "--name", "x"], "it is JSON",
    ),
    "a changed model": (lambda f, _: broken_artifact(f), "sha256 differs"),
    "a name that Triton can't serve": (lambda f, _: pack(f, name="a b"), "a b"),
    "hooks that raise at import": (lambda f, _: pack(f, "--hooks", hooks(f, "x = 1\nraise OSError('no disk')\n")), "no disk"),
    "hooks that end Python": (lambda f, _: pack(f, "--hooks", hooks(f, "raise SystemExit(3)\n")), "SystemExit"),
    "hooks with a syntax error": (lambda f, _: pack(f, "--hooks", hooks(f, "def preprocess(:\n")), "hooks.py:1"),
    "hooks that are missing": (lambda f, _: pack(f, "--hooks", f / "nothing.py"), "no such file"),
    "no instances": (lambda f, _: pack(f, "--instances", "0"), "must be 1 or more"),
    "no repository": (lambda f, _: ["up", f / "nothing"], "no such folder"),
    "no repository, and the port in use": (lambda f, port: ["up", f / "nothing", "--port", port], "no such folder"),
    "a repository that is served, and the port in use": (served_already, "serves it already"),
    "the gateway's port in use, and which flag": (lambda f, port: ["up", packed(f), "--port", port], "with --port"),
    "a repository without models": (lambda f, _: ["up", f], "no model"),
    "the gateway's port in use": (lambda f, port: ["up", packed(f), "--port", port], "another program listens there"),
    "Triton's port in use": (
        lambda f, port: ["up", packed(f), "--port", "0", "--triton-http-port", port], "--triton-http-port",
    ),
    "a gateway's port in use": (lambda f, port: ["gateway", "--port", port], "another program listens there"),
    "an upstream that is no URL": (lambda f, _: ["gateway", "--upstream", "triton"], "http://127.0.0.1:8000"),
    "load on nothing": (lambda f, port: ["load", "http://127.0.0.1:1", "--model", "x"], "http://127.0.0.1:1"),
    "load on another machine": (lambda f, port: ["load", "http://192.0.2.1", "--model", "x"], "allow-remote"),
    "infer without a gateway": (
        lambda f, _: ["infer", hooks(f, ""), "--model", "x", "--url", "http://127.0.0.1:1"], "serve up",
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told_in_three_lines_with_exit_code_2(
    mistake: str, tmp_path: Path, taken_port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    words, says = MISTAKES[mistake]
    arguments = [str(word) for word in words(tmp_path, taken_port)]
    capsys.readouterr()
    with HELD, pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    printed, told = capsys.readouterr()
    assert "starting Triton" not in printed, "nothing is started before it is refused"
    lines = told.strip().splitlines()
    assert [line.strip().partition(" ")[0] for line in lines] == ["error:", "why:", "mend:"]
    assert says in "\n".join(lines)


def test_a_failed_pack_leaves_the_repository_as_it_was(tmp_path: Path) -> None:
    repository = packed(tmp_path)
    before = {path: path.read_bytes() for path in repository.rglob("*") if path.is_file()}
    with pytest.raises(SystemExit) as caught:
        main([str(word) for word in pack(tmp_path, "--hooks", hooks(tmp_path, "raise OSError\n"))])
    assert caught.value.code == 2
    assert {path: path.read_bytes() for path in repository.rglob("*") if path.is_file()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["artifact", "hooks.py", "models"], (
        "nothing half-written"
    )


def test_pack_says_what_it_wrote_and_what_comes_next(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    packed(tmp_path)
    text = capsys.readouterr().out
    assert "tiny takes x FP32[4]" in text
    assert "tiny gives logits FP32[3]" in text
    assert "serve up" in text


def test_pack_into_what_is_served_says_what_loads_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A second `serve up` would be refused."""
    with claimed(packed(tmp_path), "http://127.0.0.1:8080"):
        capsys.readouterr()
        main_ok(pack(tmp_path, name="next"))
    text = capsys.readouterr().out
    assert f"the process {os.getpid()} (at http://127.0.0.1:8080) serves the repository already" in text
    assert "serve models load next" in text
    assert "serve it with" not in text


@pytest.mark.parametrize("words", [[], ["--help"], ["pack", "--help"], ["up", "--help"], ["load", "--help"]])
def test_help_is_help(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    main_ok(words)
    assert "Usage: serve" in capsys.readouterr().out


def test_a_repository_can_be_moved(tmp_path: Path) -> None:
    repository = packed(tmp_path)
    shutil.move(repository, tmp_path / "elsewhere")
    texts = [path.read_text() for path in (tmp_path / "elsewhere").rglob("config.pbtxt")]
    assert texts
    assert not any(str(tmp_path) in text for text in texts)


def test_what_a_file_of_flags_says_moves_no_cursor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "pack.toml").write_text('edits = "m\\u001b[2J\\u202e"\n')
    with pytest.raises(SystemExit) as ended:
        main(list(map(str, pack(tmp_path, "--config", tmp_path / "pack.toml"))))
    assert ended.value.code == 2
    told = capsys.readouterr()
    assert "edits" in told.err + told.out
    assert "\x1b[2J" not in told.err + told.out
    assert "\u202e" not in told.err + told.out


def test_a_disk_that_takes_no_more_is_told_in_three_lines_and_what_was_there_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    repository, key = packed(tmp_path), tmp_path / "key.pem"
    private = ec.generate_private_key(ec.SECP256R1())
    key.write_bytes(private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    main_ok(["sign", repository, "--key", key])
    before = (repository / "model.sig").read_bytes()
    capsys.readouterr()

    with full_disk(100), pytest.raises(SystemExit) as caught:
        main(["sign", str(repository), "--key", str(key)])

    told = capsys.readouterr().err.splitlines()
    assert caught.value.code == 2
    assert [line.split(":")[0].strip() for line in told] == ["error", "why", "mend"]
    assert (repository / "model.sig").read_bytes() == before
    assert not list(repository.glob(".*.part"))


def test_a_setting_of_the_gateway_that_serve_up_is_given_as_a_flag_is_shown_its_place(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["up", "repository", "--keys", "keys.json"])
    told = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert "write keys = … into a TOML file and name that by --gateway, or set SERVE_GATEWAY_KEYS." in told
    with pytest.raises(SystemExit):
        main(["up", "repository", "--nonsense", "1"])
    assert "setting" not in capsys.readouterr().err
