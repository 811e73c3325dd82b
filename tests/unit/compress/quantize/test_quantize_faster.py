"""INT8 that pays, or none: mixtures are chosen by what they measure, and doubt leaves the simplest."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper
from torch import nn

from compress.evaluate.metrics import METRICS
from compress.model import OnnxModel
from compress.quantize import faster, quantize_faster
from compress.quantize.faster import Back, DynamicMixture, fastest
from compress.quantize.int8_onnx import finish, plain
from compress.quantize.quantize_faster import QuantizeFaster
from compress.quantize.quantize_onnx import QuantizeOnnx, quantize
from compress.quantize.quantize_within import QuantizeWithin
from compress.quantize.tied_tables import ties
from compress.runtime.backends import OnnxBackend
from compress.runtime.latency import Latency, Ratio
from compress.runtime.measure import onnx_layer_bytes
from tests.families import family
from tests.unit.compress.onnx_export.test_shared_weights import recurrent
from tests.unit.compress.prune.test_prune_channels import quiet, wrapped
from tests.unit.compress.quantize.test_half_onnx import exported, random_data

PAIRS = 12  # of a pointwise and a depthwise convolution, in a chain
CHAIN = [f"{kind}{number}" for number in range(PAIRS) for kind in ("point", "depth")]
BORDER_MS = 0.02


class Chain:
    """A mixture whose nodes cost what a table says, and each border between float and INT8 as much again."""

    def __init__(self, int8_ms: Mapping[str, float], noise: float = 0.0) -> None:
        nodes, weights = [], []
        for number, name in enumerate(CHAIN):
            depthwise = name.startswith("depth")
            shape = [8, 1, 3, 3] if depthwise else [8, 8, 1, 1]
            weights.append(helper.make_tensor(f"w{number}", TensorProto.FLOAT, shape, np.zeros(shape).ravel()))
            nodes.append(
                helper.make_node(
                    "Conv", [f"t{number}", f"w{number}"], [f"t{number + 1}"], name=name, group=8 if depthwise else 1
                )
            )
        self.graph = helper.make_model(helper.make_graph(nodes, "chain", [], [], weights))
        self.units, self._int8_ms, self._noise, self._random = CHAIN, int8_ms, noise, random.Random(7)
        self.measured = 0

    def model(self, back: Collection[str]) -> ModelProto:
        raise AssertionError(f"the table says what {back} costs")

    def cost(self, back: Back) -> float:
        inside = [name not in back for name in CHAIN]
        borders = sum(one != other for one, other in zip([False, *inside], [*inside, False], strict=True))
        nodes = sum(self._int8_ms[name] if eight else 1.0 for name, eight in zip(CHAIN, inside, strict=True))
        return nodes + borders * BORDER_MS

    def measure(self, backs: Sequence[Back]) -> dict[Back, Latency]:
        self.measured += len(backs)
        found = {}
        for back in backs:
            rounds = tuple(self.cost(back) * (1 + self._noise * self._random.uniform(-1, 1)) for _ in range(11))
            found[back] = Latency(sorted(rounds)[5], max(rounds), rounds, rounds)
        return found


def table(point: float, depth: float, **others: float) -> dict[str, float]:
    return {name: others.get(name, point if name.startswith("point") else depth) for name in CHAIN}


KIND = frozenset(name for name in CHAIN if name.startswith("depth"))
FRONT = frozenset(CHAIN[: len(CHAIN) // 4])


@pytest.mark.parametrize(
    ("int8_ms", "back"),
    [
        (table(0.4, 0.5), frozenset()),  # all of it gains
        (table(1.3, 1.2), frozenset(CHAIN)),  # nothing does
        (table(0.2, 1.5), KIND),  # a kind loses, for more than its borders cost
        (table(0.6, 1.01), frozenset()),  # a kind loses, for less than that
        (table(1.5, 0.2), frozenset(CHAIN) - KIND),
        (table(0.5, 0.5) | dict.fromkeys(FRONT, 3.0), FRONT),  # a part of the network loses
    ],
)
@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_what_is_slower_in_int8_stays_in_float(int8_ms: dict[str, float], back: Back, noise: float) -> None:
    chain = Chain(int8_ms, noise)
    choice = fastest(chain, chain.graph, chain.measure, 8, quiet)
    assert choice.back == back
    assert chain.measured <= 60


@pytest.mark.parametrize("together", [1, 3, 8])
def test_how_many_are_open_at_once_changes_nothing(together: int) -> None:
    chain = Chain(table(0.2, 1.5))
    assert fastest(chain, chain.graph, chain.measure, together, quiet).back == KIND


def test_noise_alone_leaves_all_in_float() -> None:
    for seed in range(20):
        chain = Chain(table(1.0, 1.0), noise=0.3)
        chain._random.seed(seed)
        assert fastest(chain, chain.graph, chain.measure, 8, quiet).back == frozenset(CHAIN)


def test_doubt_alone_is_looked_at_longer() -> None:
    chain = Chain(table(0.85, 0.85), noise=0.2)
    found = [fastest(chain, chain.graph, chain.measure, 8, quiet).back for _ in range(20)]
    assert found.count(frozenset(CHAIN)) <= 2


def test_how_all_of_it_in_int8_compares_is_told() -> None:
    chain = Chain(table(0.2, 1.5))
    choice = fastest(chain, chain.graph, chain.measure, 8, quiet)
    assert choice.whole is not None
    assert choice.whole.value == pytest.approx(len(CHAIN) / chain.cost(frozenset()))
    assert choice.tried >= 5


@pytest.mark.parametrize(("name", "mode"), [("residual", "static"), ("inverted", "static"), ("bert", "dynamic")])
def test_the_result_runs_and_is_what_it_says(name: str, mode: str, tmp_path: Path) -> None:
    stage, model = stage_for(name, mode, tmp_path)
    (tmp_path / "out").mkdir()
    given = stage.run(model, tmp_path / "out", quiet)
    assert isinstance(given.model, OnnxModel)
    OnnxBackend(given.model, 1).infer(random_data(model, 3).inputs)
    left = set(given.details["left_in_float"])
    layers = given.details["layers"]
    if given.did.startswith("nothing"):
        assert layers["int8"] == 0
        assert np.array_equal(answers(given.model, model), answers(model, model))
    else:
        assert layers["int8"] > 0
        assert given.details["times_as_fast"] > 1
        assert {each for each, why in given.details["layers_float"].items() if "on purpose" in why} <= left


def stage_for(name: str, mode: str, folder: Path) -> tuple[QuantizeFaster, OnnxModel]:
    module, inputs = family(name)
    model = exported(module, inputs, folder)
    if mode == "dynamic":
        return QuantizeFaster(QuantizeOnnx("dynamic")), model
    return QuantizeFaster(QuantizeOnnx("static", random_data(model, 16))), model


def answers(model: OnnxModel, of: OnnxModel) -> np.ndarray:
    return np.concatenate([each.ravel() for each in OnnxBackend(model, 1).infer(random_data(of, 3).inputs).values()])


GAINS, LOSES = Ratio(2.0, 1.9, 2.1), Ratio(0.9, 0.8, 1.02)


@pytest.fixture
def all_faster(monkeypatch: pytest.MonkeyPatch) -> Callable[[Ratio], None]:
    """Say that each mixture is the faster the more of it is in INT8, and what the last comparison finds."""

    def say(last: Ratio) -> None:
        def turned(mixture: faster.Mixture, *_: object) -> tuple[faster.Measure, int]:
            def measure(backs: Sequence[Back]) -> Mapping[Back, Latency]:
                cost = {back: 1.0 + len(back) for back in backs}
                return {back: Latency(ms, ms, (), 9 * (ms,)) for back, ms in cost.items()}

            return measure, 8

        for module in (quantize_faster, __import__("compress.quantize.quantize_within", fromlist=["_"])):
            monkeypatch.setattr(module, "turns", turned)
            monkeypatch.setattr(module, "times_as_fast", lambda *_: last)

    return say


def test_where_all_of_it_gains_the_file_is_the_quantizers(all_faster: Callable[[Ratio], None], tmp_path: Path) -> None:
    all_faster(GAINS)
    stage, model = stage_for("bert", "dynamic", tmp_path)
    (tmp_path / "out").mkdir()
    given = stage.run(model, tmp_path / "out", quiet)
    quantize(stage.quantize, model.path, tmp_path / "alone.onnx", None)
    assert (tmp_path / "out/model.onnx").read_bytes() == (tmp_path / "alone.onnx").read_bytes()
    assert given.did.endswith("; 2.00 times (1.90 to 2.10) as fast as in float")


def test_a_gain_that_does_not_last_is_none(all_faster: Callable[[Ratio], None], tmp_path: Path) -> None:
    all_faster(LOSES)
    stage, model = stage_for("residual", "static", tmp_path)
    (tmp_path / "out").mkdir()
    given = stage.run(model, tmp_path / "out", quiet)
    assert given.did.startswith("nothing: INT8 gains no time here")
    assert "the best: 0.90 times (0.80 to 1.02) as fast" in given.did
    assert "QuantizeLinear" not in {node.op_type for node in onnx.load(tmp_path / "out/model.onnx").graph.node}


def test_a_recurrent_network_that_gains_nothing_statically_is_tried_dynamically(
    all_faster: Callable[[Ratio], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    all_faster(GAINS)
    found = iter([LOSES, GAINS])
    monkeypatch.setattr(quantize_faster, "times_as_fast", lambda *_: next(found))
    model = recurrent(tmp_path, nn.LSTM, both_ways=True)
    (tmp_path / "out").mkdir()
    given = QuantizeFaster(QuantizeOnnx("static", random_data(model, 16))).run(model, tmp_path / "out", quiet)
    assert isinstance(given.model, OnnxModel)
    assert "ranges at run time" in given.did
    kinds = {node.op_type for node in onnx.load(given.model.path).graph.node}
    assert "DynamicQuantizeLSTM" in kinds
    before, after = onnx_layer_bytes(model.path), onnx_layer_bytes(given.model.path)
    recurrent_bytes = 4 * 2 * 4 * 160 * (40 + 160)  # directions, gates, hidden units, what they read
    assert max(before.values()) == recurrent_bytes
    assert max(after.values()) == recurrent_bytes // 4


@pytest.mark.parametrize(("last", "eight"), [(GAINS, True), (LOSES, False)])
def test_a_largest_drop_is_kept_by_what_is_fast(
    all_faster: Callable[[Ratio], None], last: Ratio, eight: bool, tmp_path: Path
) -> None:
    all_faster(last)
    module, inputs = family("residual")
    model = exported(module, inputs, tmp_path)
    data = random_data(model, 64)
    stage = QuantizeWithin(
        QuantizeOnnx("static", random_data(model, 16)), wrapped(module, *inputs), data, METRICS["cosine"], 90.0, None, 1
    )
    (tmp_path / "out").mkdir()
    given = stage.run(model, tmp_path / "out", quiet)
    kinds = {node.op_type for node in onnx.load(tmp_path / "out/model.onnx").graph.node}
    assert ("QuantizeLinear" in kinds) is eight
    assert ("2.00 times as fast as in float" in given.did) is eight


def test_a_dynamic_mixture_has_in_float_what_is_put_back(tmp_path: Path) -> None:
    module, inputs = family("bert")
    model = exported(module, inputs, tmp_path)
    original = plain(model.path)
    mixture = DynamicMixture(QuantizeOnnx("dynamic"), original)
    whole = answers(model, model)
    finish(mixture.model(mixture.units), tmp_path / "mixed.onnx", ties(original))
    assert np.allclose(answers(OnnxModel(tmp_path / "mixed.onnx", model.signature), model), whole, atol=1e-6)
    kinds = {node.name: node.op_type for node in original.graph.node}
    assert {kinds[unit] for unit in mixture.units} <= {"MatMul", "Gemm", "Gather", "Conv"}
    finish(mixture.model(mixture.units[:1]), tmp_path / "mixed.onnx", ties(original))
    nodes = onnx.load(tmp_path / "mixed.onnx").graph.node
    floats = {node.name for node in original.graph.node} & {node.name for node in nodes}
    assert {name for name in mixture.units if name in floats} == {mixture.units[0]}
