"""A name is one tensor's: two of one name are refused where the file is written, and where one is read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

import compress
from compress.console.wording import AssumedWarning
from compress.errors import SignatureError


class Two(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x + y, x - y


class Named(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"x": x + y, "difference": x - y}


class Output(nn.Module):
    def forward(self, output: torch.Tensor) -> torch.Tensor:
        return 2 * output


INPUTS = ("x:float32[batch,3]", "y:float32[batch,3]")


@pytest.mark.parametrize(
    ("network", "inputs", "outputs", "told"),
    [
        (Two, INPUTS, ("y", "z"), "an input and an output 'y'"),
        (Two, INPUTS, ("z", "x"), "an input and an output 'x'"),
        (Two, INPUTS, ("z", "z"), "two outputs 'z'"),
        (Named, INPUTS, None, "an input and an output 'x'"),
        (Output, ("output:float32[batch,3]",), None, "an input and an output 'output'"),
    ],
)
def test_two_tensors_of_one_name_are_refused_in_three_lines(
    network: type[nn.Module], inputs: Sequence[str], outputs: Sequence[str] | None, told: str, tmp_path: Path
) -> None:
    with pytest.raises(SignatureError) as refused:
        compress.save(network(), tmp_path / "model.pt", inputs=inputs, outputs=outputs)
    what, why, mend = str(refused.value).splitlines()
    assert told in what
    assert "names" in why
    assert "outputs=" in mend
    assert not list(tmp_path.iterdir())


def test_they_are_refused_of_a_module_whose_inputs_are_told_when_it_is_loaded(tmp_path: Path) -> None:
    torch.save(nn.Linear(3, 3), tmp_path / "model.pt")
    with pytest.raises(SignatureError, match="an input and an output 'output'"):
        compress.load(tmp_path / "model.pt", inputs=["output:float32[batch,3]"], trust=True)
    assert compress.load(tmp_path / "model.pt", inputs=["x:float32[batch,3]"], trust=True)


def test_names_that_differ_are_taken(tmp_path: Path) -> None:
    compress.save(Two(), tmp_path / "model.pt", inputs=INPUTS, outputs=("sum", "difference"))
    assert [spec.name for spec in compress.load(tmp_path / "model.pt").signature.outputs] == ["sum", "difference"]


@pytest.mark.parametrize("given", ["x:float32[batch,4]", "foo:float32[batch,0]"])
def test_other_inputs_that_are_told_of_a_file_with_its_own_have_no_use_which_is_a_warning(
    given: str, tmp_path: Path
) -> None:
    compress.save(nn.Linear(3, 3), tmp_path / "model.pt", inputs="x:float32[batch,3]")
    with pytest.warns(AssumedWarning, match=r"--input has no use: .*model.pt says itself that it takes x:float32"):
        compress.load(tmp_path / "model.pt", inputs=[given])


def test_its_own_inputs_may_be_told_of_a_file(tmp_path: Path) -> None:
    compress.save(nn.Linear(3, 3), tmp_path / "model.pt", inputs="x:float32[batch,3]")
    assert compress.load(tmp_path / "model.pt", inputs=["x:float32[batch,3]"])
