"""What a search keeps of its trials, so that one that was interrupted trains none of them again."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from compress.console.wording import as_notes, notes_in
from compress.storage.steady import refuse_changed
from compress.training.task import Trained
from compress.training.tune.space import Settings
from compress.training.tune.vet_trial import is_trial
from compress.training.updates.kept_state import KeptState
from compress.training.updates.vet_state import alike
from compress.vetting.replace import replace_file
from compress.vetting.texts import read_json

__all__ = ["FOLDER", "Kept", "Trial"]

FOLDER = "trials"
Weights = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Trial:
    """A training of a search that is through.

    Attributes:
        settings: what it was trained with.
        metric: what it was judged by; "" where it never was.
        higher_is_better: of that.
        reported: the best score so far, by the quarter of its epochs that was through.
        value: its score, by its best epoch; None where it was ended or failed.
        pruned_at: the quarter after which it was ended, being worse than half of the others.
        failed: what happened, else "".
        seconds: that it took since it was begun, or gone on with.
        trained: how it went; None where it was ended or failed.
    """

    settings: Settings
    metric: str = ""
    higher_is_better: bool = True
    reported: Mapping[int, float] = field(default_factory=dict)
    value: float | None = None
    pruned_at: int | None = None
    failed: str = ""
    seconds: float = 0.0
    trained: Trained | None = None

    def cost(self, value: float) -> float:
        """A score as what is the better the less it is."""
        return -value if self.higher_is_better else value

    def to_dict(self) -> dict[str, Any]:
        """JSON values for a report: all but how it went."""
        found = {each.name: getattr(self, each.name) for each in dataclasses.fields(self) if each.name != "trained"}
        reported = {str(quarter): value for quarter, value in self.reported.items()}
        return found | {"settings": dict(self.settings), "reported": reported}


class Kept:
    """The trials in a folder: a file of what each gave, and the weights of the best.

    Args:
        folder: is there.

    Attributes:
        refused: numbers of trials that are there and were not taken.
    """

    def __init__(self, folder: Path) -> None:
        self.refused: list[int] = []
        self._folder = folder
        self._weights = KeptState(folder / "best.weights", 0.0)

    def at(self, number: int) -> Path:
        """Where a trial keeps its state while it trains."""
        return self._folder / f"{number:03d}"

    def count(self) -> int:
        """How many seem to be through."""
        return len(list(self._folder.glob("[0-9][0-9][0-9].json")))

    def keep(self, number: int, trial: Trial) -> None:
        """Write what a trial gave, whole or not at all; not of data that has changed (ChangedError)."""
        refuse_changed()
        told: dict[str, Any] = {"trial": trial.to_dict(), "trained": None}
        if trial.trained is not None:
            told["trained"] = dataclasses.asdict(trial.trained) | {"notes": notes_in(trial.trained.warnings)}
        told = json.loads(json.dumps(told))  # keys as text, tuples as lists: as they are read
        replace_file(self._file(number), json.dumps(told | {"sha256": _digest(told)}))

    def take(self, number: int, settings: Settings, metric: str = "") -> Trial | None:
        """What a trial with these settings gave before; None where there is none, or it is not as it was written.

        Args:
            number: of the trial.
            settings: of it.
            metric: by which others of the search were judged; "" where none was.
        """
        path = self._file(number)
        if not path.exists():
            return None
        try:
            told = read_json(path)
            whole = told.pop("sha256") == _digest(told) and is_trial(told)
            if whole and told["trial"]["settings"] == dict(settings):
                trial = _trial(told, settings)
                if "" in (metric, trial.metric) or trial.metric == metric:
                    return trial
        except (OSError, ValueError, KeyError, TypeError, AttributeError):  # no JSON, or none of such a kind
            pass
        self.refused.append(number)
        return None

    def keep_weights(self, number: int, weights: Weights) -> None:
        """Of the best so far, before what it gave."""
        self._weights.keep({"number": number, "weights": dict(weights)})

    def weights(self, number: int, like: Weights) -> Weights | None:
        """Those of a trial; None where they are not there, or are none of such a network."""
        found = self._weights.load()
        if found is None or found.keys() != {"number", "weights"} or found["number"] != number:
            return None
        weights = found["weights"]
        return weights if alike(weights, like) else None

    def drop_weights(self) -> None:
        """The search is through."""
        self._weights.drop()

    def _file(self, number: int) -> Path:
        return self._folder / f"{number:03d}.json"


def _trial(told: Mapping[str, Any], settings: Settings) -> Trial:
    given, trained = told["trial"], told["trained"]
    if trained is not None:
        words = as_notes(trained["warnings"], trained["notes"])
        trained = Trained(**{name: value for name, value in trained.items() if name != "notes"} | {"warnings": words})
    reported = {int(quarter): float(value) for quarter, value in given["reported"].items()}
    return Trial(**given | {"settings": settings, "reported": reported, "trained": trained})


def _digest(told: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()
