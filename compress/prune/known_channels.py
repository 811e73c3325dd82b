"""What was found out about a model's channels, kept in the work folder for the stages and candidates that follow."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from compress import __version__
from compress.data.dataset import Dataset
from compress.formats.checkpoint import fingerprint
from compress.formats.native.graph import GraphError, to_data
from compress.model import TorchModel
from compress.prune.cut_layers import Place
from compress.prune.follow_channels import ChannelGroup
from compress.runtime.machine import versions
from compress.vetting.replace import replace_file
from compress.vetting.texts import read_json

__all__ = ["Known", "KnownChannels"]


@dataclass(frozen=True)
class Known:
    """What a search for channels found.

    Attributes:
        groups: that can lose channels; None where only a like model was looked at: of that, `refuted` is known.
        left_alone: layers that can't, with the reason.
        refuted: of these, those that a proof left alone.
    """

    groups: tuple[ChannelGroup, ...] | None = None
    left_alone: Mapping[str, str] = field(default_factory=dict)
    refuted: Mapping[str, str] = field(default_factory=dict)


class KnownChannels:
    """Of one model, in a folder: what is known of it, or of the same graph with other sizes and weights.

    Of the same model all is known. A graph that has lost channels and was trained is proven anew, but for groups that
    failed before: they are left alone at once, which is never wrong.

    Args:
        folder: for the files.
        model: with its weights.
        samples: that the proof looks at.
        seconds: that the search may take.
    """

    def __init__(self, folder: Path, model: TorchModel, samples: Dataset | None, seconds: float) -> None:
        asked = [__version__, versions(), None if samples is None else samples.sha256, seconds]
        self._folder = folder
        self._model = _hash([fingerprint(model), *asked])
        self._graph = _hash([_graph(model), *asked])

    def read(self) -> Known:
        """Nothing is known where there is no file, or one that can't be read."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            told = read_json(self._path)
            return Known(tuple(map(_group, told["groups"])), dict(told["left_alone"]), dict(told["refuted"]))
        for path in sorted(self._folder.glob(f"channels-{self._graph}-*.json")):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                return Known(refuted=dict(read_json(path)["refuted"]))
        return Known()

    def write(self, found: Known) -> None:
        """Whole or not at all: several processes may write the same."""
        told = {
            "groups": [_told(group) for group in found.groups or ()],
            "left_alone": dict(found.left_alone),
            "refuted": dict(found.refuted),
        }
        replace_file(self._path, json.dumps(told))

    @property
    def _path(self) -> Path:
        return self._folder / f"channels-{self._graph}-{self._model}.json"


def _graph(model: TorchModel) -> str:
    """The graph without any size; of a forward that can't be followed, what stands for no other model."""
    try:
        nodes = json.dumps(to_data(model.module, inputs=len(model.signature.inputs))["nodes"])
    except GraphError:
        return fingerprint(model)
    kinds = [[name, type(layer).__qualname__] for name, layer in model.module.named_modules()]
    return json.dumps([re.sub(r"\d+", "0", nodes), kinds, [str(spec) for spec in model.signature.inputs]])


def _hash(value: Sequence[object]) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def _told(group: ChannelGroup) -> dict[str, object]:
    places = [[*place, index.tolist(), unit.tolist()] for place, (index, unit) in group.places.items()]
    return {
        "root": group.root, "layers": list(group.layers), "width": group.width,
        "members": [list(member) for member in group.members], "places": places,
    }  # fmt: skip


def _group(told: Mapping[str, object]) -> ChannelGroup:
    places = {
        Place(str(name), str(side), int(axis)): np.array([index, unit], np.int64)
        for name, side, axis, index, unit in told["places"]  # type: ignore[attr-defined]
    }
    members = tuple(tuple(int(channel) for channel in member) for member in told["members"])  # type: ignore[attr-defined]
    layers = tuple(str(name) for name in told["layers"])  # type: ignore[attr-defined]
    return ChannelGroup(str(told["root"]), layers, int(told["width"]), members, places)  # type: ignore[call-overload]
