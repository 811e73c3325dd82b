"""The lock of a folder: one writer, or several readers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from compress.errors import RepositoryError, ServerError
from serve.gateway.access import keys
from serve.repository.lock import hold, locked
from serve.up.watch import fingerprints


def test_readers_share_it_and_a_writer_has_it_alone(tmp_path: Path) -> None:
    readers = [hold(tmp_path, wait_s=0.0, shared=True) for _ in range(2)]
    with pytest.raises(BlockingIOError, match="another process has been writing there for 0 s"):
        hold(tmp_path, wait_s=0.0)
    for reader in readers:
        os.close(reader)
    with locked(tmp_path):
        assert fingerprints(tmp_path) is None
        with pytest.raises(RepositoryError) as caught, locked(tmp_path, wait_s=0.0):
            pass
        assert caught.value.why == "another process has been writing there for 0 s"
    assert fingerprints(tmp_path) == {}
    os.close(hold(tmp_path, wait_s=0.0))


def test_keys_are_written_under_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "hold", lambda folder: hold(folder, wait_s=0.0))
    with locked(tmp_path), pytest.raises(ServerError, match="can't write the keys") as caught:
        keys.add_key(tmp_path / "keys.json", "ada")
    assert caught.value.why == "another process has been writing there for 0 s"
    keys.add_key(tmp_path / "keys.json", "ada")
    assert [key.name for key in keys.read_keys(tmp_path / "keys.json")] == ["ada"]
