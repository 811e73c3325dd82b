"""What varies is measured, counted, proven and reported at one representative size, by name."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import compress
from compress.artifact import Artifact
from compress.cli import main
from compress.data.dataset import Dataset
from compress.data.sizes import typical_inputs
from compress.errors import RecipeError, SignatureError
from compress.formats.checkpoint import fingerprint, load, save
from compress.jobs.measure import measure_files
from compress.jobs.recipe import with_sizes
from compress.model import TorchModel
from compress.model.infer import infer_signature
from compress.onnx_export.from_torch import OnnxFromTorch
from compress.options import ExportOptions, MeasureOptions
from compress.pipeline import run
from compress.runtime.measure import onnx_macs, torch_macs
from compress.runtime.onnx_shapes import shapes_for
from compress.signature import Signature, TensorSpec, parse_sizes
from tests.families import Bert, Lstm, UNet
from tests.models import conv
from tests.unit.compress.prune.test_prune_channels import quiet

TOKENS = ("tokens:int64[batch,seq]", "mask:int64[batch,seq]")
IMAGE = "x:float32[batch,3,height,width]"
FRAMES = "x:float32[batch,time,8]"


def model_of(module: nn.Module, *inputs: str, **sizes: int) -> TorchModel:
    module.eval()
    return TorchModel(module, infer_signature(module, tuple(map(TensorSpec.parse, inputs)), sizes=sizes))


@pytest.mark.parametrize(
    ("texts", "found"), [((), {}), (("seq=128",), {"seq": 128}), (("h = 3", "w=4"), {"h": 3, "w": 4})]
)
def test_sizes_are_read(texts: tuple[str, ...], found: dict[str, int]) -> None:
    assert parse_sizes(texts) == found


@pytest.mark.parametrize("texts", [("seq",), ("seq=",), ("=3",), ("seq=-1",), ("seq=1.5",), ("a b=3",), ("s=1", "s=2")])
def test_what_is_no_size_is_refused(texts: tuple[str, ...]) -> None:
    with pytest.raises(SignatureError):
        parse_sizes(texts)


@pytest.mark.parametrize(
    ("inputs", "sizes", "at_three", "text"),
    [
        (("x:float32[batch,4]",), {}, {"batch": 3}, ""),
        (("x:float32[1,4]",), {}, {}, ""),
        (TOKENS, {"seq": 12}, {"batch": 3, "seq": 12}, "seq = 12 (as given)"),
        (("x:float32[n,seq,4]",), {}, {"n": 3, "seq": 32}, "seq = 32 (assumed)"),
        (("x:float32[4,seq]",), {}, {"seq": 32}, "seq = 32 (assumed)"),
        ((IMAGE,), {"width": 64}, {"batch": 3, "height": 224, "width": 64}, "height = 224 (assumed), width = 64 (as given)"),
        (("x:float32[batch,4]", "bank:float32[items,4]"), {}, {"batch": 3, "items": 3}, ""),
        (("x:float32[batch,4]", "bank:float32[items,4]"), {"items": 9}, {"batch": 3, "items": 9}, "items = 9 (as given)"),
    ],
)  # fmt: skip
def test_the_leading_dimension_counts_samples_and_others_have_a_size(
    inputs: tuple[str, ...], sizes: dict[str, int], at_three: dict[str, int], text: str
) -> None:
    signature = Signature(tuple(map(TensorSpec.parse, inputs)), (), sizes)
    assert signature.at(3) == at_three
    assert signature.sizes_text == text
    again = Signature.from_dict(json.loads(json.dumps(signature.to_dict())))
    assert again == signature
    assert again.told == signature.told


@pytest.mark.parametrize("sizes", [{"seq": 0}, {"seq": -1}, {"rows": 3}, {"batch": 3}])
def test_a_size_that_makes_no_sense_is_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(SignatureError):
        Signature(tuple(map(TensorSpec.parse, TOKENS)), (), sizes)


def test_a_batch_of_what_does_not_lead_every_output_is_none() -> None:
    inputs, rows = (TensorSpec.parse("x:float32[batch,seq]"),), TensorSpec.parse("y:float32[seq,2]")
    assert Signature(inputs, (TensorSpec.parse("y:float32[batch,2]"),)).batched
    assert not Signature(inputs, (rows,)).batched


def written(path: Path, **arrays: Any) -> str:
    np.savez(path, **arrays)
    return str(path)


def test_sizes_are_those_of_the_data_where_neither_user_nor_file_gave_any(tmp_path: Path) -> None:
    def text(name: str, length: int) -> str:
        return written(tmp_path / name, tokens=np.ones((5, length), np.int64), mask=np.ones((5, length), np.int64))

    save(Bert(), tmp_path / "open.pt", inputs=TOKENS)
    save(Bert(), tmp_path / "said.pt", inputs=TOKENS, sizes={"seq": 9})
    sources = {"calibration": None, "evaluation": text("eval.npz", 11), "training": text("train.npz", 7)}
    for path, given, dims, told in (
        ("open.pt", (), (), (11, "from the evaluation data")),
        ("said.pt", (), (), (9, "from the model file")),
        ("said.pt", ("seq=5",), (), (5, "as given")),
        ("open.pt", ("seq=5",), ("seq=1:6:8",), (6, "from --dims")),
    ):
        model = with_sizes(load(tmp_path / path, sizes=given), tmp_path / path, sources, dims)
        assert model.signature.told == {"seq": told}
    assert load(tmp_path / "open.pt").signature.told == {"seq": (32, "assumed")}


def test_samples_are_measured_only_where_they_are_of_the_size_that_is_told(tmp_path: Path) -> None:
    signature = model_of(Lstm(), FRAMES, time=6).signature
    values = np.random.default_rng(0).standard_normal((3, 6, 8)).astype(np.float32)
    data = Dataset.open(written(tmp_path / "x.npz", x=values), signature)
    assert np.array_equal(typical_inputs(signature, data, 5)["x"], values[[0, 1, 2, 0, 1]])
    assert typical_inputs(signature.sized({"time": 4}), data, 2)["x"].shape == (2, 4, 8)


def test_the_same_model_at_another_size_is_another_run() -> None:
    model = model_of(Bert(), *TOKENS)
    other = dataclasses.replace(model, signature=model.signature.sized({"seq": 5}))
    assert fingerprint(model) != fingerprint(other)
    found = dataclasses.replace(model, signature=model.signature.sized({"seq": 5}, "from the evaluation data"))
    assert fingerprint(found) == fingerprint(other), "wherever the size is from"
    assert model.signature == other.signature, "but takes the same inputs"


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(conv(3, 8, stride=2), conv(8, 8, groups=8)), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).mean((2, 3)))  # type: ignore[no-any-return]


def attention(length: int) -> int:
    """Of Bert(): projections and two layers for each token, scores and sums for each pair, and the head."""
    return length * (4 * 32 * 32 + 2 * 32 * 128) + 2 * length * length * 32 + 32 * 5


def recurrence(length: int) -> int:
    """Of Lstm(): the layer before and both matrices of each step, and the two layers behind."""
    return length * (8 * 64 + 4 * 32 * (64 + 32)) + 32 * 64 + 64 * 5


def convolution(side: int) -> int:
    """Of Convolutions(), of twice as wide an image."""
    return (side // 2) * side * (3 * 8 * 9 + 8 * 9) + 8 * 5


@pytest.mark.parametrize(
    ("module", "inputs", "sizes", "count"),
    [
        (Bert(), TOKENS, {"seq": 24}, attention(24)),
        (Lstm(), (FRAMES,), {"time": 20}, recurrence(20)),
        (Convolutions(), (IMAGE,), {"height": 16, "width": 32}, convolution(16)),
        (UNet(), (IMAGE,), {"height": 16, "width": 32}, None),
    ],
    ids=["transformer", "lstm", "convolutions", "unet"],
)
def test_multiply_accumulates_are_those_of_the_size_in_torch_and_in_the_file(
    module: nn.Module, inputs: tuple[str, ...], sizes: dict[str, int], count: int | None, tmp_path: Path
) -> None:
    model = model_of(module, *inputs, **sizes)
    given = OnnxFromTorch().run(model, tmp_path, quiet)
    assert not given.warnings
    assert not isinstance(given.model, TorchModel)
    path = given.model.path
    for factor in (1, 2):
        signature = model.signature.sized({dim: factor * size for dim, size in sizes.items()})
        counted = torch_macs(module, signature)
        assert onnx_macs(path, signature) == counted
        if factor == 1 and count is not None:
            assert counted == count
    ran = [figures["shapes"][TensorSpec.parse(inputs[0]).name] for figures in given.details["parity"].values()]
    places = [TensorSpec.parse(inputs[0]).shape.index(dim) for dim in sizes]
    assert [ran[0][at] for at in places] == list(sizes.values())
    assert all(ran[1][at] != ran[0][at] for at in places), "a size of its own, where the model takes another"
    assert len({ran[1][at] for at in places}) == len(places)


def test_a_second_recurrent_network_of_a_process_keeps_its_length_dynamic(tmp_path: Path) -> None:
    """torch 2.13 remembers the exporter's loop, and unrolls the next network."""
    for number in range(2):
        (tmp_path / str(number)).mkdir()
        given = OnnxFromTorch().run(model_of(Lstm(), FRAMES), tmp_path / str(number), quiet)
    assert "time = 32" in given.warnings[0]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network with a dynamic length, data for it, and its artifact."""
    folder = tmp_path_factory.mktemp("made")
    save(Lstm(), folder / "model.pt", inputs=FRAMES)
    frames = np.random.default_rng(0).standard_normal((12, 21, 8)).astype(np.float32)
    written(folder / "data.npz", x=frames, label=np.arange(12) % 5)
    options = ExportOptions(
        output=folder / "artifact", calibration=str(folder / "data.npz"), int8="static", batches=(2,)
    )
    compress.export(folder / "model.pt", options)
    return folder


def test_a_run_says_the_size_everywhere_and_hands_it_on(made: Path) -> None:
    report = json.loads((made / "artifact/report.json").read_text())
    assert report["sizes"] == {"time": {"size": 21, "source": "from the calibration data"}}
    assert {row["measured"]["macs"] for row in report["stages"]} == {recurrence(21)}
    assert "time = 21 (from the calibration data)" in (made / "artifact/report.html").read_text()
    assert Artifact.load(made / "artifact").signature.at(2) == {"batch": 2, "time": 21}
    assert not any("usual" in finding for finding in report["findings"])


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({}, {"size": 21, "source": "from the calibration data"}),
        ({"size": ("time=4",)}, {"size": 4, "source": "as given"}),
        ({"dims": ("time=1:6:9",), "size": ("time=4",)}, {"size": 6, "source": "as given"}),
        ({"data": "data.npz"}, {"size": 21, "source": "from the data"}),
    ],
)
def test_measuring_says_which_size_it_took(made: Path, asked: dict[str, Any], told: dict[str, Any]) -> None:
    asked = asked | ({"data": str(made / "data.npz")} if "data" in asked else {})
    found = measure_files([made / "artifact", made / "model.pt"], MeasureOptions(rounds=1, **asked))
    assert found.sizes == {"time": told}


def test_measuring_data_at_another_size_than_its_own_is_refused(made: Path) -> None:
    with pytest.raises(RecipeError):
        measure_files([made / "artifact"], MeasureOptions(data=str(made / "data.npz"), size=("time=4",)))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--size", "time=50"], "sizes    time = 50 (as given)"),
        (["--size=time=50"], f"MACs     {recurrence(50):,}"),
        ([], "sizes    time = 32 (assumed)"),
    ],
)
def test_a_look_into_a_file_tells_the_size(
    made: Path, capsys: pytest.CaptureFixture[str], flags: list[str], said: str
) -> None:
    with pytest.raises(SystemExit):
        main(["inspect", str(made / "model.pt"), *flags])
    assert said in capsys.readouterr().out


def test_a_plan_tells_the_size(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["-o", str(made / "none"), "--eval", str(made / "data.npz"), "--dry-run"]
    with pytest.raises(SystemExit):
        main(["export", str(made / "model.pt"), *flags])
    assert "time = 21 (from the evaluation data)" in capsys.readouterr().out


def test_shapes_that_inference_leaves_open_are_seen_in_a_run(made: Path) -> None:
    """A name that is no tensor's has none, and every dimension is known."""
    path = Artifact.load(made / "artifact").model_path
    inputs = {"x": np.zeros((3, 7, 8), np.float32)}
    found = shapes_for(path, inputs, ["x", "output", "nothing"])
    assert found == {"x": (3, 7, 8), "output": (3, 5)}


def test_a_stage_kept_in_the_work_folder_keeps_its_sizes(tmp_path: Path) -> None:
    model = model_of(nn.Linear(8, 2), FRAMES, time=5)
    for _ in range(2):
        outcome = run([OnnxFromTorch()], model, work=tmp_path, source="s", watcher=Nobody())[0]
    assert outcome.reused
    assert outcome.given.model.signature.told == {"time": (5, "as given")}


class Nobody:
    def started(self, stage: str) -> Any:
        return quiet

    def ended(self, outcome: Any) -> None:
        pass


def test_an_assumed_size_is_written_down_for_whoever_asks_for_an_example(tmp_path: Path) -> None:
    """A network that goes down and up again takes no image of one pixel, which no shape of its input says."""
    model = model_of(UNet(), IMAGE)
    given = OnnxFromTorch().run(model, tmp_path, quiet).model
    written = json.loads(json.dumps(given.signature.to_dict()))
    assert written["sizes"] == {"height": 224, "width": 224}
    assert set(written["size_sources"].values()) == {"assumed"}
    read = Signature.from_dict(written)
    assert read.unsaid == model.signature.unsaid, "it is still a guess, and told as one"
    assert read.identity == model.signature.identity
