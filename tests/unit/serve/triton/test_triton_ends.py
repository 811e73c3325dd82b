"""When a Triton that was told to end has nothing left but what it never lets go of."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from serve.triton import ending
from serve.triton.ending import ANSWERED, Ending
from serve.triton.stubs import Relatives, Stub

CONFIG = 'backend: "python" max_batch_size: 0'
SAID = b"I1 server.cc:336] " + ANSWERED + b"\n"
RAISED = b"E1 pb_stub.cc:714] \"Failed to process the request(s) for model 'm_0_0', message: ValueError: no\"\n"
M, OTHER = Stub(11, "m", "m_0_0", "1"), Stub(12, "other", "other_0_0", "1")
LONG = b"x" * ending.CHUNK


@pytest.fixture
def ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., bool]:
    """Whether it may be killed in the end, with these processes left."""
    monkeypatch.setattr(ending, "GOES_S", 0.1)
    monkeypatch.setattr(ending, "GONE_S", 0.1)

    def ends(
        *stubs: Stub,
        before: bytes = b"",
        after: bytes = SAID,
        own: tuple[int, ...] = (10,),
        code: str = "",
        wedged: tuple[str, ...] = (),
        blind: bool = False,
    ) -> bool:
        for name in ("m", "other"):
            (tmp_path / name / "1").mkdir(parents=True, exist_ok=True)
            (tmp_path / name / "config.pbtxt").write_text(CONFIG)
            (tmp_path / name / "1/model.py").write_text(code)

        def relatives() -> Relatives:
            if blind:
                raise OSError(24, "Too many open files")
            return Relatives([*own], [*stubs], {}, [])

        log = tmp_path / "log"
        log.write_bytes(before)
        one = Ending(log, relatives, tmp_path, wedged=wedged)
        with log.open("ab") as file:
            file.write(after)
        looks = []
        for _ in range(20):
            looks.append(one())
            time.sleep(0.02)
        assert not looks[0]
        return looks[-1]

    return ends


def test_a_model_that_raised_is_not_waited_for(ends: Callable[..., bool]) -> None:
    assert ends(M, before=RAISED)


@pytest.mark.parametrize("at", range(-len(RAISED) - 1, 2, 7))
def test_it_is_found_wherever_it_stands_in_a_long_log(ends: Callable[..., bool], at: int) -> None:
    assert ends(M, before=LONG[: len(LONG) + min(at, 0)] + b"\n" + RAISED + LONG)


@pytest.mark.parametrize(
    "left",
    [
        {"before": RAISED, "after": b""},
        {"before": SAID + RAISED, "after": b""},
        {},
        {"before": RAISED, "code": "def finalize(self): ..."},
        {"before": RAISED, "own": (10, 13)},
        {"before": RAISED, "blind": True},
    ],
    ids=[
        "it has not said that all is answered", "what it said of an earlier end", "nothing raised",
        "its code ends something", "a process that is nobody's", "there is no file to look with",
    ],
)  # fmt: skip
def test_all_else_is_waited_for(ends: Callable[..., bool], left: dict[str, object]) -> None:
    assert not ends(M, **left)


def test_one_that_did_not_raise_is_waited_for_beside_one_that_did(ends: Callable[..., bool]) -> None:
    assert not ends(M, OTHER, before=RAISED)


@pytest.mark.parametrize("wedged", [("m",), ()])
def test_where_no_process_is_left_it_is_waited_for_unless_one_has_died(
    ends: Callable[..., bool], wedged: tuple[str, ...]
) -> None:
    assert ends(wedged=wedged) is bool(wedged)


@pytest.mark.parametrize("code", ["", "def finalize(self): ..."])
def test_others_of_a_load_of_which_a_process_died_are_not_waited_for(ends: Callable[..., bool], code: str) -> None:
    """They look like those of the later load, which may have something to do."""
    assert ends(M, wedged=("m",), code=code) is not bool(code)


def test_a_process_that_died_does_not_hurry_those_that_live(ends: Callable[..., bool]) -> None:
    assert not ends(OTHER, wedged=("m",))
