"""The field's signature format: what OpenSSF's own tool writes is read, and it reads ours; a statement is not followed."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from hypothesis import given
from hypothesis import strategies as st

from compress.errors import RepositoryError
from serve.repository.bundle import bundle_of, files_in
from serve.repository.signing import check_files, check_signature, sign

CURVES = {"P-256": ec.SECP256R1(), "P-384": ec.SECP384R1(), "P-521": ec.SECP521R1()}
KEY = ec.generate_private_key(ec.SECP256R1())
with_library = pytest.mark.skipif(find_spec("model_signing") is None, reason="model-signing is not there")
Document = dict[str, Any]


def written(key: ec.EllipticCurvePrivateKey, folder: Path) -> tuple[Path, Path]:
    (folder / "key.pem").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    (folder / "public.pem").write_bytes(public)
    return folder / "key.pem", folder / "public.pem"


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path]:
    return written(KEY, tmp_path)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Names that sort otherwise as paths than as texts, and letters that JSON escapes."""
    for name in ("m/1/model.py", "m/config.pbtxt", "m-2/1/größe.bin", 'm/1/a"b'):
        (tmp_path / "models" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "models" / name).write_text(name)
    return tmp_path / "models"


def library(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "model_signing", *map(str, words)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def library_signs(repository: Path, key: Path, *flags: str) -> None:
    done = library("sign", "key", repository, "--private_key", key, "--signature", repository / "model.sig", *flags)
    assert done.returncode == 0, done.stdout + done.stderr


def library_verifies(repository: Path, public: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    return library("verify", "key", repository, "--public_key", public, "--signature", repository / "model.sig", *flags)


def statement_of(signed: bytes) -> Document:
    found: Document = json.loads(base64.b64decode(json.loads(signed)["dsseEnvelope"]["payload"]))
    return found


@with_library
@pytest.mark.parametrize("curve", CURVES)
def test_the_fields_own_tool_and_ours_read_each_other(repository: Path, tmp_path: Path, curve: str) -> None:
    private, public = written(ec.generate_private_key(CURVES[curve]), tmp_path)
    (repository / "SHA256SUMS").write_text("of another signature\n")
    assert sign(repository, private) == 4
    ours = statement_of((repository / "model.sig").read_bytes())
    done = library_verifies(repository, public)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stdout

    (repository / "SHA256SUMS").unlink()
    library_signs(repository, private)
    assert check_signature(repository, public) == 4
    theirs = statement_of((repository / "model.sig").read_bytes())
    for each in (ours, theirs):
        del each["predicate"]["serialization"]["ignore_paths"]
    assert ours == theirs

    (repository / "m/1/model.py").write_text("evil")
    assert "Hash mismatch" in library_verifies(repository, public).stderr
    with pytest.raises(RepositoryError, match=r"changed since it was signed: m/1/model\.py"):
        check_signature(repository, public)


@with_library
def test_what_the_library_leaves_out_is_refused_here(repository: Path, keys: tuple[Path, Path]) -> None:
    """Triton loads a model folder called .git, and takes an empty folder for a version."""
    private, public = keys
    library_signs(repository, private)
    for plant, why in (
        (".git/1/model.py", r"\.git/1/model\.py"),
        (".gitattributes", r"\.gitattributes"),
        ("m/2/", "an empty folder"),
        ("m/1/__pycache__/model.cpython-311.pyc", "byte code"),
    ):
        copy = repository.parent / f"copy of {why}"
        shutil.copytree(repository, copy)
        place = copy / plant
        place.mkdir(parents=True) if plant.endswith("/") else place.parent.mkdir(parents=True, exist_ok=True)
        if not place.exists():
            place.write_text("evil")
        if "byte" not in why:
            assert library_verifies(copy, public).returncode == 0, plant
        with pytest.raises(RepositoryError, match=why):
            check_files(copy, public, trust_changes=True)


@with_library
def test_what_we_sign_of_git_the_library_verifies_when_it_is_told_to(repository: Path, keys: tuple[Path, Path]) -> None:
    (repository / ".gitattributes").write_text("* -text\n")
    assert sign(repository, keys[0]) == 5
    assert "Missing files" in library_verifies(repository, keys[1]).stderr
    assert library_verifies(repository, keys[1], "--no-ignore-git-paths").returncode == 0
    library_signs(repository, keys[0], "--no-ignore-git-paths")
    assert check_signature(repository, keys[1]) == 5


@with_library
def test_links_that_the_library_was_told_to_follow_and_paths_to_ignore_are_refused(
    repository: Path, keys: tuple[Path, Path]
) -> None:
    library_signs(repository, keys[0], "--ignore-paths", str(repository / "m-2"))
    with pytest.raises(RepositoryError, match="changed since it was signed: m-2"):
        check_signature(repository, keys[1])
    (repository / "m/2").symlink_to("1")
    library_signs(repository, keys[0], "--allow_symlinks")
    assert library_verifies(repository, keys[1], "--allow_symlinks").returncode == 0
    with pytest.raises(RepositoryError, match="it is a link"):
        check_files(repository, keys[1])


def test_a_key_of_each_kind_has_a_signature_of_its_own(
    repository: Path, keys: tuple[Path, Path], tmp_path: Path
) -> None:
    openssl = str(shutil.which("openssl"))
    for words in (["genpkey", "-algorithm", "ed25519", "-out"], ["pkey", "-pubout", "-in", "ed.pem", "-out"]):
        name = "ed.pub" if "-pubout" in words else "ed.pem"
        subprocess.run([openssl, *words, name], cwd=tmp_path, check=True, capture_output=True)
    sign(repository, tmp_path / "ed.pem")
    with pytest.raises(RepositoryError, match=r"not signed") as refused:
        check_signature(repository, keys[1])
    assert "model.sig" in str(refused.value.why)
    sign(repository, keys[0])
    assert check_signature(repository, tmp_path / "ed.pub") == check_signature(repository, keys[1]) == 4
    (repository / "model.sig").unlink()
    (repository / "model.sig").symlink_to("m/config.pbtxt")
    with pytest.raises(RepositoryError, match="it is a link"):
        check_files(repository, tmp_path / "ed.pub")


def test_another_curve_is_no_key(repository: Path, tmp_path: Path) -> None:
    private, public = written(ec.generate_private_key(ec.SECP256K1()), tmp_path)
    with pytest.raises(RepositoryError, match="another kind than P-256"):
        sign(repository, private)
    with pytest.raises(RepositoryError, match="another kind than P-256"):
        check_signature(repository, public)


def _resource(statement: Document) -> Document:
    found: Document = statement["predicate"]["resources"][0]
    return found


STATEMENTS: dict[str, tuple[Callable[[Document], object], str]] = {
    "of the release before": (
        lambda each: each.update(predicateType="https://model_signing/Digests/v0.1"), "Digests/v0.1, not"),
    "of something else": (lambda each: each.update(_type="https://in-toto.io/Link/v1"), "not https"),
    "of shards": (lambda each: each["predicate"]["serialization"].update(method="shards"), "sha256 of shards"),
    "of another hash": (lambda each: each["predicate"]["serialization"].update(hash_type="blake3"), "blake3 of files"),
    "of one file by another hash": (lambda each: _resource(each).update(algorithm="blake2b"), "no SHA-256"),
    "with a digest too short": (lambda each: _resource(each).update(digest="00"), "no SHA-256"),
    "with a digest of no digits": (lambda each: _resource(each).update(digest="x" * 64), "non-hexadecimal"),
    "with a file twice": (lambda each: each["predicate"]["resources"].append(_resource(each)), "in it twice"),
    "with a name that is none": (lambda each: _resource(each).update(name=["a"]), "damaged"),
    "with another digest of all": (lambda each: each["subject"][0]["digest"].update(sha256="0" * 64), "not of the files"),
    "with two subjects": (lambda each: each["subject"].append(each["subject"][0]), "too many values"),
    "without files": (lambda each: each["predicate"].pop("resources"), "damaged"),
}  # fmt: skip


@pytest.mark.parametrize("case", STATEMENTS)
def test_a_statement_of_another_kind_is_refused_though_it_is_signed(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    change, why = STATEMENTS[case]
    statement = statement_of(bundle_of({"a": "1" * 64, "b": "2" * 64}, "models", (), KEY))
    change(statement)
    monkeypatch.setattr("serve.repository.bundle.json.dumps", lambda data, **more: json.JSONEncoder().encode(
        statement if "_type" in data else data))  # fmt: skip
    signed = bundle_of({"a": "1" * 64}, "models", (), KEY)
    with pytest.raises(ValueError, match=why):
        files_in(signed, KEY.public_key())


BUNDLES: dict[str, tuple[Callable[[Document], object], str]] = {
    "of another version": (lambda each: each.update(mediaType="application/vnd.dev.sigstore.bundle+json;version=0.1"),
                           "not of the format's version"),
    "of another payload": (lambda each: each["dsseEnvelope"].update(payloadType="text/plain"), "text/plain"),
    "with two signatures": (lambda each: each["dsseEnvelope"]["signatures"].append({}), "too many values"),
    "without a signature": (lambda each: each["dsseEnvelope"]["signatures"].clear(), "not enough values"),
    "without an envelope": (lambda each: each.pop("dsseEnvelope"), "no bundle"),
    "with no text of base 64": (lambda each: each["dsseEnvelope"].update(payload="é"), "no bundle"),
}  # fmt: skip


@pytest.mark.parametrize("case", BUNDLES)
def test_a_bundle_of_another_kind_is_refused(repository: Path, keys: tuple[Path, Path], case: str) -> None:
    change, why = BUNDLES[case]
    sign(repository, keys[0])
    changed = json.loads((repository / "model.sig").read_bytes())
    change(changed)
    (repository / "model.sig").write_text(json.dumps(changed))
    with pytest.raises(RepositoryError, match="not signed") as refused:
        check_signature(repository, keys[1])
    assert why in str(refused.value.why)


def test_a_signature_is_of_the_payload_and_its_type(repository: Path, keys: tuple[Path, Path]) -> None:
    sign(repository, keys[0])
    whole = json.loads((repository / "model.sig").read_bytes())
    statement = statement_of((repository / "model.sig").read_bytes())
    _resource(statement)["digest"] = "0" * 64
    whole["dsseEnvelope"]["payload"] = base64.b64encode(json.dumps(statement).encode()).decode()
    (repository / "model.sig").write_text(json.dumps(whole))
    with pytest.raises(RepositoryError, match=r"model\.sig is not of"):
        check_signature(repository, keys[1])


names = st.text(st.characters(codec="utf-8", exclude_characters="/\x00"), min_size=1, max_size=8)
digests = st.binary(min_size=32, max_size=32).map(bytes.hex)


@given(files=st.dictionaries(st.lists(names, min_size=1, max_size=3).map("/".join), digests, max_size=6))
def test_whatever_is_signed_is_read_back(files: dict[str, str]) -> None:
    assert files_in(bundle_of(files, "models", (), KEY), KEY.public_key()) == files


@given(noise=st.one_of(st.binary(max_size=60), st.recursive(
    st.none() | st.integers() | st.text(max_size=4), lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["mediaType", "dsseEnvelope", "signatures", "payload", "sig"]), inner, max_size=3),
).map(lambda value: json.dumps(value).encode())))  # fmt: skip
def test_whatever_else_lies_there_is_a_value_error(noise: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        files_in(noise, KEY.public_key())


def test_a_pipe_in_its_place_is_not_read(repository: Path, keys: tuple[Path, Path]) -> None:
    os.mkfifo(repository / "model.sig")
    with pytest.raises(RepositoryError, match=r"no file"):
        check_signature(repository, keys[1], {})
