"""Model files from elsewhere: TorchScript served by the embedded Triton, plans and packages packed for another."""

from __future__ import annotations

import warnings
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn

from compress.artifact import Signature, TensorSpec
from compress.errors import RepositoryError, ServerError
from serve.cli.main import main
from serve.config.pbtxt import from_pbtxt
from serve.lint.run import lint
from serve.pack.write import PackOptions, pack
from serve.triton.launch import TritonServer
from tests.integration.test_triton import FREE, infer, refusal
from tests.serve_models import plan_of

pytestmark = pytest.mark.integration


class Two(nn.Module):
    """Sum and difference; a negative first element of `b` fails."""

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if bool((b < 0).any()):
            raise ValueError("negative")
        return a + b, a - b


def signature(inputs: list[str], outputs: list[str]) -> Signature:
    return Signature(tuple(map(TensorSpec.parse, inputs)), tuple(map(TensorSpec.parse, outputs)))


BY_NAME = signature(
    ["b:float32[batch,2]", "a:float32[batch,2]"], ["sum:float32[batch,2]", "difference:float32[batch,2]"]
)
BY_POSITION = signature(
    ["right__1:float32[batch,2]", "left__0:float32[batch,2]"], ["out__1:float32[batch,2]", "out__0:float32[batch,2]"]
)


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("script") / "two.pt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # files made by it are what is served here
        torch.jit.script(Two()).save(str(path))  # type: ignore[no-untyped-call]
    return path


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, scripted: Path) -> Iterator[TritonServer]:
    folder = tmp_path_factory.mktemp("platforms")
    options = PackOptions(instances=1, max_queue_delay_microseconds=200_000)
    for name, given in (("names", BY_NAME), ("positions", BY_POSITION)):
        pack(scripted, repository=folder / "models", name=name, options=options, signature=given)
    with TritonServer(folder / "models", ports=FREE, log=folder / "triton.log") as server:
        yield server


def test_torchscript_is_served_by_the_names_of_its_arguments(server: TritonServer) -> None:
    answer = infer(server, "names", a=("FP32", [1, 2], [5, 6]), b=("FP32", [1, 2], [1, 2]))
    assert answer == {"sum": [6.0, 8.0], "difference": [4.0, 4.0]}


def test_torchscript_is_served_by_positions(server: TritonServer) -> None:
    inputs = {"left__0": ("FP32", [1, 2], [5, 6]), "right__1": ("FP32", [1, 2], [1, 2])}
    assert infer(server, "positions", **inputs) == {"out__0": [6.0, 8.0], "out__1": [4.0, 4.0]}


def test_a_request_that_fails_in_it_fails_alone(server: TritonServer) -> None:
    def ask(number: int) -> float | tuple[int, str]:
        one = {"a": ("FP32", [1, 2], [1.0, 1.0]), "b": ("FP32", [1, 2], [float(number), 0.0])}
        if number < 0:
            return refusal(lambda: infer(server, "names", **one))
        return float(infer(server, "names", **one)["sum"][0])

    with ThreadPoolExecutor(5) as pool:
        *answers, (code, told) = list(pool.map(ask, [0, 1, 2, -1]))  # type: ignore[misc]
    assert answers == [1.0, 2.0, 3.0]
    assert code == 500
    assert "PyTorch" in told


def test_names_that_forward_has_not_are_refused(tmp_path: Path, scripted: Path) -> None:
    wrong = signature(["x:float32[batch,2]", "y:float32[batch,2]"], ["sum:float32[batch,2]", "other:float32[batch,2]"])
    pack(scripted, repository=tmp_path / "models", name="two", signature=wrong)
    with pytest.raises(ServerError) as caught, TritonServer(tmp_path / "models", ports=FREE):
        pass
    assert "names the inputs ['x', 'y'], forward has ['a', 'b']" in caught.value.why


def test_a_plan_is_packed_for_gpus_and_lint_says_that_it_can_t_run_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = tmp_path / "model.engine"
    plan.write_bytes(plan_of(10, 5, 0, 18))
    words = ["--repository", str(tmp_path / "models"), "--name", "net", "--input", "x:float32[batch,3,8,8]"]
    with pytest.raises(SystemExit) as ended:
        main(["pack", str(plan), *words, "--output", "y:float32[batch,5]", "--preferred-batch-size", "8"])
    assert ended.value.code in (0, None)
    assert "net takes x FP32[3, 8, 8]" in capsys.readouterr().out
    config = from_pbtxt((tmp_path / "models/net/config.pbtxt").read_text())
    assert (config.backend, config.instance_group[0].kind) == ("tensorrt", "KIND_GPU")
    assert "intra_op_thread_count" not in config.parameters
    assert [warmup.batch_size for warmup in config.model_warmup] == [1, 32]
    assert (tmp_path / "models/net/1/model.plan").read_bytes() == plan_of(10, 5, 0, 18)
    assert any("no backend 'tensorrt'" in finding.what for finding in lint(tmp_path / "models"))
    assert not [finding for finding in lint(tmp_path / "models", container=True) if finding.severity == "error"]


def test_an_aotinductor_package_is_packed_for_a_newer_triton(tmp_path: Path) -> None:
    package = tmp_path / "net.pt2"
    with zipfile.ZipFile(package, "w") as archive:
        archive.writestr("net/data/aotinductor/model/net.so", b"")
    one = signature(["x:float32[batch,3]"], ["y:float32[batch,5]"])
    pack(package, repository=tmp_path / "models", name="net", signature=one)
    config = from_pbtxt((tmp_path / "models/net/config.pbtxt").read_text())
    assert (config.backend, config.platform) == ("pytorch", "torch_aoti")
    assert (tmp_path / "models/net/1/model.pt2").is_file()
    assert not [finding for finding in lint(tmp_path / "models", container=True) if finding.severity == "error"]


def archive_of(path: Path, *names: str) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, b"")
    return path


ONE = signature(["x:float32[batch,3]"], ["y:float32[batch,5]"])


@pytest.mark.parametrize(
    ("names", "given", "why"),
    [
        (["m/data.pkl", "m/data/0"], ONE, "a checkpoint, which is no program"),
        (["m/models/model.json"], ONE, "an exported program, which no backend of Triton runs"),
        (["m/code/__torch__.py"], None, "does not tell its inputs and outputs"),
    ],
)
def test_what_triton_can_t_run_is_told(tmp_path: Path, names: list[str], given: Signature | None, why: str) -> None:
    path = archive_of(tmp_path / "model.pt", *names)
    with pytest.raises(RepositoryError, match=r"can't serve") as caught:
        pack(path, repository=tmp_path / "models", name="net", signature=given)
    assert why in caught.value.why


def test_no_archive_and_no_file_are_told(tmp_path: Path) -> None:
    with pytest.raises(RepositoryError, match="can't serve"):
        pack(tmp_path / "nothing.pt", repository=tmp_path / "models", name="net", signature=ONE)
    (tmp_path / "text.pt").write_text("x")
    with pytest.raises(RepositoryError) as caught:
        pack(tmp_path / "text.pt", repository=tmp_path / "models", name="net", signature=ONE)
    assert "no archive of PyTorch" in caught.value.why
