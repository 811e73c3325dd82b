"""BentoML with adaptive batching: bentoml serve bentoml_app:Service."""

from typing import Any

import bentoml
import numpy as np
from network import Network, decode


@bentoml.service(workers=2)
class Service:
    def __init__(self) -> None:
        self.network = Network()

    @bentoml.api(batchable=True, max_batch_size=32, max_latency_ms=60000)
    def predict(self, data: list[Any]) -> list[Any]:
        logits = self.network(np.stack([decode(item) for item in data]))
        return [{"logits": row.tolist()} for row in logits]
