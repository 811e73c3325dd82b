"""What torch.export.save writes of plain modules loads as torch loads it, without torch reading the file."""

from __future__ import annotations

import ast
import io
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from compress.errors import CheckpointError, ResourceError
from compress.formats.checkpoint import load
from compress.formats.exported.expressions import clean_expression
from compress.vetting.calls.operators import allowed
from tests.hostile.pickles import Runs


class Tied(nn.Module):
    places: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 16), nn.Linear(16, 50, bias=False)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.head.weight = self.embed.weight
        self.register_buffer("places", torch.arange(32).expand((1, -1)))

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        places = self.places[:, : ids.shape[1]]
        return {"logits": self.head(self.layer(self.embed(ids) + 0.1 * places[..., None]))}


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 16, 2, batch_first=True, bidirectional=True), nn.Linear(32, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0][:, -1])  # type: ignore[no-any-return]


class Branches(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def up(x: torch.Tensor) -> torch.Tensor:
            return x.sin()

        def down(x: torch.Tensor) -> torch.Tensor:
            return x.cos()

        return torch.cond(x.sum() > 0, up, down, (x,))  # type: ignore[no-any-return]


class InPlace(nn.Module):
    """Constants, views, changes in place, a part that takes no gradients, sizes that are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.constant = nn.Linear(4, 4), torch.arange(4.0)
        self.register_buffer("left_out", torch.ones(4), persistent=False)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            y = self.linear(x).mul_(scale).add_(self.constant)
        y = y.clone()
        y[:, 0] = 0
        return y + self.left_out, x.reshape(x.shape[0] * 2, -1)


def images() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding="same"), nn.BatchNorm2d(8), nn.GELU(approximate="tanh"), nn.MaxPool2d(2),
        nn.Upsample(scale_factor=2.0, mode="bilinear"), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Softmax(1),
    )  # fmt: skip


X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[torch.Tensor, ...], tuple[int, ...]]] = {
    "tied, with an expanded buffer": (Tied, (torch.arange(14).reshape(2, 7),), (0, 1)),
    "recurrent": (Recurrent, (torch.ones(2, 5, 8),), (0,)),
    "branches": (Branches, (X,), ()),
    "in place": (InPlace, (X, torch.ones(3, 1)), (0,)),
    "images": (images, (torch.ones(2, 3, 8, 8),), (0,)),
    "double precision": (lambda: nn.Linear(4, 4).double(), (X.double(),), (0,)),
    "no weights": (nn.ReLU, (X,), (0,)),
}


def written(path: Path, module: nn.Module, inputs: tuple[torch.Tensor, ...], dynamic: tuple[int, ...]) -> Path:
    shapes = tuple(dict.fromkeys(dynamic, torch.export.Dim.AUTO) for _ in inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's own exporter
        torch.export.save(torch.export.export(module.eval(), inputs, dynamic_shapes=shapes), path)
    return path


def flat(value: Any) -> list[torch.Tensor]:
    return [value] if isinstance(value, torch.Tensor) else list(value.values() if isinstance(value, dict) else value)


@pytest.mark.parametrize(("make", "inputs", "dynamic"), MODULES.values(), ids=MODULES)
def test_it_answers_as_what_torch_loads(
    tmp_path: Path, make: Callable[[], nn.Module], inputs: tuple[torch.Tensor, ...], dynamic: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    path = written(tmp_path / "m.pt2", make(), inputs, dynamic)
    with torch.no_grad():
        expected = flat(torch.export.load(path).module(check_guards=False)(*inputs))
        got = flat(load(path).module(*inputs))
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_torch_is_given_no_pickle_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "m.pt2", nn.Linear(4, 4), (X,), (0,))
    monkeypatch.setattr(torch, "load", lambda *_args, **_named: pytest.fail("torch.load was called"))
    assert load(path).signature.inputs[0].name == "input"


def test_a_trusted_file_is_torchs_to_read(tmp_path: Path) -> None:
    canary, path = tmp_path / "canary", written(tmp_path / "m.pt2", nn.Linear(4, 4), (X,), (0,))
    bad = io.BytesIO()
    torch.save((Runs(canary),), bad)
    with zipfile.ZipFile(path) as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in content.items():
            archive.writestr(name, bad.getvalue() if name.endswith("sample_inputs/model.pt") else data)
    assert load(path).signature.inputs[0].name == "input"
    assert not canary.exists()
    with pytest.raises(CheckpointError):  # its sample inputs are no tensors
        load(path, trust=True)
    assert canary.exists()


@pytest.mark.parametrize(
    "text",
    [
        "Symbol('s77', positive=True, integer=True)",
        "Mul(Integer(2), Symbol('s77', positive=True, integer=True))",
        "FloorDiv(Add(Symbol('s1', integer=True), Integer(-1)), Integer(2))",
        "Pow(Symbol('s1', positive=True, integer=True), Integer(2))",
        "Max(Integer(1), Symbol('u0', integer=True))",
        "Equality(Mod(Symbol('s0'), Integer(8)), Integer(0))",
        "Float('0.5', precision=53)",
        "2*s0 + 1",
        "(s0//2 + 1)*(s1//2 + 1)*(s2//2 + 1)",
        "Max(1, ((((s0 - 1)//2) - 1)//2) + 1)**2",
        "FloatPow(ToFloat(Symbol('s1', positive=True, integer=True)), Float('-0.5', precision=53))",
        "TruncToInt(Mul(Float('1.5', precision=53), ToFloat(Symbol('s1', positive=True, integer=True))))",
        "Mul(Rational(1, 2), Symbol('s0', positive=True, integer=True))",
        "Pow(Symbol('s0'), Integer(-1))",
    ],
)
def test_an_expression_of_sizes_means_the_same_when_it_was_written_again(text: str) -> None:
    assert ast.dump(ast.parse(clean_expression(text))) == ast.dump(ast.parse(text))


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os')", "s1.__class__", "[s1]", "(lambda: 1)()", "Max(*[1])", "exec('1')", "eval", "Symbol(s1)",
        "Symbol('s1', commutative='x')", "Symbol(name='s1')", "Symbol('print(1)')", "Integer('1')", "9**9**9",
        "Pow(2, 10**9)", "Pow(2, Pow(9, 9))", "Pow()", "Pow(Integer(2), Rational(1000000000, 1))", "-" * 100 + "1",
        "Integer(99999999999999999999)", "1 if s1 else 2", "f'{s1}'", "s1; s1", "s1 # x\n+ (", "", "LShift(1, 2**40)",
        "Pow(Pow(9, 8), 8) * Pow(Pow(9, 8), 8) * Pow(Pow(Pow(Pow(9, 8), 8), 8), 8)", "(s1+s2+s3)**5",
        "(s1+1)*(s2+1)*(s3+1)*(s4+1)*(s5+1)*(s6+1)*(s7+1)", f"Max({', '.join(f's{at}' for at in range(20))})",
        "Mul(Float('1.5', precision=68719476736), s0)", "Float(1.5, precision=214)", "Float('1.5', 3000000000)",
        "Float(1.5, 3000000000)", "Float(1.5, dps=3000000000)", "Symbol('s0', precision=53)", "Symbol('s0', real=2)",
        "Add(1, 2, precision=53)", "Pow(Integer(3), Rational(1, Rational(1, 3000000000)))", "Rational(1, 0)",
        "Pow(Integer(3), Rational(1, 2))", "Integer(s0)", "Rational(1, s0)", "Rational(1, -2)", "Integer(1.5)",
        "Float(s0)", "Float(1e400)", "Pow(s0, Abs(9))", "s0**-9", "Pow(Float('1e999'), 2)", "((s0**8)**8)",
        "FloorDiv(FloorDiv(s0, s1+s2+s3+s4+s5+s6+s7+s8+s9), s11+s12+s13+s14+s15+s16+s17+s18)",
        "1/(s1+s2+s3+s4+s5)+1/(s6+s7+s8+s9)+1/(s10+s11+s12+s13)", "Symbol('s\u0661')",
        "*".join(["FloorDiv(8*s1+8*s2+8*s3+8*s4+8*s5, 8)"] * 3), "S('1')", "sympify('1')", "factorial(9999999)", "E1", "hn1", "a.b", "exec(chr(49))",
    ],
)  # fmt: skip
def test_any_other_expression_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="holds the expression"):
        clean_expression(text)


@pytest.mark.parametrize(
    ("target", "yes"),
    [
        ("torch.ops.aten.relu.default", True),
        ("torch.ops.aten.relu_.default", True),
        ("torch.ops.aten.copy_.default", True),
        ("torch.ops.aten.sym_size.int", True),
        ("torch.ops.higher_order.cond", True),
        ("_operator.getitem", True),
        ("torch.sym_max", True),
        ("torch.ops.aten.from_file.default", False),
        ("torch.ops.aten.save.default", False),
        ("torch.ops.aten.set_.source_Storage", False),
        ("torch.ops.aten.resize_.default", False),
        ("torch.ops.aten.as_strided_.default", False),
        ("torch.ops.aten._sparse_coo_tensor_unsafe.default", False),
        ("torch.ops.aten.relu", False),
        ("torch.ops.aten.relu.__class__", False),
        ("torch.ops.aten.relu.default.__class__", False),
        ("torch.ops.aten.relu.nothing", False),
        ("torch.ops.prim.Print.default", False),
        ("torch.ops.higher_order.while_loop", False),
        ("torch.ops.load_library", False),
        ("torch.ops.torchvision.nms.default", False),
        ("torch.load", False),
        ("_operator.lshift", False),
        ("_operator.attrgetter", False),
        ("math.__loader__", False),
        ("#extension:op", False),
        ("relu\n", False),
        ("", False),
    ],
)
def test_operators_are_those_of_tensors(target: str, yes: bool) -> None:
    assert allowed(target) is yes


def test_a_file_that_takes_more_memory_than_there_is_blames_no_setting_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path / "m.pt2", nn.Linear(4, 4), (X,), (0,))

    def greedy(*_args: object, **_named: object) -> None:
        raise MemoryError("can't have 10 GB")

    monkeypatch.setattr("compress.formats.exported.read.infer_signature", greedy)
    with pytest.raises(ResourceError, match=f"not enough memory to read {path}") as caught:
        load(path)
    assert caught.value.mend
    assert "--" not in caught.value.mend


def test_a_dimension_that_is_twice_another_loads(tmp_path: Path) -> None:
    half = torch.export.Dim("half", min=2, max=64)
    module = nn.Sequential(nn.Conv2d(1, 2, 2, 2), nn.ConvTranspose2d(2, 1, 2, 2)).eval()
    program = torch.export.export(module, (torch.ones(1, 1, 8, 8),), dynamic_shapes=({2: 2 * half},))
    torch.export.save(program, tmp_path / "model.pt2")
    assert load(tmp_path / "model.pt2").signature.inputs[0].shape[2:] == ("dim_2", 8)
