"""What configurations say of threads, what a machine lets them have, what is chosen for it and written beside it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compress.errors import RepositoryError
from compress.host.cores import Cores
from serve.config.model_config import ModelConfig, ModelInstanceGroup
from serve.config.pbtxt import from_pbtxt
from serve.config.threads import MOST_INSTANCES, choice, threads_of
from serve.pack.options import PackOptions
from serve.pack.write import pack
from tests.serve_models import tiny_artifact


def model(backend: str, instances: int = 1, **parameters: str) -> ModelConfig:
    return ModelConfig(
        name="m", backend=backend, instance_group=(ModelInstanceGroup(instances),), parameters=parameters
    )


def machine(count: int, nodes: int = 1, quota: float | None = None, per_core: int = 1) -> Cores:
    each = count // nodes
    places = tuple(tuple(range(node * each, (node + 1) * each)) for node in range(nodes))
    return Cores(tuple(range(count)), count, count // per_core, quota, "the machine", places)


@pytest.mark.parametrize(
    ("config", "cores", "each", "too_many"),
    [
        (model("onnxruntime", 2, intra_op_thread_count="1"), 2, 1, False),
        (model("onnxruntime", 2, intra_op_thread_count="4"), 2, 1, True),
        (model("onnxruntime", 2, intra_op_thread_count="4"), 64, 4, False),
        (model("onnxruntime", 1), 2, 2, False),
        (model("onnxruntime", 1, intra_op_thread_count="0"), 6, 6, False),
        (model("onnxruntime", 3), 6, 2, True),
        (model("onnxruntime", 16, intra_op_thread_count="1"), 2, 1, True),
        (model("onnxruntime", 1, intra_op_thread_count="99999999999"), 4, 4, False),
        (model("openvino", 2, INFERENCE_NUM_THREADS="8"), 8, 4, False),
        (model("openvino", 2, INFERENCE_NUM_THREADS="64"), 2, 1, True),
        (model("openvino", 4), 2, 1, True),
        (model("pytorch", 1), 2, 1, False),
        (model("pytorch", 1, INTRA_OP_THREAD_COUNT="64"), 2, 2, True),
    ],
)
def test_an_instance_has_what_is_asked_for_within_its_share(
    config: ModelConfig, cores: int, each: int, too_many: bool
) -> None:
    threads = threads_of(config)
    assert threads is not None
    assert (threads.within(cores), threads.too_many(cores)) == (each, too_many)


@pytest.mark.parametrize("config", [model("python"), ModelConfig(name="m", platform="ensemble"), model("tensorrt")])
def test_what_does_not_compute_on_cpus_has_no_threads(config: ModelConfig) -> None:
    assert threads_of(config) is None


@pytest.mark.parametrize(
    ("cores", "chosen"),
    [
        (machine(1), (1, 1)),
        (machine(2), (2, 1)),
        (machine(8), (8, 1)),
        (machine(64), (8, 8)),
        (machine(64, quota=2.5), (2, 1)),
        (machine(64, quota=0.5), (1, 1)),
        (machine(64, per_core=2), (8, 4)),
        (machine(16, nodes=4), (8, 2)),
        (machine(12), (8, 1)),
    ],
)
def test_what_is_chosen(cores: Cores, chosen: tuple[int, int]) -> None:
    assert choice(cores) == chosen


@given(st.integers(1, 512), st.sampled_from([1, 2]), st.none() | st.floats(0.01, 600), st.sampled_from([1, 2, 4]))
def test_what_is_chosen_is_within_the_cores_and_a_node(
    count: int, per_core: int, quota: float | None, nodes: int
) -> None:
    cores = machine(count * per_core * nodes, nodes, quota, per_core)
    instances, threads = choice(cores)
    assert 1 <= instances <= MOST_INSTANCES
    assert instances * threads <= cores.computing <= cores.count
    assert threads <= cores.in_node


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (PackOptions(), "# 2 x 1 thread: by --instances and --threads, or their defaults."),
        (PackOptions(instances=3, threads=2), "# 3 x 2 threads: by --instances"),
        (PackOptions(cores=32), "# 8 x 4 threads: by --cores 32."),
    ],
)
def test_the_configuration_says_why(options: PackOptions, told: str, tmp_path: Path) -> None:
    pack(tiny_artifact(tmp_path / "a"), repository=tmp_path / "models", name="m", options=options)
    text = (tmp_path / "models/m/config.pbtxt").read_text(encoding="utf-8")
    at = text.index(told)
    assert text[at:].splitlines()[1].startswith("instance_group")
    assert from_pbtxt(text).instance_group[0].count == int(told[2])


def test_this_machines_cores_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve.pack.cores.cores_here", lambda: machine(64, quota=2.0))
    options = PackOptions(cores="here")
    pack(tiny_artifact(tmp_path / "a"), repository=tmp_path / "models", name="m", options=options)
    text = (tmp_path / "models/m/config.pbtxt").read_text(encoding="utf-8")
    assert "# 2 x 1 thread: for 2 cores of 64 (the machine), by --cores here.\n" in text


def test_an_edit_by_hand_is_not_said_to_be_chosen(tmp_path: Path) -> None:
    artifact, repository = tiny_artifact(tmp_path / "a"), tmp_path / "models"
    pack(artifact, repository=repository, name="m")
    path = repository / "m/config.pbtxt"
    path.write_text(path.read_text(encoding="utf-8").replace("count: 2", "count: 5"), encoding="utf-8")
    pack(artifact, repository=repository, name="m")
    assert "# 5 x 1 thread: as it was edited by hand or tuned.\n" in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("more", [{"cores": 0}, {"cores": 4, "threads": 2}, {"cores": "here", "device": "gpu"}])
def test_cores_that_can_not_be_chosen_for_are_refused(more: dict[str, object]) -> None:
    with pytest.raises(RepositoryError, match="cores"):
        PackOptions(**more)  # type: ignore[arg-type]
