"""What an output means is told by its labels, by the last operation of the network, or by its shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from compress.artifact import Signature, TensorSpec
from compress.evaluate.endings import ending_of
from compress.evaluate.output_kind import OutputForm, OutputKind, by_labels, class_axis, form_of, kind_of
from compress.model import TorchModel
from compress.model.infer import infer_signature
from compress.training.labels import counts, refuse_labels
from compress.training.losses import distance

N = 12
IDS, MAP = np.arange(N) % 4, np.zeros((N, 5, 5), np.int64)
MULTI = (np.random.default_rng(0).random((N, 4)) > 0.5).astype(np.float32)
ONE_HOT = np.eye(4, dtype=np.int64)[IDS]


class Ending(nn.Module):
    def __init__(self, end: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.end = nn.Linear(4, 4), end

    def forward(self, x: torch.Tensor) -> Any:
        return self.end(self.layer(x))


def model(module: nn.Module, *shapes: tuple[int | str, ...]) -> TorchModel:
    outputs = tuple(TensorSpec(f"out{n}", "float32", shape) for n, shape in enumerate(shapes))
    return TorchModel(module.eval(), Signature((TensorSpec("x", "float32", ("batch", 4)),), outputs))


@pytest.mark.parametrize(
    ("end", "found"),
    [
        (nn.Softmax(1), "softmax"),
        (lambda x: torch.softmax(x, -1), "softmax"),
        (lambda x: x.softmax(1).reshape(-1, 4), "softmax"),
        (lambda x: F.log_softmax(x, 1), "log_softmax"),
        (nn.Sequential(nn.ReLU(), nn.Sigmoid(), nn.Dropout()), "sigmoid"),
        (lambda x: x.sigmoid().squeeze(), "sigmoid"),
        (lambda x: F.normalize(x, dim=1), "normalize"),
        (lambda x: x / x.norm(dim=1, keepdim=True), "normalize"),
        (lambda x: x / torch.linalg.vector_norm(x, dim=1, keepdim=True).clamp(min=1e-6), "normalize"),
        (lambda x: x / x.sum(1, keepdim=True), None),
        (lambda x: x / 2, None),
        (lambda x: torch.sigmoid(x) * 6, None),
        (nn.Identity(), None),
        (lambda x: x if x.sum() > 0 else -x, None),  # can't be traced
    ],
)
def test_the_last_operation_is_found_in_the_graph(end: Any, found: str | None) -> None:
    assert ending_of(Ending(end)) == found
    try:
        program = torch.export.export(Ending(end), (torch.ones(2, 4),)).module()
    except Exception:
        return
    if found != "normalize":  # torch.export writes it as its parts
        assert ending_of(program) == found


class Map(nn.Module):
    """One map, or four."""

    def __init__(self, end: Callable[[torch.Tensor], torch.Tensor], channels: int = 4) -> None:
        super().__init__()
        self.layer, self.end = nn.Conv2d(1, channels, 1), end

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.end(self.layer(x))


AXES: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], int, int | None]] = {
    "over all places, as a map": (lambda z: (8 * z).flatten(1).softmax(-1).view(-1, 1, 5, 6), 1, None),
    "over all places, flat": (lambda z: (8 * z).flatten(1).softmax(-1), 1, 1),
    "over places of each channel": (lambda z: (8 * z).flatten(2).softmax(-1).view(-1, 4, 5, 6), 4, None),
    "over places of each channel, flat": (lambda z: (8 * z).flatten(2).softmax(-1), 4, 2),
    "over channels": (lambda z: z.softmax(1), 4, 1),
    "over channels, logarithms": (lambda z: z.log_softmax(1), 4, 1),
    "over channels that lie last": (lambda z: z.permute(0, 2, 3, 1).softmax(-1), 4, 3),
    "over channels, and then moved": (lambda z: z.softmax(1).permute(0, 2, 3, 1), 4, 3),
    "over rows": (lambda z: (8 * z).softmax(2), 4, 2),
    "over the batch": (lambda z: (8 * z).softmax(0), 4, None),
    "over channels of a sequence": (lambda z: z.flatten(2).softmax(1), 4, 1),
}


@pytest.mark.parametrize("case", AXES)
def test_what_sums_to_one_is_a_distribution_and_nothing_else_is(case: str) -> None:
    end, channels, axis = AXES[case]
    torch.manual_seed(0)
    module = Map(end, channels).eval()
    found = TorchModel(module, infer_signature(module, (TensorSpec.parse("x:float32[batch,1,5,6]"),)))
    form = form_of(found, found.signature.outputs[0].name)
    if axis is None:
        assert (form.kind, form.ending) == (OutputKind.REGRESSION, None)
        assert "no dimension" in form.because
    else:
        dims = len(found.signature.outputs[0].shape)
        assert form.kind is (OutputKind.SOFTMAX if dims == 2 else OutputKind.DENSE)
        assert form.axis % dims == axis
    taught = module(torch.randn(4, 1, 5, 6)).detach()
    got = module(torch.randn(4, 1, 5, 6)).detach().requires_grad_()
    loss = distance(form, got, taught, 4.0, taught.var())
    torch.autograd.backward(loss)
    assert float(loss.detach()) > 1e-6
    assert got.grad is not None
    assert bool(got.grad.any())


def test_each_of_several_outputs_has_its_own() -> None:
    both = Ending(lambda x: {"classes": x.softmax(1), "labels": x.sigmoid()})
    two = model(both, ("batch", 4), ("batch", 4))
    assert [kind_of(two, name) for name in ("out0", "out1")] == [OutputKind.SOFTMAX, OutputKind.SIGMOID]


@pytest.mark.parametrize(
    ("shape", "end", "labels", "kind"),
    [
        (("batch", 4), nn.Identity(), None, "softmax"),
        (("batch", 4), nn.Identity(), IDS, "softmax"),
        (("batch", 4), nn.Identity(), ONE_HOT, "softmax"),
        (("batch", 4), nn.Identity(), MULTI, "sigmoid"),
        (("batch", 4), nn.Identity(), MULTI.astype(bool), "sigmoid"),
        (("batch", 4), nn.Sigmoid(), None, "sigmoid"),
        (("batch", 4), nn.Sigmoid(), ONE_HOT, "sigmoid"),
        (("batch", 4), nn.Identity(), MULTI * 3.5, "regression"),
        (("batch", 4), lambda x: F.normalize(x), None, "embedding"),
        (("batch", 1), nn.Identity(), None, "regression"),
        (("batch", 1), nn.Identity(), MULTI[:, 0], "sigmoid"),
        (("batch", 1), nn.Identity(), IDS.astype(np.float32), "regression"),
        (("batch", 4, 5, 5), nn.Identity(), MAP, "dense"),
        (("batch", 4, "height", "width"), nn.Identity(), MAP, "dense"),
        (("batch", 5, 5, 4), nn.Identity(), MAP, "dense"),
        (("batch", 4, 5, 5), nn.Identity(), None, "regression"),
        (("batch", 1, 5, 5), nn.Sigmoid(), None, "sigmoid"),
    ],
)
def test_an_output_is_what_its_labels_its_ending_or_its_shape_say(
    shape: tuple[int | str, ...], end: Any, labels: Any, kind: str
) -> None:
    form = form_of(model(Ending(end), shape), "out0", labels)
    assert form.kind == kind
    assert form.because
    if kind == "dense":
        assert shape[form.axis] == 4


@pytest.mark.parametrize(
    ("shape", "axis"),
    [
        (("batch", 5), 1),
        (("batch", 5, 8, 8), 1),
        (("batch", "seq", 5), -1),
        (("batch", 7, 5), -1),
        (("batch", 5, "length"), 1),
        (("batch", "height", "width", 5), -1),
    ],
)
def test_without_labels_the_shape_says_where_the_classes_are(shape: tuple[int | str, ...], axis: int) -> None:
    assert class_axis(shape) == axis


def test_labels_that_are_shares_of_classes_teach_classes() -> None:
    spec = TensorSpec("y", "float32", ("batch", 3))
    shares = np.random.default_rng(0).dirichlet((1, 1, 1), 20).astype(np.float32)
    assert by_labels(shares, spec, None) == OutputForm(OutputKind.SOFTMAX, because="the labels are shares of classes")
    twice = by_labels(2 * shares, spec, None)
    assert twice is not None
    assert twice.kind is OutputKind.REGRESSION


@pytest.mark.parametrize(
    ("shape", "of", "axis"),
    [
        (("batch", "seq", 12), (12,), -1),
        (("batch", 12, "length"), (12,), 1),
        (("batch", "height", "width", 6), (6, 6), -1),
        (("batch", 6, "height", "width"), (6, 6), 1),
        (("batch", 7, 12), (7,), -1),
    ],
)
def test_a_dimension_that_varies_counts_no_classes(
    shape: tuple[int | str, ...], of: tuple[int, ...], axis: int
) -> None:
    """Whatever size it has in the data: as many as there are classes, too."""
    ids = np.zeros((N, *of), np.int64)
    spec = TensorSpec("y", "float32", shape)
    form = by_labels(ids, spec, None)
    assert form is not None
    assert (form.kind, form.axis, form.doubt) == (OutputKind.DENSE, axis, "")
    assert class_axis(shape) == axis
    assert counts(form, spec, ids)
    refuse_labels(ids, spec, "data", taught=False)


@pytest.mark.parametrize("batch", ["batch", 1, 4])
@pytest.mark.parametrize(
    ("shape", "labels"),
    [
        ((5,), np.arange(N) % 5),
        ((5,), np.eye(5, dtype=np.float32)[np.arange(N) % 5]),
        ((5, 3, 3), np.zeros((N, 3, 3), np.int64)),
        ((3, 5), np.zeros((N, 3), np.int64)),
        ((3,), np.random.default_rng(0).normal(size=(N, 3)).astype(np.float32)),
    ],
)
def test_labels_count_however_many_samples_a_call_takes(
    batch: int | str, shape: tuple[int, ...], labels: np.ndarray[Any, Any]
) -> None:
    spec = TensorSpec("y", "float32", (batch, *shape))
    form = by_labels(labels, spec, None)
    assert form is not None
    assert counts(form, spec, labels)
    assert not counts(form, spec, np.zeros((N, 7)))


@pytest.mark.parametrize("of", [(6,), (6, 6)])
def test_where_two_dimensions_may_count_the_classes_it_is_told(of: tuple[int, ...]) -> None:
    """As torch's cross_entropy has it, and in words."""
    form = by_labels(np.zeros((N, *of), np.int64), TensorSpec("y", "float32", ("batch", 6, *of)), None)
    assert form is not None
    assert form.axis == 1
    assert "along its second dimension or along its last" in form.doubt


def test_labels_of_places_of_an_output_whose_classes_vary_say_nothing() -> None:
    assert by_labels(np.zeros((N, 6), np.int64), TensorSpec("y", "float32", ("batch", "seq", "classes")), None) is None
