"""Labels teach the output that they belong to, and importance is felt by the loss of each output's kind."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from compress.artifact import Signature, TensorSpec
from compress.console.wording import Note
from compress.data.dataset import Dataset
from compress.errors import RecipeError
from compress.evaluate.evaluation import judged
from compress.evaluate.output_forms import forms_by, forms_of, labelled_output
from compress.evaluate.output_kind import OutputKind
from compress.evaluate.shares import hits
from compress.jobs.recipe import labelled_of
from compress.model import TorchModel
from compress.model.infer import infer_signature
from compress.options import ExportOptions
from compress.options.training import TrainingOptions
from compress.prune.importance import squared_changes
from compress.training.finetune import Finetune
from compress.training.judging import Judge

CLASSES = np.arange(96) % 3


class Heads(nn.Module):
    """A linear head for each output."""

    def __init__(self, *widths: int, end: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads = nn.ModuleList(nn.Linear(6, width) for width in widths)
        self.end = end or (lambda value: value)

    def forward(self, x: torch.Tensor) -> Any:
        """[n, 6] → an output [n, width] for each head."""
        given = tuple(self.end(head(x)) for head in self.heads)
        return given if len(given) > 1 else given[0]


def model(module: nn.Module, **outputs: int) -> TorchModel:
    specs = tuple(TensorSpec(name, "float32", ("batch", width)) for name, width in outputs.items())
    return TorchModel(module.eval(), Signature((TensorSpec("x", "float32", ("batch", 6)),), specs))


def data(labels: Any = None, count: int = 96) -> Dataset:
    x = np.random.default_rng(0).normal(size=(count, 6)).astype(np.float32)
    return Dataset("", {"x": x}, labels, "")


@pytest.mark.parametrize(
    ("outputs", "labels", "at"),
    [
        ({"boxes": 4, "scores": 3, "embedding": 8}, CLASSES, 1),
        ({"box": 4, "value": 1, "logits": 3}, CLASSES, 2),
        ({"a": 2, "b": 3}, CLASSES, 1),  # the first does not hold all of them
        ({"a": 3, "b": 5}, np.zeros((96, 5), np.float32) + 0.5, 1),
        ({"a": 3, "b": 5}, CLASSES, 0),
        ({"scores": 3, "boxes": 4}, None, 0),
    ],
)
def test_labels_belong_to_the_output_that_holds_them(outputs: dict[str, int], labels: Any, at: int) -> None:
    assert labelled_output(model(Heads(*outputs.values()), **outputs).signature, labels) == at


def test_an_output_is_what_its_name_says_where_nothing_else_does() -> None:
    """Boxes are told apart by where they are, which no softmax sees."""
    for name, kind in (("boxes", OutputKind.REGRESSION), ("embedding", OutputKind.EMBEDDING)):
        forms, _ = forms_of(model(Heads(4), **{name: 4}), None)
        assert forms[0].kind is kind
    forms, at = forms_of(model(Heads(4, 3), boxes=4, scores=3), CLASSES)
    assert (forms[0].kind, forms[1].kind, at) == (OutputKind.REGRESSION, OutputKind.SOFTMAX, 1)


def trained(given: Dataset, validation: Dataset | None, **outputs: int) -> tuple[TorchModel, Any]:
    student = model(Heads(*outputs.values()), **outputs)
    options = TrainingOptions(epochs=30, learning_rate=0.05, distillation=0.0, train_precision="32", compile="off")
    stage = Finetune(given, None, options, validation=validation)
    stage.check(student)
    return student, stage.fit(student.module, student.signature, lambda *_: None)


def test_class_ids_do_not_train_the_boxes_before_them() -> None:
    given = data()
    labels = given.inputs["x"][:, :3].argmax(1)
    given = data(labels)
    same: Any = Heads(4, 3).heads
    boxes = same[0].weight.detach().clone()
    student, told = trained(given, given, boxes=4, scores=3)
    with torch.no_grad():
        _, scores = student.module(torch.from_numpy(given.inputs["x"]))
    assert float((scores.argmax(1).numpy() == labels).mean()) > 0.8
    heads: Any = student.module.heads
    assert float((heads[0].weight.detach() - boxes).abs().max()) < 0.2, "no label speaks of boxes"
    assert told.figures["validation_metric"] == "top1"
    assert told.figures["best_value"] > 0.8, "epochs are judged by the scores, not by the first output"


def test_of_heads_that_are_alike_the_one_that_labels_teach_is_told() -> None:
    given = data(CLASSES)
    _, told = trained(given, given, a=3, b=3)
    (note,) = [said for said in told.warnings if "the labels teach" in said]
    assert "2 outputs: the labels teach 'a'; to teach another" in note
    _, alone = trained(given, given, a=3)
    assert not any("the labels teach" in said for said in alone.warnings)


@pytest.mark.parametrize("metric", [None, "top1"])
def test_the_output_that_a_metric_found_is_told(metric: str | None) -> None:
    network = model(Heads(4, 3), boxes=4, scores=3)
    _, _, notes = judged(data(CLASSES), metric, None, network)
    assert "The model gives 2 outputs: top1 judges 'scores' (another: --judge)." in notes


def test_agreement_is_not_taken_for_accuracy_where_there_are_no_labels() -> None:
    told = "No labels in the evaluation data: agreement with the original is judged, not accuracy."
    network = model(Heads(3), output=3)
    for given, name, says in ((data(None), None, True), (data(CLASSES), None, False), (data(None), "agreement", False)):
        assert (told in judged(given, name, None, network)[2]) is says


def test_importance_is_felt_by_every_output() -> None:
    """Beside a classifier, what another output needs alone is not for nothing."""
    two = model(Heads(4, 3), boxes=4, scores=3)
    heads: Any = two.module.heads
    found = squared_changes(two.module, two.signature, data(CLASSES), 0, lambda *_: None)
    assert float(found[heads[0].weight].sum()) > 0
    assert float(found[heads[1].weight].sum()) > 0


def test_each_of_several_labels_counts() -> None:
    """Against cross-entropy with the largest of several sigmoids, a label that is never the largest weighed little."""
    many = model(Heads(3, end=torch.sigmoid), output=3)
    labels = np.tile([[1, 1, 0], [1, 0, 1]], (48, 1)).astype(np.float32)
    heads: Any = many.module.heads
    with torch.no_grad():
        heads[0].weight.fill_(0.1)
        heads[0].bias.fill_(0.0)
    found = squared_changes(many.module, many.signature, data(labels), 0, lambda *_: None)[heads[0].weight]
    module = Heads(3)
    module.load_state_dict(many.module.state_dict())
    x, want = torch.from_numpy(data().inputs["x"]), torch.from_numpy(labels)
    chosen = np.random.default_rng(0).permutation(96)
    wanted = torch.zeros(3, 6)
    for batch in np.array_split(chosen, 3):
        module.zero_grad()
        rows = torch.from_numpy(np.sort(batch))
        nn.functional.binary_cross_entropy_with_logits(module(x[rows]), want[rows]).backward()  # type: ignore[no-untyped-call]
        weight: Any = module.heads[0].weight
        wanted += (weight.grad * weight.detach()).square()
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-12)


@pytest.mark.parametrize("end", [None, torch.sigmoid, lambda value: torch.softmax(value, -1)])
@pytest.mark.parametrize("labels", [None, CLASSES, np.eye(3, dtype=np.float32)[CLASSES], np.ones((96, 3), np.float32)])
def test_any_labels_give_an_importance(end: Any, labels: Any) -> None:
    one = model(Heads(3, end=end), output=3)
    heads: Any = one.module.heads
    found = squared_changes(one.module, one.signature, data(labels), 0, lambda *_: None)[heads[0].weight]
    assert bool(torch.isfinite(found).all())
    assert float(found.sum()) > 0


def test_epochs_are_judged_by_the_output_of_that_name() -> None:
    """A forward that gives a tuple names none: the first was judged in place of the scores."""
    from lightning_fabric import Fabric

    two = model(Heads(4, 3), boxes=4, scores=3)
    given = data()
    with torch.no_grad():
        labels = two.module(torch.from_numpy(given.inputs["x"]))[1].argmax(1).numpy()
    given = data(labels)
    forms, at = forms_of(two, labels)
    judge = Judge(given, two.signature, Fabric(accelerator="cpu", devices=1), forms[at], taught=False, at=at)
    assert judge(two.module, None) == pytest.approx(1.0)


FEATURES = {"output_0": 8, "output_1": 3}


def test_features_beside_the_logits_are_not_taught_the_classes() -> None:
    """A forward that gives (features, logits) names none: the first was trained as if it had 8 classes."""
    given = data()
    given = data(given.inputs["x"][:, :3].argmax(1))
    assert labelled_output(model(Heads(8, 3), **FEATURES).signature, given.labels) == 1
    student, told = trained(given, given, **FEATURES)
    with torch.no_grad():
        _, logits = student.module(torch.from_numpy(given.inputs["x"]))
    assert float((logits.argmax(1).numpy() == given.labels).mean()) > 0.8
    assert told.figures["best_value"] > 0.8, "epochs are judged by what is taught"


@pytest.mark.parametrize(("named", "at"), [(None, None), ("output_0", 0), ("output_1", 1), ("boxes", None)])
def test_labels_that_fit_several_outputs_teach_the_one_that_is_named(named: str | None, at: int | None) -> None:
    two = model(Heads(8, 5, 4), output_0=8, output_1=5, boxes=4)
    stage = Finetune(data(CLASSES), two, TrainingOptions(), labelled=named)
    if at is None:
        with pytest.raises(RecipeError, match="can't tell which output the labels teach"):
            stage.check(two)
        return
    stage.check(two)
    forms, found = forms_of(two, CLASSES, named)
    assert (found, forms[at].kind) == (at, OutputKind.SOFTMAX)
    assert stage.options["labelled"] == named


def test_taylor_feels_the_labels_of_the_output_that_is_named() -> None:
    two = model(Heads(3, 3), output_0=3, output_1=3)
    heads: Any = two.module.heads
    felt = [
        squared_changes(two.module, two.signature, data(CLASSES), 0, lambda *_: None, named)[heads[1].weight]
        for named in (None, "output_1")
    ]
    assert not torch.equal(*felt)


@pytest.mark.parametrize(
    ("metric", "judge", "named"),
    [
        (None, "output_1", "output_1"),
        ("top1", "output_1", "output_1"),
        ("cosine", "output_1", None),
        (None, None, None),
    ],
)
def test_what_is_judged_by_labels_is_what_they_teach(metric: str | None, judge: str | None, named: str | None) -> None:
    options = ExportOptions(output=Path("out"), finetune="train.npz", metric=metric, judge=judge)
    assert labelled_of(options) == named


def mixtures(k: int = 3) -> tuple[Dataset, np.ndarray[Any, Any]]:
    """Rows that sum to 1, each a smooth function of the inputs."""
    given = data()
    powers = np.exp(given.inputs["x"][:, :k])
    shares = (powers / powers.sum(1, keepdims=True)).astype(np.float32)
    return data(shares), shares


def fitted(given: Dataset, loss: Any) -> Any:
    network = Heads(3)
    optimizer = torch.optim.Adam(network.parameters(), 0.05)
    x, y = torch.from_numpy(given.inputs["x"]), torch.from_numpy(np.asarray(given.labels))
    for _ in range(200):
        optimizer.zero_grad()
        loss(network(x), y).backward()
        optimizer.step()
    return network.eval()


@pytest.mark.parametrize(
    ("loss", "kind", "metric"),
    [(nn.functional.mse_loss, "regression", "r2"), (nn.functional.cross_entropy, "softmax", "agreement")],
)
def test_rows_that_sum_to_1_are_what_the_model_was_trained_to_give(loss: Any, kind: str, metric: str) -> None:
    given, _ = mixtures()
    network = model(fitted(given, loss), output=3)
    assert forms_by(network, given)[0][0].kind == kind
    _, found, notes = judged(given, None, None, network)
    assert found.name == metric
    assert any("not looked at" in said and not isinstance(said, Note) for said in notes) is (kind == "softmax")
    options = TrainingOptions(epochs=2, learning_rate=0.01, train_precision="32", compile="off")
    told = Finetune(given, None, options).fit(network.module, network.signature, lambda *_: None)
    assert told.figures["outputs"]["output"]["taken_as"] == kind
    assert any("--loss regression" in said for said in told.warnings) is (kind == "softmax")
    assert judged(given, "r2", None, network)[1].name == "r2", "whoever asks for it is given it"


def test_shares_that_a_softmax_gives_are_classes() -> None:
    given, shares = mixtures()
    network = model(nn.Sequential(fitted(given, nn.functional.cross_entropy), nn.Softmax(1)), output=3)
    form = forms_by(network, given)[0][0]
    assert (form.kind, form.ending) == (OutputKind.SOFTMAX, "softmax")
    assert not hits(form, shares, shares)


class Flagged(nn.Module):
    """Amounts, which of them are above 0, and how many."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.layer(x)
        return {"y": y, "flags": y > 0, "count": (y > 0).sum(1)}


def test_flags_and_counts_are_not_among_what_is_taught() -> None:
    given = Dataset("", {"x": np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)}, None, "data")
    network = Flagged().eval()
    signature = infer_signature(network, (TensorSpec.parse("x:float32[batch,8]"),))
    options = TrainingOptions(epochs=1, train_precision="32", compile="off")
    told = Finetune(given, TorchModel(copy.deepcopy(network), signature), options).fit(
        network, signature, lambda *_: None
    )
    assert [*told.figures["outputs"]] == ["y"]
