"""Which models may answer for a name, by its release."""

from __future__ import annotations

from serve.gateway.health.outages import ModelDownError, Outages
from serve.gateway.release.release import Release
from serve.rollout.plan import Target

__all__ = ["answering", "check_down", "models_of"]


def models_of(model: str, release: Release | None) -> set[str]:
    """Names of the models that a request for one may be with, by its release."""
    return {model} if release is None else {target.model for target in release.may_ask}


def answering(model: str, release: Release | None, stays: Target | None = None) -> str:
    """The model that a request for one is known by where a process ends: who answers, where that is one of two for
    certain.

    Args:
        stays: who has the request's sequence; None for none.
    """
    if stays is not None:
        return stays.model
    models = models_of(model, release)
    return next(iter(models)) if len(models) == 1 else model


def check_down(outages: Outages, model: str, release: Release | None) -> None:
    """Raises ModelDownError where each model is down that a request for this one may be with."""
    models = sorted(models_of(model, release), key=lambda each: each != model)
    for each in reversed(models):  # the last one tells of the model by the name that was asked for, if it is one
        try:
            outages.check(each)
        except ModelDownError as err:
            down = err
        else:
            return
    raise down
