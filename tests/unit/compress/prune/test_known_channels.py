"""What can lose channels is found once: for the candidates of a search, and, as far as it can be, for rounds."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from compress.model import TorchModel
from compress.prune.channels import Channels
from compress.prune.known_channels import Known, KnownChannels
from compress.prune.prune_channels import PruneChannels
from tests.families import FAMILIES, family
from tests.unit.compress.prune.test_prune_channels import wrapped


class Fixed(nn.Module):
    """The first two layers may lose channels; the third may not, since its width is written into the forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c, self.d = nn.Linear(8, 32), nn.Linear(32, 32), nn.Linear(32, 16), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.b(torch.relu(self.a(x))))
        return self.d(torch.relu(self.c(y)).reshape(x.shape[0], 4, 4)).flatten(1)  # type: ignore[no-any-return]


def fixed() -> TorchModel:
    return wrapped(Fixed(), "x:float32[batch,8]")


def found(model: TorchModel, known: Known | None = None) -> tuple[Channels, list[str]]:
    notes: list[str] = []
    channels = Channels(model, lambda _done, _total, note: notes.append(note), known=known)
    return channels, [note for note in notes if note.startswith(("looking at", "removing"))]


def same(one: Channels, other: Channels) -> bool:
    def plain(channels: Channels) -> object:
        return [
            (g.root, g.layers, g.width, g.members, {p: np.asarray(c).tolist() for p, c in g.places.items()})
            for g in channels.groups
        ]

    return plain(one) == plain(other) and one.left_alone == other.left_alone


@pytest.mark.parametrize("name", [name for name in ("mlp", "residual", "bert", "unet", "lstm") if name in FAMILIES])
def test_a_model_that_was_looked_at_is_not_looked_at_again(name: str, tmp_path: Path) -> None:
    module, inputs = family(name)
    model = wrapped(module, *inputs)
    first, trials = found(model)
    assert trials
    KnownChannels(tmp_path, model, None, 600).write(first.known)
    again, none = found(model, KnownChannels(tmp_path, model, None, 600).read())
    assert none == []
    assert same(first, again)


def test_what_another_release_found_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = fixed()
    KnownChannels(tmp_path, model, None, 600).write(found(model)[0].known)
    monkeypatch.setattr("compress.prune.known_channels.__version__", "0.0.0")
    assert KnownChannels(tmp_path, model, None, 600).read() == Known()


def test_a_graph_with_other_sizes_is_proven_anew_but_for_what_failed(tmp_path: Path) -> None:
    model = fixed()
    first, _ = found(model)
    assert first.refuted, "the proof finds it, the graph does not tell"
    KnownChannels(tmp_path, model, None, 600).write(first.known)
    pruned = PruneChannels(0.4).run(model, tmp_path / "none", lambda *_: None).model
    assert isinstance(pruned, TorchModel)
    known = KnownChannels(tmp_path, pruned, None, 600).read()
    assert known.groups is None
    assert known.refuted == first.refuted
    alone, before = found(pruned)
    shared, after = found(pruned, known)
    assert same(alone, shared)
    assert 0 < len(after) < len(before), "the groups that are left are tried, all at once"


def test_another_graph_or_other_data_is_not_the_same(tmp_path: Path) -> None:
    model = fixed()
    KnownChannels(tmp_path, model, None, 600).write(found(model)[0].known)
    assert KnownChannels(tmp_path, model, None, 60).read() == Known()
    module, inputs = family("mlp")
    assert KnownChannels(tmp_path, wrapped(module, *inputs), None, 600).read() == Known()


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"groups": [{}]}', '{"groups": [3], "left_alone": {}, "refuted": {}}']
)
def test_a_file_that_cannot_be_read_is_as_if_it_were_not_there(text: str, tmp_path: Path) -> None:
    model = fixed()
    known = KnownChannels(tmp_path, model, None, 600)
    known.write(found(model)[0].known)
    (path,) = tmp_path.iterdir()
    path.write_text(text, encoding="utf-8")
    assert known.read() == Known()


def test_rounds_and_candidates_share_what_was_found_and_remove_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[bool] = []
    proven = Channels._proven

    def counted(self: Channels, *args: object) -> object:
        looked.append(True)
        return proven(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Channels, "_proven", counted)

    def removed(stages: list[PruneChannels], work: Path) -> Iterator[object]:
        for number, stage in enumerate(stages):
            folder = work / f"{number:02d}"
            folder.mkdir(parents=True)
            yield stage.run(fixed(), folder, lambda *_: None).details

    stages = [PruneChannels(fraction) for fraction in (0.2, 0.4, 0.3)]
    apart = list(removed(stages, tmp_path / "apart"))
    assert len(looked) == 3
    shared = list(removed([dataclasses.replace(stage, shared=True) for stage in stages], tmp_path / "shared"))
    assert len(looked) == 4
    assert shared == apart
    assert stages[0].options == dataclasses.replace(stages[0], shared=True).options, "it decides nothing"
