"""What a repository is made of: checksums that pack writes, and a signature over all of it."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from compress.errors import RepositoryError
from serve.cli.main import main
from serve.pack.write import pack
from serve.repository.copies import MARK
from serve.repository.provenance import read_provenance, verify_checksums
from serve.repository.signing import check_files, check_signature, sign
from tests.serve_models import hook_file, tiny_artifact

OPENSSL = str(shutil.which("openssl"))


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    pack(tiny_artifact(tmp_path / "artifact"), repository=tmp_path / "models", name="tiny", hooks=hook_file(tmp_path))
    return tmp_path / "models"


KINDS = {"Ed25519": ["ed25519"], "P-256": ["EC", "-pkeyopt", "ec_paramgen_curve:P-256"]}


@pytest.fixture(scope="module", params=KINDS)
def keys(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """Private, public, and the public one of somebody else; made by openssl, as the documents say."""
    folder = tmp_path_factory.mktemp("keys")
    for name in ("ours", "theirs"):
        key = folder / f"{name}.pem"
        made = [OPENSSL, "genpkey", "-algorithm", *KINDS[request.param], "-out", str(key)]
        subprocess.run(made, check=True, capture_output=True)
        subprocess.run([OPENSSL, "pkey", "-in", key, "-pubout", "-out", folder / f"{name}.pub"], check=True)
    return folder / "ours.pem", folder / "ours.pub", folder / "theirs.pub"


by_sums = pytest.mark.parametrize("keys", ["Ed25519"], indirect=True)


def test_every_version_says_what_it_is_made_of(repository: Path) -> None:
    told = read_provenance(repository / "tiny_network/1")
    assert told is not None
    assert list(told.files) == ["model.onnx"]
    hooks = read_provenance(repository / "tiny_preprocess/1")
    assert hooks is not None
    assert set(hooks.files) == {"model.py", "hooks.py", "hook_values.py"}
    assert verify_checksums(repository) == 7


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
    assert verify_checksums(repository) == 7


def test_a_folder_that_was_not_packed_is_none_of_its_business(repository: Path) -> None:
    (repository / "other/1").mkdir(parents=True)
    (repository / "other/1/model.py").write_text("")
    assert verify_checksums(repository) == 7


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
    (repository / "evil/1/model.py").write_text("")
    with pytest.raises(RepositoryError, match=r"evil/config\.pbtxt"):
        check_signature(repository, keys[1])


def _linked(path: str, target: str = "") -> Callable[[Path], object]:
    """A link to the same content in the place of what was there, or to something else in the repository."""

    def plant(repository: Path) -> None:
        place, leads_to = repository / path, repository / target
        if place.exists():
            leads_to = repository.parent / "elsewhere"
            place.rename(leads_to)
        place.symlink_to(leads_to)

    return plant


def _written(path: str) -> Callable[[Path], object]:
    def plant(repository: Path) -> None:
        (repository / path).parent.mkdir(parents=True, exist_ok=True)
        (repository / path).write_bytes(b"evil")

    return plant


PLANTED: dict[str, tuple[Callable[[Path], object], str]] = {
    "a version that is a link": (_linked("tiny_network/2", "tiny_network/1"), "a link"),
    "a model that is a link": (_linked("other", "tiny_network"), "a link"),
    "a model behind a link": (_linked("tiny_network"), "a link"),
    "a file behind a link": (_linked("tiny_network/1/model.onnx"), "a link"),
    "a link to nothing": (_linked("tiny_network/1/more", "nothing"), "a link"),
    "a link in the place of the list": (_linked("SHA256SUMS"), "a link"),
    "byte code": (_written("tiny_preprocess/1/__pycache__/hooks.cpython-311.pyc"), "byte code"),
    "byte code beside its source": (_written("tiny_preprocess/1/numpy.pyc"), "byte code"),
    "a hidden model": (_written(".git/1/model.py"), "changed since"),
    "a list of its own": (_written("tiny_preprocess/1/SHA256SUMS"), "changed since"),
    "an empty version": (lambda repository: (repository / "tiny_network/2").mkdir(), "empty folder"),
    "a pipe": (lambda repository: os.mkfifo(repository / "tiny_network/1/pipe"), "a pipe"),
    "a name of two lines": (_written("tiny_network/1/a\nb"), "not printable"),
    "a name that is no text": (lambda repository: (repository / os.fsdecode(b"\xff")).touch(), "not printable"),
    "a folder too deep": (_written("tiny/1/" + "a/" * 40 + "b"), "folders deep"),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_what_no_list_can_vouch_for_is_neither_signed_nor_served(
    repository: Path, keys: tuple[Path, Path, Path], planted: str
) -> None:
    plant, why = PLANTED[planted]
    sign(repository, keys[0])
    plant(repository)
    with pytest.raises(RepositoryError, match=why):
        check_files(repository, keys[1], trust_changes=True)
    if why != "changed since" and "SHA256SUMS" not in planted:
        with pytest.raises(RepositoryError, match=why):
            sign(repository, keys[0])


@by_sums
def test_a_name_that_holds_another_line_is_no_stand_in_for_two_files(
    repository: Path, keys: tuple[Path, Path, Path]
) -> None:
    sign(repository, keys[0])
    first, second = (repository / "SHA256SUMS").read_text().splitlines()[:2]
    one, other = repository / first[66:], repository / second[66:]
    content = one.read_bytes()
    one.unlink()
    other.unlink()
    odd = repository / f"{first[66:]}\n{second}"
    odd.parent.mkdir(parents=True, exist_ok=True)
    odd.write_bytes(content)
    with pytest.raises(RepositoryError):
        check_signature(repository, keys[1])


def test_a_repository_that_is_reached_through_a_link_is_one(repository: Path, keys: tuple[Path, Path, Path]) -> None:
    (repository.parent / "link").symlink_to(repository)
    count = sign(repository.parent / "link", keys[0])
    assert check_files(repository.parent / "link", keys[1]) == count


def test_a_copy_holds_what_was_verified_and_nothing_else(
    repository: Path, keys: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    sign(repository, keys[0])
    with pytest.raises(SystemExit) as ended:
        main(["check", str(repository), "--public-key", str(keys[1]), "--into", str(tmp_path / "copy")])
    assert not ended.value.code
    copied = {path: path.read_bytes() for path in (tmp_path / "copy").rglob("*/*") if path.is_file()}
    assert {str(path.relative_to(tmp_path / "copy")): content for path, content in copied.items()} == {
        str(path.relative_to(repository)): path.read_bytes() for path in repository.rglob("*/*") if path.is_file()
    }
    verify_checksums(tmp_path / "copy")
    _change("tiny_network/1/model.onnx")(repository)
    with pytest.raises(RepositoryError, match="changed since"):
        check_files(repository, keys[1], into=tmp_path / "another")
    assert not list((tmp_path / "another").iterdir())
    (tmp_path / "copy" / MARK).unlink()
    with pytest.raises(RepositoryError, match="not empty"):
        check_files(repository, keys[1], into=tmp_path / "copy")
    assert verify_checksums(tmp_path / "copy"), "what is no copy of ours stays as it was"
    with pytest.raises(RepositoryError, match="for what is signed"):
        check_files(repository, None, into=tmp_path / "third")


@pytest.mark.parametrize(
    ("plant", "why"),
    [
        (_written("tiny_network/libtriton_onnxruntime.so"), "did not write it"),
        (_written("tiny_network/1/libtriton_onnxruntime.so.1"), "did not write it"),
        (_written("tiny_preprocess/1/__pycache__/evil.so"), "did not write it"),
        (_written("tiny_preprocess/1/hooks.pyc"), "did not write it"),
        (_linked("tiny_network/1/model.onnx"), "a link"),
    ],
)
def test_a_packed_model_has_no_entry_that_pack_did_not_write(
    repository: Path, plant: Callable[[Path], object], why: str
) -> None:
    plant(repository)
    with pytest.raises(RepositoryError, match=why):
        check_files(repository, None)
    check_files(repository, None, trust_changes=True)


@by_sums
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
