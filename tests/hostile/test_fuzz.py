"""Files changed at random are refused or load; nothing runs, and nothing crashes."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.hostile.fuzz import KINDS, changed, opened


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32))
def test_a_changed_file_is_refused_or_loads(folder: Path, kind: str, seed: int) -> None:
    path, canary = folder / f"file{kind}", folder / "canary"
    path.write_bytes(changed(kind, Random(seed), canary))
    assert opened(path) in ("loaded", "refused")
    assert not canary.exists()
