"""What one model's requests may do, and have shown, at several servers."""

from __future__ import annotations

from serve.gateway.upstream.node import Node
from serve.gateway.upstream.outliers import Outliers

__all__ = ["MODELS", "Budget", "Scope"]

MODELS = "/v2/models/"
BUDGET_SHARE = 0.2
BUDGET_MOST = 50.0
BUDGET_FIRST = 10.0


class Budget:
    """Tries that are left."""

    __slots__ = ("left",)

    def __init__(self) -> None:
        self.left = BUDGET_FIRST

    def earn(self) -> None:
        """A request has come."""
        self.left = min(BUDGET_MOST, self.left + BUDGET_SHARE)

    def spend(self) -> bool:
        """Take one try; False when none is left."""
        if self.left < 1.0:
            return False
        self.left -= 1.0
        return True


class Scope:
    """What one model's requests may do, and have shown.

    Attributes:
        model: its name, whatever the version.
        path: its name, with the version where that was asked for.
        outliers: which servers fail for it.
        budget: its own, or the one of all names that no server has answered for yet.
        seconds: that good answers take, smoothed; 0 before the first.
        known: whether a server has answered for it.
    """

    __slots__ = ("budget", "known", "model", "name", "outliers", "path", "seconds")

    def __init__(self, name: bytes, outliers: Outliers[Node], budget: Budget) -> None:
        self.name = name
        self.path = name.decode("latin-1").removeprefix(MODELS)
        self.model = self.path.partition("/versions/")[0]
        self.outliers = outliers
        self.budget = budget
        self.seconds = 0.0
        self.known = False
