"""Who answers for a model's name, and which file each of them serves: under a release, one of two."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from compress.artifact import Artifact
from compress.errors import ArtifactError, ServerError
from serve.http.ask import config_of, rollouts_of
from serve.rollout.plan import Target

__all__ = ["Served", "Shown"]


@dataclass(frozen=True)
class Shown:
    """A release of a name, as the gateway shows it.

    Attributes:
        state: of its rollout.
        baseline, candidate: as `serve rollout` writes them.
        weight: percent of the requests that the candidate answers.
    """

    state: str
    baseline: str
    candidate: str
    weight: float

    def __str__(self) -> str:
        return f"{self.baseline} → {self.candidate}, {self.state}: {self.weight:g}% of the requests go to the candidate"

    @property
    def answering(self) -> tuple[str, ...]:
        """Those that may answer as it stands."""
        if self.weight >= 100:
            return (self.candidate,)
        return (self.baseline, self.candidate) if self.state in ("waiting", "running") else (self.baseline,)


class Served:
    """What is known of a name through its gateway.

    Args:
        url: of the gateway.
        name: that is asked.
        timeout_s: for one answer.
        key: where the gateway asks for one.
    """

    def __init__(self, url: str, name: str, timeout_s: float, key: str) -> None:
        self._url, self._name, self._timeout_s, self._key = url, name, timeout_s, key
        self._files: dict[str, str | None] = {}
        self.release = self._shown()

    @property
    def inputs(self) -> list[str]:
        """Names of the model's inputs, where the server tells them."""
        return [str(each.get("name", "")) for each in self._config(self.answering[0]).get("input") or ()]

    @property
    def answering(self) -> tuple[str, ...]:
        """Those that may answer: the name itself where nothing is released."""
        return self.release.answering if self.release else (self._name,)

    def sha256_of(self, who: str) -> str | None:
        """Of the network's file that one of them serves, as `serve pack` wrote it into the configuration of the model
        or of a model that it asks; None where the server does not say.
        """
        if who not in self._files:
            config = self._config(who)
            steps = (config.get("ensemble_scheduling") or {}).get("step") or ()
            behind = [_parameter(config, "network"), *(str(step.get("model_name", "")) for step in steps)]
            found = (_parameter(self._config(part), "model_sha256") for part in behind if part)
            self._files[who] = _parameter(config, "model_sha256") or next(filter(None, found), None)
        return self._files[who]

    def serves(self, who: str, artifact: Artifact) -> bool | None:
        """Whether one of them serves the artifact's own file; None where the server does not say."""
        found = self.sha256_of(who)
        return None if found is None else found == artifact.sha256

    def check(self, artifact: Artifact) -> None:
        """Raises ArtifactError where nobody who may answer serves the artifact's file: their accuracies have nothing
        to do with each other.
        """
        if any(self.serves(who, artifact) is not False for who in self.answering):
            return
        names = " or ".join(self.answering)
        others = " and ".join(
            f"{who} serves another file: sha256 {(self.sha256_of(who) or '')[:12]}…" for who in self.answering
        )
        raise ArtifactError(
            f"can't verify against {artifact.folder}",
            why=f"{others}, where {artifact.model_file} of the artifact has {artifact.sha256[:12]}…",
            mend=f"name the artifact that {names} was packed from, or pack this one and serve it, or leave --artifact "
            "out",
        )

    def none_of(self, artifact: Artifact, count: int) -> ArtifactError:
        """What to say where none of the answers came from who serves the artifact's file."""
        match = [who for who in self.answering if self.serves(who, artifact)]
        by_name = [who for who in match if "/" not in who]
        mend = "wait for a step that gives it a share of the requests, or send more samples"
        if by_name and by_name[0] != self._name:
            mend = f"ask it by its own name: serve verify {by_name[0]} --eval … --artifact …; or {mend}"
        return ArtifactError(
            f"can't verify against {artifact.folder}",
            why=f"none of {count:,} answers came from {' or '.join(match) or 'a model'} that serves its file "
            f"({self.release})",
            mend=mend,
        )

    def _shown(self) -> Shown | None:
        try:
            rows = rollouts_of(self._url, timeout_s=self._timeout_s, key=self._key)
        except ServerError:  # a gateway without releases; whether it answers at all is seen with the samples
            return None
        for row in rows:
            if row.get("model") == self._name and row.get("baseline"):
                weight = row.get("weight")
                return Shown(
                    str(row.get("state")), str(row["baseline"]), str(row.get("candidate")),
                    float(weight) if isinstance(weight, int | float) else 0.0,
                )  # fmt: skip
        return None

    def _config(self, who: str) -> dict[str, Any]:
        try:
            target = Target.parse(who, self._name) if "/" in who else Target(who)
            return config_of(self._url, target.model, target.version, timeout_s=self._timeout_s, key=self._key)
        except ServerError:  # it does not tell; whether it answers at all is seen with the samples
            return {}


def _parameter(config: dict[str, Any], key: str) -> str:
    value = (config.get("parameters") or {}).get(key) or {}
    return str(value.get("string_value", "")) if isinstance(value, dict) else ""
