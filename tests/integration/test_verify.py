"""`serve verify`: the accuracy through gateway, hooks and Triton against the artifact's own."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from compress.artifact import Artifact, Measured, StageReport
from compress.errors import ArtifactError, RepositoryError, ServerError
from compress.processor import Processor
from serve.cli.main import main
from serve.load.options import LoadOptions
from serve.load.run import run_load
from serve.pack.write import PackOptions, pack
from serve.triton.launch import Ports, TritonServer
from serve.verify.run import verify
from serve.verify.samples import samples_of
from tests.integration.test_up import up
from tests.serve_models import WEIGHT, hook_file, lookup_artifact, tiny_artifact

pytestmark = pytest.mark.integration
COUNT = 60


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """Two models of one network, with and without hooks, and their evaluation data; 90% of the labels are right."""
    folder = tmp_path_factory.mktemp("verify")
    artifact = Artifact.load(tiny_artifact(folder / "tiny"))
    x = np.random.default_rng(0).integers(0, 9, (COUNT, 4)).astype(np.float32)
    best = (x @ WEIGHT).argmax(1)
    labels = np.where(np.arange(COUNT) % 10 == 0, (best + 1) % 3, best)
    stage = StageReport(
        "quantize_onnx", "INT8", seconds=1.0, measured=Measured(accuracy=float((labels == best).mean()))
    )
    processor = Processor("text", "sequence-classification", {}, ("a", "b", "c"), None, folder / "tiny" / "processor")
    dataclasses.replace(artifact, stages=(stage,), processor=processor).save()
    np.savez(folder / "plain.npz", x=x, label=labels)
    texts = np.array([",".join(f"{number:g}" for number in row) for row in x])
    np.savez(folder / "hooked.npz", text=texts, y=np.array(list("abc"))[labels])
    words = ["abc"[label] for label in labels]
    told = [{"text": str(text), "label": word, "from": 1} for text, word in zip(texts, words, strict=True)]
    (folder / "texts.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in told))
    lines = [f'"{text}",{label}\n' for text, label in zip(texts, labels, strict=True)]
    (folder / "numbers.csv").write_text("".join(["text,label\n", *lines]))
    rows = [{"x": row.tolist(), "label": word} for row, word in zip(x, words, strict=True)]
    (folder / "named.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    for number, (text, label) in enumerate(zip(texts, labels, strict=True)):
        path = folder / "files" / "abc"[label] / f"{number}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(text))
    options = PackOptions(instances=1)
    pack(folder / "tiny", repository=folder / "models", name="plain", options=options)
    pack(folder / "tiny", repository=folder / "models", name="hooked", hooks=hook_file(folder / "h"), options=options)
    piped = PackOptions(instances=1, pipeline="bls")
    pack(folder / "tiny", repository=folder / "models", name="piped", hooks=hook_file(folder / "h"), options=piped)
    with ExitStack() as stack:
        triton = stack.enter_context(TritonServer(folder / "models", ports=Ports(0, 0, 0)))
        running = stack.enter_context(up(folder, "--triton", f"http://{triton.http_address}", "--port", "0"))
        yield folder, running.url()


@pytest.mark.parametrize(
    ("model", "data"),
    [
        ("plain", "plain.npz"),
        ("hooked", "hooked.npz"),
        ("hooked", "files"),
        ("hooked", "texts.jsonl"),
        ("hooked", "numbers.csv"),
        ("plain", "named.jsonl"),
    ],
)
def test_the_accuracy_through_the_server_is_the_artifacts(site: tuple[Path, str], model: str, data: str) -> None:
    folder, url = site
    found = verify(url, model, folder / data, artifact=folder / "tiny")
    assert (found.count, found.right, found.expected) == (COUNT, 54, 0.9)
    assert found.holds
    assert found.proven
    assert len(found.wrong) == 5


@pytest.mark.parametrize("model", ["plain", "hooked", "piped"])
def test_another_artifact_than_is_served_is_told_before_any_accuracy(
    site: tuple[Path, str], tmp_path: Path, model: str
) -> None:
    folder, url = site
    with pytest.raises(ArtifactError, match="can't verify against") as caught:
        verify(url, model, folder / "plain.npz", artifact=lookup_artifact(tmp_path / "other"))
    assert f"{model} serves another file: sha256 " in caught.value.why


def test_an_artifact_that_was_judged_otherwise_is_not_told_to_be_judged(site: tuple[Path, str], tmp_path: Path) -> None:
    folder, url = site
    artifact = Artifact.load(tiny_artifact(tmp_path / "tiny"))
    for measured, why, mend in (
        (Measured(metric="cosine", value=0.9), "it was judged by cosine", "leave --artifact out"),
        (Measured(), "nothing was measured on data", "export it again with --eval"),
    ):
        rows = (StageReport("original", "", Measured(accuracy=0.9), 0.0), StageReport("fold_onnx", "", measured, 0.0))
        dataclasses.replace(artifact, stages=rows).save()
        with pytest.raises(ArtifactError) as caught:
            verify(url, "plain", folder / "plain.npz", artifact=tmp_path / "tiny")
        assert why in caught.value.why
        assert mend in caught.value.mend


@pytest.mark.parametrize(("tolerance", "code"), [("0", 1), ("0.2", 0)])
def test_another_accuracy_ends_with_exit_code_1(
    site: tuple[Path, str], tmp_path: Path, tolerance: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, url = site
    with np.load(folder / "plain.npz") as data:
        np.savez(tmp_path / "shifted.npz", x=data["x"], label=np.where(np.arange(COUNT) % 5 == 0, 7, data["label"]))
    words = ["--eval", str(tmp_path / "shifted.npz"), "--artifact", str(folder / "tiny"), "--tolerance", tolerance]
    with pytest.raises(SystemExit) as ended:
        main(["verify", "plain", *words, "--url", url])
    assert (ended.value.code or 0) == code
    told = capsys.readouterr().out
    assert f"plain through the server: 80.00% of {COUNT} samples" in told
    assert ("the answer was" in told) == bool(code)


def test_without_an_artifact_the_accuracy_is_told(site: tuple[Path, str], capsys: pytest.CaptureFixture[str]) -> None:
    folder, url = site
    with pytest.raises(SystemExit) as ended:
        main(["verify", "hooked", "--eval", str(folder / "hooked.npz"), "--output", "label", "--url", url])
    assert ended.value.code in (0, None)
    assert "90.00%" in capsys.readouterr().out


def test_what_can_t_be_verified_is_told(site: tuple[Path, str], tmp_path: Path) -> None:
    folder, url = site
    with pytest.raises(ServerError, match="no output 'nothing'"):
        verify(url, "plain", folder / "plain.npz", output="nothing")
    with pytest.raises(ServerError):
        verify(url, "plain", folder / "hooked.npz")
    with pytest.raises(ArtifactError, match="can't verify against"):
        verify(url, "plain", folder / "plain.npz", artifact=tiny_artifact(tmp_path / "unmeasured"))


@pytest.mark.parametrize(
    ("arrays", "why"),
    [
        ({"x": np.zeros(3)}, "none of its arrays x is called label or y"),
        ({"x": np.zeros(3), "y": np.zeros(2)}, "another number of rows"),
        ({"y": np.zeros(2)}, "labels only"),
        ({"x": np.zeros(0), "y": np.zeros(0)}, "no sample"),
    ],
)
def test_data_that_can_t_be_used_is_refused(tmp_path: Path, arrays: dict[str, np.ndarray], why: str) -> None:
    np.savez(tmp_path / "data.npz", **arrays)  # type: ignore[arg-type]
    with pytest.raises(RepositoryError) as caught:
        list(samples_of(tmp_path / "data.npz"))
    assert why in caught.value.why


def test_a_table_names_files_and_labels(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"1")
    (tmp_path / "labels.csv").write_text("file,label\na.bin,cat\n")
    (sample,) = samples_of(tmp_path)
    assert (sample.content, sample.label) == (b"1", "cat")
    (tmp_path / "labels.csv").write_text("file,label\nmissing.bin,cat\n")
    with pytest.raises(RepositoryError, match=r"missing\.bin"):
        list(samples_of(tmp_path))


def test_the_one_array_of_a_model_with_one_input_may_have_any_name(site: tuple[Path, str], tmp_path: Path) -> None:
    """Hooks name the input as they like; the evaluation data names it as the network does."""
    folder, url = site
    for model, name in (("plain", "row"), ("hooked", "words")):
        with np.load(folder / f"{model}.npz") as data:
            old, label = data.files
            np.savez(tmp_path / "named.npz", **{name: data[old], label: data[label]})
        assert verify(url, model, tmp_path / "named.npz").right == 54
        loaded = run_load(LoadOptions(model, url, data=tmp_path / "named.npz", max_requests=COUNT, warmup=0))
        assert (loaded.errors, loaded.accuracy) == ({}, 0.9)


def test_several_files_are_asked_one_after_the_other(
    site: tuple[Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, url = site
    files = [str(path) for path in sorted((folder / "files").glob("*/*.txt"))[:3]]
    with pytest.raises(SystemExit) as ended:
        main(["infer", *files, "--model", "hooked", "--url", url])
    assert not ended.value.code
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [answer["file"] for answer in answers] == files
    assert all(answer["outputs"].keys() == {"label", "score"} for answer in answers)
