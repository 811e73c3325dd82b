"""sentence-transformers behind BentoML, with its adaptive batching: bentoml serve bentoml_embeddings_app:Service."""

import os

import bentoml
import numpy as np
import torch
from sentence_transformers import SentenceTransformer


@bentoml.service(workers=2, traffic={"timeout": 120})
class Service:
    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.model = SentenceTransformer(os.environ["FOLDER"], device="cpu")

    @bentoml.api(route="/v1/embeddings", batchable=True, max_batch_size=32, max_latency_ms=60000)
    def embed(self, sentences: list[str]) -> np.ndarray:
        return self.model.encode(sentences, show_progress_bar=False)
