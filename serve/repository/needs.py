"""Which models can't answer without which others: ensembles and their steps, packed pipelines and their network."""

from __future__ import annotations

from collections.abc import Iterable

from serve.repository.read import ModelInfo

__all__ = ["needs_of", "used_by"]


def needs_of(models: Iterable[ModelInfo]) -> dict[str, frozenset[str]]:
    """For each model, what it can't answer without: itself, its steps, their steps, and so on; also what is not there.

    A model whose code asks others is known to where its configuration says so, as that of a packed pipeline does.
    """
    models = list(models)
    needs: dict[str, set[str]] = {model.name: {model.name} for model in models}
    for model in models:
        scheduling = model.config.ensemble_scheduling
        needs[model.name] |= {step.model_name for step in scheduling.step} if scheduling else set()
        needs[model.name] |= {name for key, name in model.config.parameters.items() if key == "network"}
    for _ in models:  # as deep as ensembles are nested
        for own in needs.values():
            own |= {name for step in own & needs.keys() for name in needs[step]}
    return {name: frozenset(own) for name, own in needs.items()}


def used_by(models: Iterable[ModelInfo]) -> dict[str, frozenset[str]]:
    """For each model, what can't answer without it: itself, ensembles that have it as a step, and so on."""
    needs = needs_of(models)
    return {name: frozenset(user for user, own in needs.items() if name in own) for name in needs}
