"""What a user's code draws from the global generators follows from a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

__all__ = ["seed_all", "seeded"]


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """What a user's code draws from the global generators of Python, numpy and torch follows from the seed."""
    python, legacy, own = random.getstate(), np.random.get_state(), torch.get_rng_state()
    seed_all(seed)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(legacy)
        torch.set_rng_state(own)


def seed_all(seed: int) -> None:
    """The same for good: what is drawn from here on, where `seeded` takes it back later."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
