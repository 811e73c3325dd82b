"""Who proposes the settings of the next trial, and who ends one early: Optuna's samplers and pruners."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from compress.errors import MissingExtraError
from compress.training.tune.space import Range, Settings, Space

__all__ = ["BAYESIAN", "RANDOM", "Method", "optuna_of", "seed_of", "suggested"]

LEAST_STARTED, SHARE_STARTED = 3, 4  # of the trials, one in so many is drawn at random before a model of them is made
COMPARED = 3  # whole trials that a pruner wants to compare with


@dataclass(frozen=True)
class Method:
    """How a search goes.

    Attributes:
        sampler: from Optuna, a seed and the number of trials: proposes settings.
        pruner: from Optuna: says which trial to end.
    """

    sampler: Callable[[Any, int, int], Any]
    pruner: Callable[[Any], Any]


def _tpe(optuna: Any, seed: int, trials: int) -> Any:
    """Bergstra et al., Algorithms for Hyper-Parameter Optimization, NeurIPS 2011; all settings together, as Falkner et
    al., BOHB, ICML 2018, section 3.2.
    """
    started = max(LEAST_STARTED, trials // SHARE_STARTED)
    return optuna.samplers.TPESampler(seed=seed, multivariate=True, n_startup_trials=started)


BAYESIAN = Method(_tpe, lambda optuna: optuna.pruners.MedianPruner(n_startup_trials=COMPARED))
RANDOM = Method(
    lambda optuna, seed, _trials: optuna.samplers.RandomSampler(seed=seed), lambda optuna: optuna.pruners.NopPruner()
)


def optuna_of() -> Any:
    """Optuna, which tells only warnings from then on.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        import optuna
    except ImportError as err:
        raise MissingExtraError("can't search for settings of a training", module="optuna", extra="optuna") from err
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def seed_of(seed: int, number: int) -> int:
    """A sampler's, for one trial: what it proposes hangs on the trials before, not on how often it was asked."""
    return int(np.random.SeedSequence([seed, number]).generate_state(1)[0])


def suggested(trial: Any, space: Space) -> Settings:
    """What Optuna's trial is to be trained with."""
    found: dict[str, float] = {}
    for name, within in space.items():
        if not isinstance(within, Range):
            found[name] = trial.suggest_categorical(name, within)
        elif within.whole:
            found[name] = trial.suggest_int(name, int(within.low), int(within.high))
        else:
            found[name] = trial.suggest_float(name, within.low, within.high, log=True)
    return found
