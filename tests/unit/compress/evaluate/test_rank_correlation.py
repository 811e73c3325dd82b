"""Pairs of texts with scores: Spearman's correlation of the similarities of their embeddings, with an interval."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import compress
from compress.artifact import TensorSpec
from compress.data.dataset import Dataset
from compress.errors import RecipeError
from compress.evaluate.halves import halves
from compress.evaluate.intervals import difference_interval, mean_interval
from compress.evaluate.judge import Judge, spread
from compress.evaluate.metric_choice import find_metric
from compress.evaluate.rank_correlation import rank_scores, similarity_scores
from compress.model import Arrays
from compress.options import ExportOptions
from compress.signature import Signature
from compress.training.finetune import _one_by_one
from tests.hub_models import sentence_folder

VECTORS = Signature((TensorSpec("x", "float32", ("batch", 8)),), (TensorSpec("y", "float32", ("batch", 8)),))
RNG = np.random.default_rng(0)


class Noisy:
    """Gives its inputs with some noise, the same for the same input."""

    runtime, emulated = "numpy", False

    def __init__(self, noise: float) -> None:
        self._noise = noise

    def infer(self, inputs: Arrays) -> Arrays:
        x = inputs["x"]
        return {"y": x + np.float32(self._noise) * np.sin(1000 * x[:, ::-1])}


def scored(pairs: int = 200) -> Dataset:
    """Pairs of vectors, as near to each other as their label says."""
    likeness = RNG.random(pairs)
    first = RNG.standard_normal((pairs, 8))
    second = likeness[:, None] * first + (1 - likeness[:, None]) * RNG.standard_normal((pairs, 8))
    x = np.stack([first, second], axis=1).reshape(-1, 8).astype(np.float32)
    labels = np.repeat(np.round(5 * likeness, 1), 2).astype(np.float32)
    return Dataset("", {"x": x}, labels, "0" * 64, pairs=True)


@pytest.mark.parametrize("ties", [False, True])
def test_the_mean_of_the_scores_is_spearmans_correlation(ties: bool) -> None:
    stats = pytest.importorskip("scipy.stats")
    x = RNG.integers(0, 6, 90).astype(float) if ties else RNG.standard_normal(90)
    y = x + (RNG.integers(0, 4, 90) if ties else RNG.standard_normal(90))
    assert rank_scores(x, y).mean() == pytest.approx(stats.spearmanr(x, y).statistic, abs=1e-12)
    assert rank_scores(x, x).tolist() == pytest.approx([1.0] * 90), "no pair has more influence than another"
    assert not rank_scores(x, np.ones(90)).any()


def test_cosines_that_differ_by_rounding_alone_are_ties() -> None:
    """Of equal texts, and of pairs that come again: their order would be another in each runtime."""
    first, second = RNG.standard_normal((2, 60, 8))
    second[:20] = first[:20]
    second[40:], first[40:] = second[20:40], first[20:40]
    labels = np.repeat(RNG.random(60), 2)
    vectors = np.stack([first, second], axis=1).reshape(-1, 8)
    noisy = vectors * (1 + 1e-8 * RNG.standard_normal(vectors.shape))
    scores = [similarity_scores("y")({"y": each}, labels) for each in (vectors, noisy)]
    assert scores[0].tolist() == scores[1].tolist()


def test_intervals_of_the_correlation_and_of_a_difference_hold_it_as_often_as_they_say() -> None:
    def drawn(count: int) -> tuple[Any, Any, Any]:
        labels, noise, more = RNG.standard_normal((3, count))
        return labels, 0.8 * labels + 0.6 * noise, 0.8 * labels + 0.6 * noise + 0.3 * more

    labels, before, after = drawn(300_000)
    true = rank_scores(before, labels).mean(), rank_scores(after, labels).mean()
    own = apart = 0
    for _ in range(200):
        labels, before, after = drawn(100)
        first, second = rank_scores(before, labels), rank_scores(after, labels)
        found, lost = mean_interval(first, bounds=(-1, 1)), difference_interval(second, first, bounds=(-1, 1))
        own += found.low <= true[0] <= found.high
        apart += lost.low <= true[1] - true[0] <= lost.high
    assert own >= 180, "90% of 200, at 95% confidence"
    assert apart >= 180


def test_pairs_with_scores_are_judged_by_spearman() -> None:
    data = scored()
    metric = find_metric(None, data, VECTORS)
    assert (metric.name, metric.output) == ("spearman", "y")
    judge = Judge(Noisy(0.0), data, metric)
    assert not judge.doubts
    assert judge.original > 0.8
    drop = judge.drop(Noisy(0.7))
    assert drop.low is not None
    assert drop.high is not None
    assert 0 < drop.low < drop.points < drop.high < 30
    assert len(drop.scores) == 200
    shuffled = Dataset("", data.inputs, np.repeat(RNG.permutation(data.labels[::2]), 2), "0" * 64, pairs=True)  # type: ignore[index]
    assert "nothing to do with the scores" in Judge(Noisy(0.0), shuffled, metric).doubts[0]


def test_no_pair_is_parted() -> None:
    data = scored()
    for part in (*halves(data), spread(data, 31)):
        assert part.pairs
        x, labels = part.take(slice(0, len(part)))
        places = [np.flatnonzero((data.inputs["x"] == row).all(axis=1))[0] for row in x["x"]]
        assert all(second == first + 1 for first, second in zip(places[::2], places[1::2], strict=True))
        assert labels is not None
        assert (labels[::2] == labels[1::2]).all()
    assert not data.part(np.arange(7)).pairs


def test_spearman_of_what_has_no_pairs_is_refused_with_the_columns_to_name() -> None:
    data = Dataset("", {"x": np.ones((4, 8), np.float32)}, None, "0" * 64)
    with pytest.raises(RecipeError, match="no pairs of texts") as refused:
        find_metric("spearman", data, VECTORS)
    assert "--text-pair-column" in refused.value.mend


def written(path: Path, *, scores: bool) -> Path:
    """Pairs of texts of the test's 56 words that share as many as their score says."""
    lines = []
    for _ in range(120):
        shared = int(RNG.integers(0, 7))
        words = RNG.permutation(56)[:14].tolist()
        first, second = words[:6], words[6 - shared : 12 - shared]
        texts = {f"s{at}": " ".join(f"word{word}" for word in each) for at, each in enumerate((first, second))}
        lines.append(json.dumps(texts | ({"score": shared / 6} if scores else {})))
    path.write_text("\n".join(lines))
    return path


@pytest.mark.parametrize("scores", [True, False])
def test_a_sentence_encoder_embeds_each_text_of_a_pair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scores: bool
) -> None:
    monkeypatch.setenv("COMPRESS_MEASURE_SECONDS", "0")
    folder, data = sentence_folder(tmp_path / "encoder"), written(tmp_path / "sts.jsonl", scores=scores)
    label = "score" if scores else None
    asked = ExportOptions(
        output=tmp_path / "out", eval=str(data), int8="dynamic", text_column="s0", text_pair_column="s1",
        label_column=label,
    )  # fmt: skip
    artifact, _ = compress.export(folder, asked)
    assert [spec.name for spec in artifact.signature.inputs] == ["input_ids", "attention_mask"]
    assert artifact.processor is not None
    assert "pair" not in artifact.processor.to_dict()
    before, after = (artifact.stages[at].measured for at in (0, -1))
    assert before is not None
    assert after is not None
    assert before.metric == after.metric == ("spearman" if scores else "cosine")
    assert after.drop_low is not None
    assert after.drop_high is not None
    assert after.value_low is not None
    if scores:
        assert before.value is not None
        assert before.value > 0.8, "what shares more words is more alike, by any embedding of words"


def test_a_training_has_each_text_by_itself() -> None:
    data = scored(10)
    alone = _one_by_one(data)
    assert (len(alone), alone.labels, alone.pairs) == (20, None, False)
    assert alone.sha256 == data.sha256
