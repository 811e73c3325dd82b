"""LitServe with batches: two workers, one model each."""

import sys

import litserve
import numpy as np
from network import Network, decode


class Api(litserve.LitAPI):
    def setup(self, device):  # noqa: ARG002 - LitServe gives it
        self.network = Network()

    def decode_request(self, request):
        return decode(request["data"])

    def batch(self, inputs):
        return np.stack(inputs)

    def predict(self, batch):
        return self.network(batch)

    def unbatch(self, output):
        return list(output)

    def encode_response(self, output):
        return {"logits": output.tolist()}


if __name__ == "__main__":
    api = Api(max_batch_size=32, batch_timeout=0.001)
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=2)
    server.run(host="127.0.0.1", port=int(sys.argv[1]), generate_client_file=False, log_level="warning")
