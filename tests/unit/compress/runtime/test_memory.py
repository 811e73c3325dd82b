"""What a run gives back, and what its collections leave aside."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from compress.runtime.memory import give_back, standing


class Node:
    """Held by itself alone, once nobody else does."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.unfreeze()


def test_collections_leave_aside_what_stood_before_and_nothing_else() -> None:
    before = Node()
    with standing():
        within = Node()
        looked_through = {id(each) for each in gc.get_objects()}
        assert id(before) not in looked_through
        assert id(within) in looked_through
        held = weakref.ref(within)
        del within
        give_back()
        assert held() is None, "what is made within is collected as ever"
    assert gc.get_freeze_count() == 0
    assert id(before) in {id(each) for each in gc.get_objects()}


def test_garbage_of_before_is_collected_first_and_what_becomes_garbage_within_afterwards() -> None:
    garbage, later = Node(), Node()
    gone, kept = weakref.ref(garbage), weakref.ref(later)
    del garbage
    with standing():
        assert gone() is None
        del later
        give_back()
        assert kept() is not None
    gc.collect()
    assert kept() is None


def test_what_somebody_else_has_frozen_stays_so() -> None:
    gc.freeze()
    frozen = gc.get_freeze_count()
    with standing():
        pass
    assert gc.get_freeze_count() > frozen / 2, "some of them may be gone since"


def test_an_error_within_ends_it_too() -> None:
    with pytest.raises(RuntimeError), standing():
        raise RuntimeError
    assert gc.get_freeze_count() == 0
