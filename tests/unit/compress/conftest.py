"""Whole runs measure latencies; tests that are not about these need fewer calls of each model."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import onnxruntime as ort
import pytest
import torch
from torch._export import utils as _utils

from compress.formats.onnx.load import fingerprint_of_file
from compress.jobs import on_runtimes, prove, serving_runtime
from compress.model import OnnxModel
from compress.report import export as report
from compress.runtime import grid, roofline, roofs
from compress.runtime.footprint import Footprint, footprint
from compress.runtime.machine import int8_saturates
from compress.runtime.measure import latency


class _Exact(ort.SessionOptions):  # type: ignore[misc]
    """Products of 8-bit numbers as CPUs with VNNI compute them: without it their sums are cut at 16 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.add_session_config_entry("session.disable_quant_qdq", "1")
        self.add_session_config_entry("session.x64quantprecision", "1")


class _ExactSession(ort.InferenceSession):  # type: ignore[misc]
    """The same for whoever asks for a session without options."""

    def __init__(self, model: Any, sess_options: Any = None, *args: Any, **kwargs: Any) -> None:
        super().__init__(model, sess_options or _Exact(), *args, **kwargs)


@pytest.fixture(scope="package", autouse=True)
def exact_products() -> Iterator[None]:
    """Figures of INT8 files are the same on each machine that runs the tests."""
    with pytest.MonkeyPatch.context() as patched:
        if int8_saturates():
            patched.setattr(ort, "SessionOptions", _Exact)
            patched.setattr(ort, "InferenceSession", _ExactSession)
        yield


@pytest.fixture
def own_products(exact_products: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime as it is, for a test that is about its fused operators: those have no exact form everywhere."""
    for patched in (_Exact, _ExactSession):
        monkeypatch.setattr(ort, patched.__base__.__name__, patched.__base__)


@pytest.fixture(scope="package", autouse=True)
def no_openvino() -> Iterator[None]:
    """As where it is not installed: with it, each run measures its result on both runtimes, and most are not about it."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(sys.modules, "openvino", None)
        yield


@pytest.fixture
def openvino(no_openvino: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenVINO is there, for a test that is about it."""
    pytest.importorskip("openvino_telemetry", reason="OpenVINO is an extra")
    monkeypatch.delitem(sys.modules, "openvino")


@pytest.fixture(autouse=True)
def short_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rounds of some calls in place of a dozen of 60 ms; `compress.runtime.measure.latency` itself stays as it is."""

    def short(models: Any, inputs: Any, **options: Any) -> Any:
        return latency(models, inputs, **(options | {"rounds": 2, "block_seconds": 0.01}))

    for module in (grid, on_runtimes, prove, serving_runtime):
        monkeypatch.setattr(module, "latency", short)


@pytest.fixture(autouse=True)
def roofs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine's roofs are measured once, not before and after each model: a third of a small run otherwise.

    test_roofline, which is about them, measures as a run does.
    """
    monkeypatch.setattr(roofline, "machine", lambda threads, **_again: roofs.machine(threads))


_footprints: dict[tuple[str, ...], Footprint] = {}


@pytest.fixture(autouse=True)
def footprints_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of its own for each file, but not again for one of the same bytes and sizes, run alike."""

    def known(model: OnnxModel, threads: int) -> Footprint:
        key = (fingerprint_of_file(model.path), repr(model.signature), model.runtime, str(threads))
        if key not in _footprints:
            _footprints[key] = footprint(model, threads)
        return _footprints[key]

    monkeypatch.setattr(prove, "footprint", known)


@pytest.fixture(autouse=True)
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run's plots take a third of a small run. test_report draws them, and a browser looks at a run's whole page."""
    monkeypatch.setattr(report, "plots", lambda *_given: [])
    monkeypatch.setattr(report, "training_plots", lambda *_given: [])
    monkeypatch.setattr(report, "roofline_plot", lambda _found: "")


@pytest.fixture(scope="session", autouse=True)
def operators_named_once() -> Iterator[None]:
    """torch.export looks up all that is registered, for each of two dozen namespaces: again only where more has come."""
    look_up = vars(_utils)["_materialize_cpp_cia_ops"]
    known: set[str] = set()

    def more() -> None:
        registered = torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd")
        if not known.issuperset(registered):
            look_up()
            known.update(registered)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(_utils, "_materialize_cpp_cia_ops", more)
        yield
