"""How a command ends where torchrun would start it again: a mistake is told from what may be gone by then."""

from __future__ import annotations

import pytest

from compress.errors import BudgetError, DatasetError, LostError, ResourceError, StageError, ToolkitError
from compress.jobs.running import run_to_end


@pytest.mark.parametrize("launched", [False, True])
@pytest.mark.parametrize(
    ("kind", "alone", "under_torchrun"),
    [(DatasetError, 2, 2), (StageError, 2, 2), (BudgetError, 3, 3), (LostError, 2, 75), (ResourceError, 2, 75)],
)
def test_what_may_be_gone_the_next_time_is_no_mistake(
    kind: type[ToolkitError], alone: int, under_torchrun: int, launched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if launched:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "training")

    def fails() -> None:
        raise kind("can't", why="so", mend="do")

    with pytest.raises(SystemExit) as ended:
        run_to_end(fails, resumes=True)
    assert ended.value.code == (under_torchrun if launched else alone)
