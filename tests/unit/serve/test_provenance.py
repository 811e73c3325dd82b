"""What a repository is made of: checksums that pack writes, and a signature over all of it."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from compress.errors import RepositoryError
from serve.cli import main
from serve.provenance import read_provenance, verify
from serve.repository import pack
from serve.signing import check_signature, sign
from serve.up import check_files
from tests.serve_models import hook_file, tiny_artifact

OPENSSL = str(shutil.which("openssl"))


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    pack(tiny_artifact(tmp_path / "artifact"), repository=tmp_path / "models", name="tiny", hooks=hook_file(tmp_path))
    return tmp_path / "models"


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """Private, public, and the public one of somebody else; made by openssl, as the documents say."""
    folder = tmp_path_factory.mktemp("keys")
    for name in ("ours", "theirs"):
        key = folder / f"{name}.pem"
        subprocess.run([OPENSSL, "genpkey", "-algorithm", "ed25519", "-out", key], check=True, capture_output=True)
        subprocess.run([OPENSSL, "pkey", "-in", key, "-pubout", "-out", folder / f"{name}.pub"], check=True)
    return folder / "ours.pem", folder / "ours.pub", folder / "theirs.pub"


def test_every_version_says_what_it_is_made_of(repository: Path) -> None:
    told = read_provenance(repository / "tiny_network/1")
    assert told is not None
    assert list(told.files) == ["model.onnx"]
    hooks = read_provenance(repository / "tiny_preprocess/1")
    assert hooks is not None
    assert set(hooks.files) == {"model.py", "hooks.py", "hook_values.py"}
    assert verify(repository) == 7


def _change(path: str) -> Callable[[Path], object]:
    return lambda repository: (repository / path).write_bytes((repository / path).read_bytes() + b"\n")


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (_change("tiny_network/1/model.onnx"), "sha256 differs"),
        (_change("tiny_preprocess/1/hooks.py"), "sha256 differs"),
        (lambda repository: (repository / "tiny_network/1/model.onnx").unlink(), "missing"),
        (lambda repository: (repository / "tiny_preprocess/1/numpy.py").write_text("evil"), "did not write it"),
        (lambda repository: (repository / "tiny_network/1/provenance.json").write_text("{}"), "damaged"),
    ],
)
def test_what_was_changed_is_not_served(repository: Path, spoil: Callable[[Path], object], why: str) -> None:
    spoil(repository)
    with pytest.raises(RepositoryError, match=why):
        check_files(repository, None)
    if "damaged" not in why:
        check_files(repository, None, trust_changes=True)


def test_an_edited_configuration_and_compiled_files_are_no_change(repository: Path) -> None:
    config = repository / "tiny_network/config.pbtxt"
    config.write_text(config.read_text() + 'metric_tags { key: "team" value: "a" }\n')
    (repository / "tiny_preprocess/1/__pycache__").mkdir()
    (repository / "tiny_preprocess/1/__pycache__/hooks.cpython-311.pyc").write_bytes(b"")
    assert verify(repository) == 7


def test_a_folder_that_was_not_packed_is_none_of_its_business(repository: Path) -> None:
    (repository / "other/1").mkdir(parents=True)
    (repository / "other/1/model.py").write_text("")
    assert verify(repository) == 7


def test_a_signed_repository_is_served_by_its_key_alone(repository: Path, keys: tuple[Path, Path, Path]) -> None:
    private, public, other = keys
    with pytest.raises(RepositoryError, match="not signed"):
        check_signature(repository, public)
    count = sign(repository, private)
    assert check_signature(repository, public) == count
    with pytest.raises(RepositoryError, match="not of"):
        check_signature(repository, other)


@pytest.mark.parametrize("path", ["tiny/config.pbtxt", "tiny_network/1/model.onnx"])
def test_any_change_breaks_the_signature(repository: Path, keys: tuple[Path, Path, Path], path: str) -> None:
    sign(repository, keys[0])
    _change(path)(repository)
    with pytest.raises(RepositoryError, match="changed since it was signed"):
        check_signature(repository, keys[1])


def test_so_does_a_new_file(repository: Path, keys: tuple[Path, Path, Path]) -> None:
    sign(repository, keys[0])
    (repository / "evil/1").mkdir(parents=True)
    (repository / "evil/config.pbtxt").write_text('name: "evil"')
    with pytest.raises(RepositoryError, match=r"evil/config\.pbtxt"):
        check_signature(repository, keys[1])


def test_other_tools_check_it_too(repository: Path, keys: tuple[Path, Path, Path]) -> None:
    sign(repository, keys[0])
    subprocess.run([str(shutil.which("sha256sum")), "--check", "--quiet", "SHA256SUMS"], cwd=repository, check=True)
    verified = [OPENSSL, "pkeyutl", "-verify", "-rawin", "-pubin", "-inkey", str(keys[1]), "-in", "SHA256SUMS"]
    subprocess.run([*verified, "-sigfile", "SHA256SUMS.sig"], cwd=repository, check=True, capture_output=True)


@pytest.mark.parametrize("text", ["", "no key", "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"])
def test_what_is_no_key_is_refused_with_how_to_make_one(repository: Path, tmp_path: Path, text: str) -> None:
    (tmp_path / "key.pem").write_text(text)
    with pytest.raises(RepositoryError, match="openssl genpkey"):
        sign(repository, tmp_path / "key.pem")


def test_the_commands_say_what_they_checked(
    repository: Path, keys: tuple[Path, Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    words = (["check"], ["sign", "--key", str(keys[0])], ["check", "--public-key", str(keys[1])])
    for command, *flags in words:
        with pytest.raises(SystemExit) as ended:
            main([command, str(repository), *flags])
        assert not ended.value.code
    told = capsys.readouterr().out
    assert "7 files are what was packed" in told
    assert "files are what was signed" in told
    _change("tiny_network/1/model.onnx")(repository)
    with pytest.raises(SystemExit) as ended:
        main(["check", str(repository)])
    assert ended.value.code == 2
    assert "won't serve" in capsys.readouterr().err


def test_a_server_does_not_start_on_what_was_changed(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _change("tiny_network/1/model.onnx")(repository)
    with pytest.raises(SystemExit) as ended:
        main(["up", str(repository), "--port", "0"])
    assert ended.value.code == 2
    assert "--trust-changes" in capsys.readouterr().err


def test_the_gate_ends_with_code_3_where_nobody_knows(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["deploy", "gate", str(repository), "--model", "tiny", "--max-drop", "5"])
    assert ended.value.code == 3
    assert "not measured" in capsys.readouterr().out
