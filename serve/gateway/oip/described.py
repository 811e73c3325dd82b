"""A model as its files describe it: what is told of one that Triton has not loaded."""

from __future__ import annotations

import orjson

from serve.config.model_config import ModelInput, ModelOutput, protocol_datatype
from serve.gateway.oip.metadata import ModelMetadata
from serve.repository.read import ModelInfo
from serve.repository.versions import all_served

__all__ = ["described"]


def described(model: ModelInfo) -> ModelMetadata:
    """What Triton would tell of it once it were loaded, as far as lists and forms need it.

    Raises:
        ProtocolError: a tensor's datatype is none that is known.
    """
    config = model.config
    batch = [-1] if config.max_batch_size else []

    def tensor(each: ModelInput | ModelOutput) -> dict[str, object]:
        return {"name": each.name, "datatype": protocol_datatype(each.data_type), "shape": [*batch, *each.dims]}

    metadata = {
        "name": model.name,
        "versions": [str(version) for version in all_served(config, model.versions)],
        "inputs": [tensor(each) for each in config.input],
        "outputs": [tensor(each) for each in config.output],
    }
    known = {
        "max_batch_size": config.max_batch_size,
        "input": [{"name": each.name, "optional": each.optional} for each in config.input],
        "parameters": {name: {"string_value": value} for name, value in config.parameters.items()},
    }
    return ModelMetadata.parse(orjson.dumps(metadata), orjson.dumps(known))
