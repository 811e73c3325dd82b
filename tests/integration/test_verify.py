"""`serve verify`: the accuracy through gateway, hooks and Triton against the artifact's own."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from onnx import helper

from compress.artifact import Artifact, Measured, StageReport
from compress.errors import ArtifactError, RepositoryError, ServerError
from compress.processor import Processor
from serve.cli.main import main
from serve.gateway.settings import Settings
from serve.load.options import LoadOptions
from serve.load.run import run_load
from serve.pack.write import PackOptions, pack
from serve.triton.launch import Ports, TritonServer
from serve.verify.run import verify
from serve.verify.samples import samples_of
from tests.integration.test_up import up
from tests.serve_http import gateway_thread
from tests.serve_models import WEIGHT, artifact_of, hook_file, lookup_artifact, tiny_artifact

pytestmark = pytest.mark.integration
COUNT = 60


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, TritonServer]]:
    """Three models of one network, with and without hooks, "off" with other weights, and their evaluation data; 90% of
    the labels are right.
    """
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
    off = artifact_of(
        folder / "off", [helper.make_node("MatMul", ["x", "weight"], ["logits"])], ["x:float32[batch,4]"],
        ["logits:float32[batch,3]"], {"weight": WEIGHT[:, [0, 2, 1]]},
    )  # fmt: skip
    dataclasses.replace(Artifact.load(off), stages=(stage,)).save()
    pack(off, repository=folder / "models", name="off", options=options)
    with TritonServer(folder / "models", ports=Ports(0, 0, 0)) as server:
        yield folder, server


@pytest.fixture(scope="module")
def site(triton: tuple[Path, TritonServer]) -> Iterator[tuple[Path, str]]:
    folder, server = triton
    with up(folder, "--triton", f"http://{server.http_address}", "--port", "0") as running:
        yield folder, running.url()


@pytest.fixture
def released(triton: tuple[Path, TritonServer], tmp_path: Path) -> Iterator[tuple[Path, str, Path]]:
    """The same models behind a gateway with a state file of its own."""
    folder, server = triton
    state = tmp_path / "rollouts.db"
    with gateway_thread(Settings(upstream=(f"http://{server.http_address}",), port=0, state=state)) as url:
        yield folder, url, state


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
    (found,) = verify(url, model, folder / data, artifact=folder / "tiny").parts
    assert (found.by, found.count, found.right, found.expected) == ("", COUNT, 54, 0.9)
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


@pytest.mark.parametrize(
    ("every", "tolerance", "code", "word"),
    [
        (5, ("--tolerance", "0"), 1, "not the same"),
        (5, ("--tolerance", "0.2"), 0, "the same, within 20.00%"),
        (5, (), 1, "not the same: chance does not explain it (95% interval of the difference"),
        (20, (), 0, "within noise: chance explains it (95% interval of the difference"),
        (20, ("--tolerance", "0"), 1, "not the same"),
        (1000, (), 0, "; the same\n"),
    ],
)
def test_exit_code_1_is_for_what_chance_does_not_explain(
    site: tuple[Path, str], tmp_path: Path, every: int, tolerance: tuple[str, ...], code: int, word: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    folder, url = site
    with np.load(folder / "plain.npz") as data:
        shifted = np.where((np.arange(COUNT) + 3) % every == 0, 7, data["label"])
        np.savez(tmp_path / "shifted.npz", x=data["x"], label=shifted)
        right = int((shifted == np.where(np.arange(COUNT) % 10 == 0, -1, data["label"])).sum())
    words = ["--eval", str(tmp_path / "shifted.npz"), "--artifact", str(folder / "tiny"), *tolerance]
    with pytest.raises(SystemExit) as ended:
        main(["verify", "plain", *words, "--url", url])
    assert (ended.value.code or 0) == code
    told = capsys.readouterr().out
    assert f"plain through the server: {right / COUNT:.2%} of {COUNT} samples" in told
    assert word in told
    assert ("the answer was" in told) == bool(code)


def start(state: Path, candidate: str, *words: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["rollout", "start", "plain", "--candidate", candidate, "--state", str(state), "--step-s", "3600", *words])
    assert not ended.value.code


def test_under_a_release_each_that_answers_is_measured_by_itself(
    released: tuple[Path, str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, url, state = released
    start(state, "off", "--shadow", "0", "--steps", "50")
    found = verify(url, "plain", folder / "plain.npz", artifact=folder / "tiny", tolerance=0.5)
    parts = {part.by: part for part in found.parts}
    assert set(parts) == {"plain/1", "off/1"}
    assert sum(part.count for part in found.parts) == found.count == COUNT
    assert (parts["plain/1"].proven, parts["plain/1"].expected) == (True, 0.9)
    assert (parts["off/1"].proven, parts["off/1"].expected) == (False, None), "it is not held against another's file"
    assert parts["plain/1"].count - parts["plain/1"].right <= 6
    assert parts["off/1"].accuracy < 0.7
    with pytest.raises(SystemExit) as ended:
        main(["verify", "plain", "--eval", str(folder / "plain.npz"), "--artifact", str(folder / "tiny"),
              "--tolerance", "0.5", "--url", url])  # fmt: skip
    assert not ended.value.code
    told = capsys.readouterr().out
    assert "plain is under release: plain → off, running: 50% of the requests go to the candidate" in told
    assert "plain/1 answered " in told
    assert "it serves another file than the artifact's" in told
    with pytest.raises(ArtifactError, match="can't verify against") as caught:
        verify(url, "plain", folder / "plain.npz", artifact=lookup_artifact(state.parent / "other"))
    assert "plain serves another file: sha256 " in caught.value.why
    assert "off serves another file: sha256 " in caught.value.why


def test_a_candidate_that_answers_nothing_yet_is_not_judged_by_the_baseline(
    released: tuple[Path, str, Path],
) -> None:
    folder, url, state = released
    start(state, "off", "--shadow", "100", "--expect-change")
    with pytest.raises(ArtifactError) as caught:
        verify(url, "plain", folder / "plain.npz", artifact=folder / "off")
    assert f"none of {COUNT} answers came from off" in caught.value.why
    assert "serve verify off" in caught.value.mend
    with pytest.raises(SystemExit) as ended:
        main(["rollout", "promote", "plain", "--state", str(state)])
    assert not ended.value.code
    (found,) = verify(url, "plain", folder / "plain.npz", artifact=folder / "off").parts
    assert (found.by, found.proven, found.expected, found.holds) == ("off/1", True, 0.9, False)


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
        assert verify(url, model, tmp_path / "named.npz").parts[0].right == 54
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
