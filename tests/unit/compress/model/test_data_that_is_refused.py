"""Data that fits a signature, and that the network refuses nonetheless: three lines wherever it is run, no traceback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import compress
from compress import ExportOptions
from compress.errors import StageError
from compress.model.inputs import run_on

SAMPLES, TOKENS, VOCABULARY = 40, 6, 20


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.hidden, self.head = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(torch.relu(self.hidden(self.embedding(ids).mean(1))))
        return found


class Halved(nn.Module):
    """As a U-Net does, it takes even sizes alone."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 8, 3, padding=1)
        self.up = nn.ConvTranspose2d(8, 8, 2, stride=2)
        self.head = nn.Conv2d(16, 3, 1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        whole = torch.relu(self.down(image))
        found: torch.Tensor = self.head(torch.cat([self.up(torch.max_pool2d(whole, 2)), whole], 1))
        return found


def saved(path: Path, **arrays: np.ndarray[Any, Any]) -> str:
    np.savez(path, **arrays)  # type: ignore[arg-type]
    return str(path)


@pytest.fixture
def words(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    compress.save(Words(), tmp_path / "words.pt", inputs="ids:int64[batch,seq]", outputs=["logits"])
    ids = np.random.default_rng(0).integers(0, VOCABULARY, (SAMPLES, TOKENS))
    labels = np.arange(SAMPLES) % 4
    saved(tmp_path / "good.npz", ids=ids, label=labels)
    ids[-1, 2] = VOCABULARY  # the last sample: what looks at a few does not see it
    saved(tmp_path / "beyond.npz", ids=ids, label=labels)
    return tmp_path


@pytest.mark.parametrize(
    "asked",
    [
        {"int8": "dynamic", "eval": "beyond.npz"},
        {"int8": "static", "calibration": "beyond.npz"},
        {"int8": "static", "smooth": True, "calibration": "beyond.npz"},
        {"prune": 0.1, "finetune": "beyond.npz", "epochs": 1},
        {"prune": 0.1, "finetune": "beyond.npz", "epochs": 1, "importance": "taylor"},
        {"prune": 0.1, "finetune": "good.npz", "epochs": 1, "validation": "beyond.npz"},
    ],
    ids=lambda asked: "-".join(map(str, asked.values())),
)
def test_a_token_beyond_the_embedding(words: Path, asked: dict[str, Any]) -> None:
    named: dict[str, Any] = {k: str(words / v) if str(v).endswith(".npz") else v for k, v in asked.items()}
    options = ExportOptions(output=words / "artifact", **named)
    with pytest.raises(StageError, match="does not run on the inputs") as told:
        compress.export(words / "words.pt", options)
    table = f"a table of {VOCABULARY} rows was asked for row {VOCABULARY}, which ids holds: the tokenizer"
    assert f"to {VOCABULARY}: {table}" in told.value.why
    assert not (words / "artifact").exists()


class Placed(nn.Module):
    """With a table of positions that is shorter than its texts, and ids that fit theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, 4), nn.Embedding(4, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = (self.tokens(ids) + self.places(torch.arange(ids.shape[1]))).mean(1)
        return found


@pytest.mark.parametrize("exported", [False, True])
def test_a_position_beyond_its_table_is_not_blamed_on_ids(exported: bool) -> None:
    ids = np.full((2, TOKENS), 1)
    module: nn.Module = Placed()
    if exported:
        module = torch.export.export(module, (torch.ones(2, 3, dtype=torch.int64),), dynamic_shapes=(
            {1: torch.export.Dim("seq", min=2, max=64)},)).module()  # fmt: skip
    with pytest.raises(StageError) as told:
        run_on({"ids": ids}, lambda: module(torch.as_tensor(ids)))
    assert f"a table of 4 rows was asked for row {TOKENS - 1}, which is in no input" in told.value.why
    ids[1, 1] = VOCABULARY + 2
    with pytest.raises(StageError) as told:
        run_on({"ids": ids}, lambda: module(torch.as_tensor(ids)))
    assert f"a table of {VOCABULARY} rows was asked for row {VOCABULARY + 2}, which ids holds" in told.value.why


def test_images_of_a_size_that_the_network_does_not_take(tmp_path: Path) -> None:
    torch.manual_seed(0)
    inputs = "image:float32[batch,3,height,width]"
    compress.save(Halved(), tmp_path / "halved.pt", inputs=inputs, outputs=["mask"])
    rng = np.random.default_rng(0)
    even = rng.random((8, 3, 16, 16), dtype=np.float32)
    odd = rng.random((8, 3, 15, 16), dtype=np.float32)
    options = ExportOptions(
        output=tmp_path / "artifact",
        int8="static",
        calibration=saved(tmp_path / "even.npz", image=even),
        eval=saved(tmp_path / "odd.npz", image=odd, label=np.zeros((8, 15, 16), np.int64)),
    )
    with pytest.raises(StageError, match="does not run on the inputs") as told:
        compress.export(tmp_path / "halved.pt", options)
    assert "image [8, 3, 15, 16]: " in told.value.why
    assert not options.output.exists()


def test_inputs_of_unequal_lengths_under_one_name(tmp_path: Path) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hidden = nn.Linear(4, 4)

        def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.hidden(left + right).mean(1)
            return found

    shape = "float32[batch,seq,4]"
    compress.save(Two(), tmp_path / "two.pt", inputs=[f"left:{shape}", f"right:{shape}"], outputs=["vector"])
    held = {"left": np.ones((8, 5, 4), np.float32), "right": np.ones((8, 3, 4), np.float32)}
    options = ExportOptions(output=tmp_path / "artifact", int8="dynamic", eval=saved(tmp_path / "d.npz", **held))
    with pytest.raises(StageError, match="does not run on the inputs"):
        compress.export(tmp_path / "two.pt", options)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes"),
        RuntimeError("Failed to allocate memory for requested buffer of size 99"),
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory"),
        NameError("name 'hiden' is not defined"),
        AttributeError("no attribute 'wieght'"),
        KeyboardInterrupt(),
        SystemExit(3),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_other_data_would_not_mend_is_raised_as_it_is(error: BaseException) -> None:
    """A search would have noted it as one candidate's failure, a budget as more than the model can lose."""

    def run() -> None:
        raise error

    with pytest.raises(type(error)) as told:
        run_on({"x": np.zeros((2, 3), np.float32)}, run)
    assert told.value is error
