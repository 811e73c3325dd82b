"""MLServer with adaptive batching: mlserver start FOLDER, which holds settings.json and model-settings.json."""

import numpy as np
from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse
from network import SHAPE, Network


class Runtime(MLModel):
    async def load(self) -> bool:
        self.network = Network()
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        batch = NumpyCodec.decode_input(payload.inputs[0]).astype(np.float32).reshape(-1, *SHAPE)
        outputs = [NumpyCodec.encode_output("logits", self.network(batch))]
        return InferenceResponse(model_name=self.name, outputs=outputs)
