"""Triton's configuration as data: its names are the schema's."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import pytest

from compress.signature import DTYPES
from serve.config import model_config
from serve.config.model_config import DTYPE_OF, TRITON_TYPE_OF, protocol_datatype


def test_every_field_stands_in_tritons_schema_under_the_same_name() -> None:
    schema: Any = importlib.import_module("tritonclient.grpc.model_config_pb2")
    messages = {"EnsembleStep": schema.ModelEnsembling.Step, "WarmupInput": schema.ModelWarmup.Input}
    policy = schema.ModelVersionPolicy
    messages |= {"ModelLatestVersions": policy.Latest, "ModelAllVersions": policy.All}
    messages |= {"ModelSpecificVersions": policy.Specific, "RateLimiterResource": schema.ModelRateLimiter.Resource}
    optimization = schema.ModelOptimizationPolicy
    accelerators = optimization.ExecutionAccelerators
    messages |= {"GraphOptimization": optimization.Graph, "CudaOptimization": optimization.Cuda}
    messages["ModelPinnedMemoryBuffer"] = optimization.PinnedMemoryBuffer
    messages |= {"ExecutionAccelerators": accelerators, "Accelerator": accelerators.Accelerator}
    for name in model_config.__all__:
        declared = getattr(model_config, name)
        if dataclasses.is_dataclass(declared):
            message = messages.get(name) or getattr(schema, name)
            fields = {field.name for field in dataclasses.fields(declared)}
            assert fields <= set(message.DESCRIPTOR.fields_by_name), name


def test_every_dtype_of_an_artifact_has_a_triton_type() -> None:
    assert set(TRITON_TYPE_OF) == set(DTYPES)
    assert {DTYPE_OF[triton] for triton in TRITON_TYPE_OF.values()} == set(DTYPES)


@pytest.mark.parametrize(
    ("data_type", "datatype"), [("TYPE_FP32", "FP32"), ("TYPE_STRING", "BYTES"), ("TYPE_BOOL", "BOOL")]
)
def test_the_protocol_calls_a_type_by_its_own_word(data_type: str, datatype: str) -> None:
    assert protocol_datatype(data_type) == datatype
