"""sentence-transformers behind LitServe, with its batching: two workers, one model each."""

import os
import sys

import litserve
import torch
from sentence_transformers import SentenceTransformer


class Api(litserve.LitAPI):
    def setup(self, device):  # noqa: ARG002 - LitServe gives it
        torch.set_num_threads(1)
        self.model = SentenceTransformer(os.environ["FOLDER"], device="cpu")

    def decode_request(self, request):
        return request["input"]

    def batch(self, inputs):
        return inputs

    def predict(self, batch):
        rows = iter(self.model.encode([text for texts in batch for text in texts], show_progress_bar=False))
        return [[next(rows).tolist() for _ in texts] for texts in batch]

    def unbatch(self, output):
        return output

    def encode_response(self, output):
        data = [{"object": "embedding", "index": at, "embedding": row} for at, row in enumerate(output)]
        return {"object": "list", "data": data}


if __name__ == "__main__":
    api = Api(max_batch_size=32, batch_timeout=0.002, api_path="/v1/embeddings")
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=2, timeout=120)
    server.run(host="127.0.0.1", port=int(sys.argv[1]), generate_client_file=False, log_level="warning")
