"""A sequence goes on with the version that it began with, until it ends, idles out, or that version is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest

from serve.gateway.access.slots import Batcher
from serve.gateway.errors import UnknownModelError
from serve.gateway.oip.contracts import Contracts
from serve.gateway.oip.sequence import Named
from serve.gateway.release import begun as module
from serve.gateway.release.begun import Begun, SequenceLostError
from serve.gateway.release.release import Release
from serve.rollout.plan import Plan, Target

ONE, TWO, NAME = Target("m", "1"), Target("m", "2"), Target("m")
BATCHER = Batcher("m", "1", 4, idle_s=10.0)


class Told:
    """Contracts of models that have sequences, but for those that are gone."""

    def __init__(self, batcher: Batcher | None = BATCHER) -> None:
        self.batcher = batcher
        self.gone: set[Target] = set()

    async def of(self, target: Target) -> Any:
        if target in self.gone:
            raise UnknownModelError("Request for unknown model")
        return self


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def release(*, promoted: bool) -> Release:
    return Release(1, "m", ONE, TWO, Plan(), weight=float(promoted))


def asks(
    begun: Begun, told: Told, released: Release | None, *, start: bool = False, end: bool = False, id_: int = 7,
    answers: bool = True, asked: Target = NAME, owner: str = "", status: int = 200,
) -> Target:  # fmt: skip
    sequence = Named(id_, id_, start, end, owner)
    target, batcher = asyncio.run(begun.who(cast("Contracts", told), asked, released, sequence))
    if answers:
        begun.answered(asked, target, sequence, batcher, status, gone=False)
    return target


def test_it_stays_until_it_ends() -> None:
    begun, told = Begun(), Told()
    assert asks(begun, told, release(promoted=False), start=True) == ONE
    promoted = release(promoted=True)
    assert asks(begun, told, promoted) == ONE
    assert asks(begun, told, promoted, start=True, id_=8) == TWO
    assert asks(begun, told, None, id_=8) == TWO, "after `clear`, too"
    assert asks(begun, told, promoted, end=True) == ONE
    assert asks(begun, told, promoted) == TWO, "it has ended"
    assert asks(begun, told, promoted, end=True, id_=8) == TWO


def test_what_began_before_the_release_goes_on_with_its_baseline() -> None:
    begun, told = Begun(), Told()
    assert asks(begun, told, None, start=True) == NAME
    assert asks(begun, told, release(promoted=True)) == ONE


def test_the_same_id_may_begin_anew() -> None:
    begun, told = Begun(), Told()
    asks(begun, told, release(promoted=False), start=True)
    assert asks(begun, told, release(promoted=True), start=True) == TWO


@pytest.mark.parametrize(("idle", "target"), [(9.0, ONE), (11.5, TWO)])
def test_it_stays_until_it_was_idle_for_too_long(idle: float, target: Target) -> None:
    clock, told = Clock(), Told()
    begun = Begun(clock)
    asks(begun, told, release(promoted=False), start=True)
    clock.now += idle
    assert asks(begun, told, release(promoted=True)) == target


def test_a_version_that_is_named_and_a_model_without_sequences_are_asked_as_they_are() -> None:
    begun = Begun()
    assert asks(begun, Told(), None, start=True, asked=TWO) == TWO
    assert asks(begun, Told(None), release(promoted=False), start=True) == ONE
    assert not len(begun)


@pytest.mark.parametrize("how", ["its metadata", "its answer"])
def test_where_its_version_is_gone_it_ends_with_an_error_that_says_so(how: str) -> None:
    begun, told, promoted = Begun(), Told(), release(promoted=True)
    asks(begun, told, release(promoted=False), start=True)
    fail: Callable[[], object] = partial(begun.answered, NAME, ONE, Named(7, 7), BATCHER, 404, gone=True)
    if how == "its metadata":
        told.gone.add(ONE)
        fail = partial(asks, begun, told, promoted)
    with pytest.raises(SequenceLostError, match="the sequence has ended") as lost:
        fail()
    assert lost.value.status == 400
    assert "m/1" in (lost.value.why or "")
    assert asks(begun, told, promoted) == TWO, "which Triton refuses, unless it begins anew"


def test_there_are_only_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST", 3)
    begun, told = Begun(), Told()
    for id_ in range(9):
        asks(begun, told, release(promoted=False), start=True, id_=id_)
    assert len(begun) == 3


def test_made_up_ids_of_one_key_drive_out_nobody_elses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST", 8)
    begun, told, before, promoted = Begun(), Told(), release(promoted=False), release(promoted=True)
    for id_ in range(3):
        asks(begun, told, before, start=True, id_=id_, owner="theirs")
    for id_ in range(100, 200):
        asks(begun, told, promoted, id_=id_, owner="mine", answers=False)
    assert [asks(begun, told, promoted, id_=id_, owner="theirs") for id_ in range(3)] == [ONE] * 3
    assert len(begun) == 8
    asks(begun, told, before, start=True, id_=300, owner="mine")
    assert asks(begun, told, promoted, id_=300, owner="mine") == ONE, "of its own the oldest goes first"


@pytest.mark.parametrize(("status", "kept"), [(200, 1), (400, 0), (422, 0), (429, 0), (500, 1), (503, 1)])
def test_a_sequence_that_is_refused_from_its_first_request_on_is_not_kept(status: int, kept: int) -> None:
    begun, told = Begun(), Told()
    asks(begun, told, release(promoted=False), start=True, status=status)
    assert len(begun) == kept


def test_one_refused_request_does_not_end_a_sequence() -> None:
    begun, told = Begun(), Told()
    asks(begun, told, release(promoted=False), start=True)
    asks(begun, told, release(promoted=True), status=400)
    assert asks(begun, told, release(promoted=True)) == ONE
