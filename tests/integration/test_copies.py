"""`serve check --into`, as a pod runs it: again on the same volume, after it was killed, with another repository."""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from serve.repository.copies import MARK
from serve.repository.signing import UNSIGNED, sign

CHECK = [sys.executable, "-m", "serve", "check"]
SIZE = 24 << 20
KILLS = 8


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    return tmp_path / "volume"


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path]:
    """Private and public."""
    key = ec.generate_private_key(ec.SECP256R1())
    (tmp_path / "key.pem").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    (tmp_path / "public.pem").write_bytes(
        key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    )
    return tmp_path / "key.pem", tmp_path / "public.pem"


def _repository(folder: Path, key: Path, seed: int) -> Path:
    """Three models; one of them is called otherwise in each repository."""
    draw = random.Random(seed)
    for name in ("first", f"only-{seed}", "last"):
        version = folder / name / "1"
        version.mkdir(parents=True)
        (version / "model.onnx").write_bytes(draw.randbytes(SIZE // 3))
        (folder / name / "config.pbtxt").write_text(f'name: "{name}" backend: "onnxruntime" # {seed}')
    sign(folder, key)
    return folder


def _files(folder: Path, *, hidden: bool = False) -> dict[str, bytes]:
    found = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    left_out = (MARK, *UNSIGNED)
    return {
        name: path.read_bytes()
        for name, path in found.items()
        if name not in left_out and (hidden or not name.startswith(".copy-"))
    }


def _check(repository: Path, public: Path, volume: Path) -> subprocess.CompletedProcess[str]:
    words = [*CHECK, str(repository), "--public-key", str(public), "--into", str(volume)]
    return subprocess.run(words, capture_output=True, text=True, check=False)


def _killed(repository: Path, public: Path, volume: Path, after_s: float) -> int:
    """Kill it so long after it began to copy; gives its code."""
    before = {path.name for path in volume.glob(".copy-*")} if volume.exists() else set()
    running = subprocess.Popen([*CHECK, str(repository), "--public-key", str(public), "--into", str(volume)],
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
    while running.poll() is None:
        if {path.name for path in volume.glob(".copy-*")} - before:
            break
    time.sleep(after_s)
    with contextlib.suppress(ProcessLookupError):
        running.send_signal(signal.SIGKILL)
    return running.wait()


def test_a_copy_is_whole_or_refused_wherever_its_run_is_killed(
    tmp_path: Path, keys: tuple[Path, Path], volume: Path
) -> None:
    repositories = [_repository(tmp_path / f"repository-{seed}", keys[0], seed) for seed in range(2)]
    wanted = [_files(each) for each in repositories]
    begun = time.perf_counter()
    assert _check(repositories[0], keys[1], volume).returncode == 0
    spent_s = time.perf_counter() - begun
    draw = random.Random(26)
    killed = 0
    for number in range(KILLS):
        turn = number % 2
        code = _killed(repositories[turn], keys[1], volume, (number > 0) * draw.random() * spent_s / 10)
        killed += code == -signal.SIGKILL
        seen = _files(volume)
        assert seen.items() <= wanted[turn].items(), "what is in its place is verified, and of one repository"
        if code == 0:
            assert seen == wanted[turn]
        if draw.random() < 0.5:
            ended = _check(repositories[turn], keys[1], volume)
            assert ended.returncode == 0, ended.stderr
            assert _files(volume, hidden=True) == wanted[turn]
    assert killed, "one at least was killed before it ended"


def test_a_pod_that_starts_again_gets_what_is_signed_now(tmp_path: Path, keys: tuple[Path, Path], volume: Path) -> None:
    one, two = (_repository(tmp_path / f"repository-{seed}", keys[0], seed) for seed in range(2))
    assert _check(one, keys[1], volume).returncode == 0
    assert _check(one, keys[1], volume).returncode == 0, "the same again"
    (volume / "first/1/model.onnx").write_bytes(b"tampered")
    (volume / "evil/1").mkdir(parents=True)
    (volume / "evil/1/model.py").write_text("evil")
    (volume / "link").symlink_to(tmp_path / "repository-0")
    assert _check(one, keys[1], volume).returncode == 0
    assert _files(volume, hidden=True) == _files(one)
    assert _files(one), "where a link led, all is there"
    assert _check(two, keys[1], volume).returncode == 0
    assert _files(volume, hidden=True) == _files(two)
    (two / "last/1/model.onnx").write_bytes(b"tampered")
    ended = _check(two, keys[1], volume)
    assert ended.returncode == 2
    assert "changed since it was signed: last/1/model.onnx" in ended.stderr
    assert not list(volume.iterdir()), "and nothing is left that could be served"


def test_a_folder_with_something_else_in_it_is_left_alone(
    tmp_path: Path, keys: tuple[Path, Path], volume: Path
) -> None:
    repository = _repository(tmp_path / "repository", keys[0], 0)
    volume.mkdir()
    (volume / "mine").write_text("mine")
    for folder, why in (
        (volume, "not empty"),
        (repository, "name a folder that is apart"),
        (repository / "first", "name a folder that is apart"),
        (tmp_path, "name a folder that is apart"),
    ):
        ended = _check(repository, keys[1], folder)
        assert (ended.returncode, why in ended.stderr) == (2, True), ended.stderr
    assert (volume / "mine").read_text() == "mine"
    assert _check(repository, keys[1], tmp_path / "another").returncode == 0
