"""Packing again adds a version; a lock keeps two packs apart; a rollback goes back."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from compress.errors import RepositoryError
from serve.config.pbtxt import from_pbtxt
from serve.pack.write import PackOptions, pack
from serve.repository.lock import locked
from serve.repository.read import read_models
from serve.repository.versions import roll_back, versions_of
from tests.serve_models import HOOKS, hook_file, sum_artifact, tiny_artifact
from tests.unit.serve.repository.test_repository import PRE_ONLY, tree

PARTS = ("tiny", "tiny_network", "tiny_postprocess", "tiny_preprocess")


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    return tiny_artifact(tmp_path / "artifact")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return tmp_path / "models"


def versions(repository: Path) -> dict[str, tuple[int, ...]]:
    return {model.name: model.versions for model in read_models(repository)}


def policy(repository: Path, name: str) -> object:
    text = (repository / name / "config.pbtxt").read_text(encoding="utf-8")
    return from_pbtxt(text).version_policy


def test_packing_again_adds_a_version_to_every_part(tmp_path: Path, artifact: Path, repository: Path) -> None:
    hooks = hook_file(tmp_path)
    assert pack(artifact, repository=repository, name="tiny", hooks=hooks).version == 1
    hooks.write_text(HOOKS.replace('"abc"', '"xyz"'), encoding="utf-8")
    packed = pack(artifact, repository=repository, name="tiny", hooks=hooks, options=PackOptions(threads=2))
    assert packed.version == 2
    assert not packed.removed
    assert not packed.dropped
    assert versions(repository) == dict.fromkeys(PARTS, (1, 2))
    hook = [(repository / "tiny_postprocess" / number / "hooks.py").read_text(encoding="utf-8") for number in "12"]
    assert '"abc"' in hook[0]
    assert '"xyz"' in hook[1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["artifact", "models", "my_hooks.py"]


def test_only_the_newest_versions_are_kept(artifact: Path, repository: Path) -> None:
    dropped = [pack(artifact, repository=repository, name="tiny", keep=2).dropped for _ in range(4)]
    assert dropped == [(), (), (1,), (2,)]
    assert versions(repository) == {"tiny": (3, 4)}


def test_keeping_one_replaces_what_was_there(artifact: Path, repository: Path) -> None:
    for _ in range(2):
        assert pack(artifact, repository=repository, name="tiny", keep=1).version == 1
    assert versions(repository) == {"tiny": (1,)}
    with pytest.raises(RepositoryError, match="can't keep 0"):
        pack(artifact, repository=repository, name="tiny", keep=0)


def test_another_signature_is_no_further_version(tmp_path: Path, artifact: Path, repository: Path) -> None:
    pack(artifact, repository=repository, name="tiny")
    assert pack(sum_artifact(tmp_path / "sum"), repository=repository, name="tiny").version == 1
    assert versions(repository) == {"tiny": (1,)}


def test_other_hooks_are_no_further_version(tmp_path: Path, artifact: Path, repository: Path) -> None:
    pack(artifact, repository=repository, name="tiny", hooks=hook_file(tmp_path))
    assert pack(artifact, repository=repository, name="tiny", hooks=hook_file(tmp_path, PRE_ONLY)).version == 1


@pytest.mark.parametrize("fails", ["2", "config.pbtxt"])
def test_a_version_that_can_t_be_added_leaves_no_trace(
    fails: str, tmp_path: Path, artifact: Path, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack(artifact, repository=repository, name="tiny", hooks=hook_file(tmp_path))
    before = tree(repository)
    real = {name: getattr(Path, name) for name in ("rename", "replace")}
    failed: list[Path] = []

    def full(name: str):  # type: ignore[no-untyped-def]
        def move(self: Path, target: Path) -> Path:
            if self.name == fails and target.parent.name in ("tiny_network", "tiny_postprocess", "2") and not failed:
                failed.append(self)
                raise OSError(28, "No space left on device")
            return real[name](self, target)  # type: ignore[no-any-return]

        return move

    for name in real:
        monkeypatch.setattr(Path, name, full(name))
    with pytest.raises(RepositoryError, match="can't write into"):
        pack(artifact, repository=repository, name="tiny", hooks=hook_file(tmp_path), options=PackOptions(threads=2))
    assert failed
    assert tree(repository) == before


def test_a_rollback_serves_the_version_before(tmp_path: Path, artifact: Path, repository: Path) -> None:
    for _ in range(3):
        pack(artifact, repository=repository, name="tiny", hooks=hook_file(tmp_path))
    assert roll_back(repository, "tiny") == (3, 2)
    assert roll_back(repository, "tiny") == (2, 1)
    for name in PARTS:
        assert "specific=ModelSpecificVersions(versions=(1,))" in str(policy(repository, name))
    with pytest.raises(RepositoryError, match="can't roll back") as caught:
        roll_back(repository, "tiny")
    assert "no version before 1" in caught.value.why
    assert pack(artifact, repository=repository, name="tiny", hooks=hook_file(tmp_path)).version == 4
    assert "latest=ModelLatestVersions(num_versions=1)" in str(policy(repository, "tiny"))


def test_what_was_not_packed_is_not_rolled_back(artifact: Path, repository: Path) -> None:
    pack(artifact, repository=repository, name="tiny")
    with pytest.raises(RepositoryError, match="can't roll back 'other'"):
        roll_back(repository, "other")


def test_packs_at_the_same_time_wait_for_each_other(tmp_path: Path, artifact: Path, repository: Path) -> None:
    code = textwrap.dedent("""
        import sys
        from pathlib import Path
        from serve.pack.write import pack
        for _ in range(5):
            pack(Path(sys.argv[1]), repository=Path(sys.argv[2]), name="tiny", keep=100)
    """)
    command = [sys.executable, "-c", code, str(artifact), str(repository)]
    running = [subprocess.Popen(command) for _ in range(3)]
    assert [process.wait() for process in running] == [0, 0, 0]
    assert versions_of(repository / "tiny") == tuple(range(1, 16))
    assert [path.name for path in repository.parent.iterdir() if path.name.startswith(".")] == []


def test_a_lock_that_stays_is_told(repository: Path) -> None:
    with (
        locked(repository),
        pytest.raises(RepositoryError, match="can't write") as caught,
        locked(repository, wait_s=0.1),
    ):
        pass
    assert "another process" in caught.value.why
    with locked(repository, wait_s=0):
        pass


KILLED = """
import os, signal, sys
from pathlib import Path
from serve.pack.write import pack
artifact, repository, hooks, keep, step = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]), int(sys.argv[5])
def end(event, args):
    global step
    if event == "os.rename" and "models" in str(args[1]):
        step -= 1
        if step < 0:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(end)
pack(artifact, repository=repository, name="tiny", hooks=Path(hooks) if hooks else None, keep=keep)
"""


@pytest.mark.parametrize("keep", [1, 3])
def test_a_pack_that_was_killed_in_its_swap_is_undone_by_the_next_run(
    tmp_path: Path, artifact: Path, repository: Path, keep: int
) -> None:
    """Ended at each of its renames in turn, and found again as it was by what comes next there."""
    hooks = hook_file(tmp_path)
    for _ in range(2):
        pack(artifact, repository=repository, name="tiny", hooks=hooks)
    before, step = tree(repository), 0
    hooks.write_text(HOOKS.replace('"abc"', '"xyz"'), encoding="utf-8")
    while True:
        command = [sys.executable, "-c", KILLED, str(artifact), str(repository), str(hooks), str(keep), str(step)]
        ended = subprocess.run(command, capture_output=True, text=True)
        assert ended.returncode in (0, -9), ended.stderr
        if ended.returncode == 0:
            break
        with pytest.raises(RepositoryError, match="can't roll back 'nothing'"):
            roll_back(repository, "nothing")
        assert tree(repository) == before, step
        assert sorted(path.name for path in tmp_path.iterdir()) == ["artifact", "models", "my_hooks.py"]
        step += 1
    assert step > 8
    assert tree(repository) != before


@pytest.mark.parametrize(
    ("file", "keep"),
    [
        ("tiny/notes.md", 1),
        ("tiny_network/warmup/input", 1),
        ("tiny_network/1/notes.md", 1),
        ("tiny_preprocess/1/data.bin", 2),
        ("tiny_preprocess/2/sub/model.py", 1),
    ],
)
def test_what_was_not_packed_is_not_lost(
    tmp_path: Path, artifact: Path, repository: Path, file: str, keep: int
) -> None:
    hooks = hook_file(tmp_path)
    for _ in range(2):
        pack(artifact, repository=repository, name="tiny", hooks=hooks)
    (repository / file).parent.mkdir(exist_ok=True)
    (repository / file).write_text("mine", encoding="utf-8")
    before = tree(repository)
    with pytest.raises(RepositoryError, match="can't replace") as caught:
        pack(artifact, repository=repository, name="tiny", hooks=hooks, keep=keep)
    assert "would go with it" in caught.value.why
    assert tree(repository) == before


def test_a_further_version_leaves_what_was_not_packed(artifact: Path, repository: Path) -> None:
    pack(artifact, repository=repository, name="tiny")
    (repository / "tiny/warmup").mkdir()
    (repository / "tiny/warmup/input").write_text("mine", encoding="utf-8")
    (repository / "tiny/1/__pycache__").mkdir()
    (repository / "tiny/1/__pycache__/model.cpython-311.pyc").touch()
    for _ in range(4):
        pack(artifact, repository=repository, name="tiny", keep=2)
    assert (repository / "tiny/warmup/input").exists()


@pytest.mark.parametrize("keep", [1, 3])
def test_a_model_that_is_read_from_what_is_replaced_is_packed_whole(
    tmp_path: Path, artifact: Path, repository: Path, keep: int
) -> None:
    pack(artifact, repository=repository, name="tiny", hooks=hook_file(tmp_path))
    model, hooks = repository / "tiny_network/1/model.onnx", repository / "tiny_preprocess/1/hooks.py"
    held, code = model.read_bytes(), hooks.read_bytes()
    packed = pack(model, repository=repository, name="tiny", hooks=hooks, keep=keep)
    assert (repository / f"tiny_network/{packed.version}/model.onnx").read_bytes() == held
    assert (repository / f"tiny_preprocess/{packed.version}/hooks.py").read_bytes() == code


def test_an_artifact_that_stands_in_what_is_replaced_is_not_lost(artifact: Path, repository: Path) -> None:
    pack(artifact, repository=repository, name="tiny")
    inside = artifact.rename(repository / "tiny/artifact")
    with pytest.raises(RepositoryError, match="can't replace") as caught:
        pack(inside, repository=repository, name="tiny", keep=1)
    assert "'artifact/artifact.json'" in caught.value.why
    assert (inside / "model.onnx").exists()
