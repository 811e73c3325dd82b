"""Models that remember, for tests with a real Triton."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from serve.triton.launch import Ports, TritonServer

MODEL = """\
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.sums = {}

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        x, start, ready = (
            pb_utils.get_input_tensor_by_name(request, each).as_numpy().ravel()[0] for each in ("x", "START", "READY")
        )
        name = request.correlation_id()
        if ready:  # else it is there to fill a batch
            self.sums[name] = int(x) + (0 if start else self.sums[name])
        return pb_utils.InferenceResponse([pb_utils.Tensor("sum", np.full((1, 1), self.sums.get(name, 0), np.int64))])
"""
CONFIG = """\
name: "NAME"
backend: "python"
max_batch_size: 4
input [ { name: "x" data_type: TYPE_INT64 dims: [ 1 ] } ]
output [ { name: "sum" data_type: TYPE_INT64 dims: [ 1 ] } ]
instance_group [ { count: 1 kind: KIND_CPU } ]
sequence_batching {
  max_sequence_idle_microseconds: 600000000
  control_input [
    { name: "START" control [ { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] } ] },
    { name: "READY" control [ { kind: CONTROL_SEQUENCE_READY fp32_false_true: [ 0, 1 ] } ] } PLACE
  ]
}
"""
NUMBER = ', { name: "NAME" control [ { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } ] }'
ENSEMBLE = """\
name: "whole"
platform: "ensemble"
max_batch_size: 4
input [ { name: "x" data_type: TYPE_INT64 dims: [ 1 ] } ]
output [ { name: "sum" data_type: TYPE_INT64 dims: [ 1 ] } ]
ensemble_scheduling { step [ {
  model_name: "counts" model_version: -1
  input_map { key: "x" value: "x" } output_map { key: "sum" value: "sum" }
} ] }
"""


@contextmanager
def remembering(folder: Path) -> Iterator[TritonServer]:
    """A Triton that adds up what each sequence sends.

    Models: "counts" asks for the ids, as numbers; "words" does not; the ensemble "whole" asks "counts"; "twice" is two
    versions of "counts", of which the second begins at 1000.
    """
    for name, control in (("counts", NUMBER), ("words", "")):
        version = folder / name / "1"
        version.mkdir(parents=True)
        (version.parent / "config.pbtxt").write_text(CONFIG.replace("NAME", name).replace("PLACE", control))
        (version / "model.py").write_text(MODEL)
    for number, begins in (("1", "0"), ("2", "1000")):
        (folder / "twice" / number).mkdir(parents=True)
        (folder / "twice" / number / "model.py").write_text(MODEL.replace("(0 if start", f"({begins} if start"))
    config = CONFIG.replace("NAME", "twice").replace("PLACE", NUMBER.replace("NAME", "twice"))
    (folder / "twice" / "config.pbtxt").write_text(f"{config}version_policy {{ all {{ }} }}\n")
    (folder / "whole" / "1").mkdir(parents=True)
    (folder / "whole" / "config.pbtxt").write_text(ENSEMBLE)
    with TritonServer(folder, ports=Ports(0, 0, 0)) as server:
        yield server
        server.stop(within_s=5)  # what tests have left with it is of no use


def all_free(triton: TritonServer, *models: str) -> bool:
    """Whether four sequences can begin, of each model ("m", or "m/versions/1"): its slots. They end again."""
    with closing(http.client.HTTPConnection(triton.http_address, timeout=2)) as connection:
        try:
            return all(
                _passes(connection, model, {"sequence_id": number, step: True})
                for model in models for step in ("sequence_start", "sequence_end") for number in range(9001, 9005)
            )  # fmt: skip
        except OSError:  # one waits for a slot
            return False


def _passes(connection: http.client.HTTPConnection, model: str, parameters: dict[str, object]) -> bool:
    item = {"name": "x", "datatype": "INT64", "shape": [1, 1], "data": [1]}
    connection.request("POST", f"/v2/models/{model}/infer", json.dumps({"inputs": [item], "parameters": parameters}))
    answer = connection.getresponse()
    answer.read()
    return answer.status == 200
