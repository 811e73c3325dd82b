"""What each layer's pruning alone costs: one group of channels after the other is thinned, and the model judged.

Li et al., Pruning Filters for Efficient ConvNets, 2017, section 3.2.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from torch import nn

from compress.console.wording import counted
from compress.data.dataset import Dataset
from compress.errors import RecipeError, StageError
from compress.evaluate.compare import compare
from compress.evaluate.gains import drop_told
from compress.evaluate.metrics import Metric
from compress.model import TorchModel
from compress.prune.channels import Channels
from compress.prune.follow_channels import ChannelGroup
from compress.prune.importance import importance_of
from compress.prune.known_channels import Known
from compress.prune.prune_channels import bearable
from compress.runtime.backends import TorchBackend
from compress.runtime.measure import cores
from compress.stage import Progress
from compress.storage.files import write_files
from compress.storage.steady import seen
from compress.vetting.texts import read_json

__all__ = ["GroupSensitivity", "Sensitivity", "Thinning", "layer_sensitivity"]

SCHEMA_VERSION = 1
WORST = 1e300
"""The drop of what is no number: JSON has no infinity."""


@dataclass(frozen=True)
class GroupSensitivity:
    """One group of layers that lose channels together.

    Attributes:
        layers: their names, the first one names the group.
        width: channels.
        ratios: shares of the channels taken away: the nearest to each that was asked for, which a narrow group may not
            have, and which may be the same for two.
        drops: what each costs, in points of the metric; `WORST` where that is no number.
        macs_removed: share of the model's MACs that goes with each.
    """

    layers: tuple[str, ...]
    width: int
    ratios: tuple[float, ...]
    drops: tuple[float, ...]
    macs_removed: tuple[float, ...]


@dataclass(frozen=True)
class Sensitivity:
    """Every group's.

    Attributes:
        metric: its name.
        original: of the whole model.
        samples: it was judged on.
        groups: in the network's order.
        left_alone: layers that can't be pruned, with the reason.
        data: hash of the evaluation data, of which a half was judged on; another half is to prove what follows from it.
        model: hash of the model; "" where an earlier release wrote none.
        asked: shares that were asked for; none where an earlier release wrote those in place of what was taken away.
        notes: what to know of the data and of the metric; of it in a file, nothing where an earlier release wrote none.
        warnings: why its drops may tell nothing.
    """

    metric: str
    original: float
    samples: int
    groups: tuple[GroupSensitivity, ...]
    left_alone: Mapping[str, str]
    data: str = ""
    model: str = ""
    asked: tuple[float, ...] = ()
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def columns(self) -> tuple[float, ...]:
        """What was asked for, or what an earlier release wrote."""
        return self.asked or self.groups[0].ratios

    def limits(self, max_drop: float) -> dict[str, float]:
        """The largest share of its channels that each layer may lose, so that this alone costs no more than that."""
        return {layer: bearable(curve, max_drop) for layer, curve in self.curves.items()}

    @property
    def curves(self) -> dict[str, tuple[tuple[float, float], ...]]:
        """Pairs of (share, drop) by layer, for `PruneChannels`."""
        return {
            layer: tuple(zip(group.ratios, group.drops, strict=True)) for group in self.groups for layer in group.layers
        }

    def text(self) -> str:
        """As JSON."""
        return json.dumps({"schema_version": SCHEMA_VERSION} | dataclasses.asdict(self), indent=2) + "\n"

    def save(self, path: Path) -> None:
        write_files({path: self.text()})

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read what `save` wrote, from the file or from the folder that holds it as sensitivity.json.

        Raises:
            RecipeError: missing, damaged, or of a newer release.
        """
        path = path / "sensitivity.json" if path.is_dir() else path
        try:
            seen(path)
            data = read_json(path)
            if data.pop("schema_version") > SCHEMA_VERSION:
                raise ValueError("it was written by a newer release")
            groups = tuple(_group(group) for group in data.pop("groups"))
            asked, notes, warnings = (tuple(data.pop(name, ())) for name in ("asked", "notes", "warnings"))
            found = cls(groups=groups, asked=asked, notes=notes, warnings=warnings, **data)
            if not all(type(share) is float and 0 < share < 1 for share in found.asked):
                raise ValueError("what was asked for is no share")
            if not groups or any(len(group.ratios) != len(found.columns) for group in groups):
                raise ValueError("its groups have not as many shares each")
            texts = (found.metric, found.data, found.model, *found.left_alone.keys(), *found.left_alone.values())
            texts += (*found.notes, *found.warnings)
            if not all(type(text) is str for text in texts) or type(found.samples) is not int:
                raise ValueError("what should be words or numbers is something else")
            return found
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as err:
            why = err.strerror if isinstance(err, OSError) and err.strerror else f"it is damaged: {err}"
            mend = "write one with `compress sensitivity`"
            raise RecipeError(f"can't read the sensitivity {path}", why=why, mend=mend) from err


def _group(data: Any) -> GroupSensitivity:
    """A group of a file.

    Raises:
        ValueError: its curve is none.
    """
    layers, ratios, drops, removed = (tuple(data[key]) for key in ("layers", "ratios", "drops", "macs_removed"))
    numbers = (*ratios, *drops, *removed)
    plain = all(type(number) in (int, float) and abs(number) <= WORST for number in numbers)
    if not plain or not len(ratios) == len(drops) == len(removed) or not all(0 < ratio < 1 for ratio in ratios):
        raise ValueError("a curve in it is not of as many ratios as drops, each a number")
    if not all(type(layer) is str for layer in layers) or type(data["width"]) is not int:
        raise ValueError("a group of it names no layers, or has no width")
    return GroupSensitivity(layers, data["width"], ratios, drops, removed)


class Thinning:
    """A model whose groups of layers are thinned, each alone, and which is judged each time.

    Args:
        model: layered; left as it is.
        data: to judge on.
        metric: what is judged by.
        ratios: shares of the channels to take away, each above 0 and below 1; of a group, the nearest that there is.
        samples: how many of the data to use, spread over it.
        importance: which channels go.
        progress: is told of what is looked at before.
        known: of the same model's channels, as another process has found them.

    Raises:
        RecipeError: ratios or samples out of range, or a file without layers.
        StageError: no layer could lose a channel.
    """

    def __init__(
        self,
        model: TorchModel,
        data: Dataset,
        metric: Metric,
        *,
        ratios: Sequence[float],
        samples: int,
        importance: Literal["magnitude", "random"],
        progress: Progress = lambda _done, _total, _note: None,
        known: Known | None = None,
    ) -> None:
        self.ratios = sorted(set(ratios))
        _refuse(self.ratios, samples, model)
        inputs, labels = data.take(data.places(samples))
        self._part = dataclasses.replace(data, inputs=inputs, labels=labels, starts=(), fetcher=None)
        self._metric, self._signature = metric, model.signature
        self._channels = Channels(model, progress, self._part, known=known)
        if not self._channels.groups:
            left = list(self._channels.left_alone.items())[:3]
            why = "; ".join(f"{name}: {reason}" for name, reason in left)
            raise StageError("no layer could lose a channel", why=why, mend="this model can't be pruned")
        self._scores = importance_of(self._channels, importance)
        self._original = TorchBackend(model, cores())
        self._whole = compare("original", {"original": self._original}, self._part, metric)["original"]
        self._macs = self._channels.macs({})

    @property
    def groups(self) -> Sequence[ChannelGroup]:
        """In the network's order."""
        return self._channels.groups

    @property
    def known(self) -> Known:
        """For another process."""
        return self._channels.known

    def thinned(self, group: ChannelGroup, told: Callable[[str], None] = lambda _words: None) -> GroupSensitivity:
        """What a group's ratios cost; `told` of each that was judged."""
        counts = [min(max(1, round(ratio * group.units)), group.units - 1) for ratio in self.ratios]
        drops: list[float] = []
        gone: list[float] = []
        for at, count in enumerate(counts):
            if at and count == counts[at - 1]:
                gone.append(gone[-1])
                drops.append(drops[-1])
            else:
                weakest = self._scores[group.root].argsort(stable=True)[:count].tolist()
                with self._channels.without({group.root: weakest}) as module:
                    backends = {"original": self._original, "thinned": self._backend(module)}
                    compared = compare("original", backends, self._part, self._metric)
                gone.append(1 - self._channels.macs({group.root: weakest}) / self._macs)
                drop = self._metric.drop(self._whole.value, compared["thinned"].value)
                drops.append(drop if math.isfinite(drop) else WORST)
            lost = drop_told(drops[-1], metric=self._metric.name, scale=self._metric.scale)
            told(f"{group.root} −{count / group.units:.0%}: {lost}")
        taken = tuple(count / group.units for count in counts)
        return GroupSensitivity(group.layers, group.width, taken, tuple(drops), tuple(gone))

    def _backend(self, module: nn.Module) -> TorchBackend:
        return TorchBackend(TorchModel(module, self._signature), cores())

    def result(self, found: Sequence[GroupSensitivity]) -> Sensitivity:
        """Of all groups, in their order."""
        warnings = [f"{doubt} The drops tell nothing of what a layer costs then." for doubt in self._whole.doubts]
        if self._whole.not_numbers:
            of = counted(len(self._part), "samples")
            lost = self._whole.not_numbers
            warnings.append(f"The original's outputs for {lost} of {of} hold NaN: the worst score counts.")
        return Sensitivity(
            self._metric.name, self._whole.value, len(self._part), tuple(found), self._channels.left_alone,
            asked=tuple(map(float, self.ratios)), warnings=tuple(warnings),
        )  # fmt: skip


def layer_sensitivity(
    model: TorchModel,
    data: Dataset,
    metric: Metric,
    *,
    ratios: Sequence[float] = (0.25, 0.5, 0.75),
    samples: int = 1000,
    importance: Literal["magnitude", "random"] = "magnitude",
    progress: Progress = lambda _done, _total, _note: None,
    elsewhere: Callable[[Thinning], Sequence[GroupSensitivity]] | None = None,
) -> Sensitivity:
    """Thin each group of channels alone by each ratio, without any recovery, and judge the model.

    Args:
        model, data, metric, ratios, samples, importance: as of `Thinning`, and what it raises.
        progress: is told of models judged.
        elsewhere: thins all groups in other processes; by default this one does.
    """
    thinning = Thinning(model, data, metric, ratios=ratios, samples=samples, importance=importance, progress=progress)
    if elsewhere is not None:
        return thinning.result(elsewhere(thinning))
    total, done = len(thinning.groups) * len(thinning.ratios), 0

    def told(words: str) -> None:
        nonlocal done
        done += 1
        progress(done, total, words if done < total else "layers and ratios tried")

    return thinning.result([thinning.thinned(group, told) for group in thinning.groups])


def _refuse(ratios: Sequence[float], samples: int, model: TorchModel) -> None:
    if not ratios or not all(0 < ratio < 1 for ratio in ratios) or samples < 1:
        why = f"the ratios are {', '.join(f'{ratio:g}' for ratio in ratios)}, the samples {samples}"
        raise RecipeError(
            "can't thin layers like this", why=why, mend="give ratios above 0 and below 1, and 1 sample or more"
        )
    if not model.layered:
        why = "TorchScript and exported programs have no layers any more"
        raise RecipeError(
            "can't look into this file", why=why, mend="give the model from before, saved by compress.save"
        )
