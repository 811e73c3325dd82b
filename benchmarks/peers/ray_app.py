"""Ray Serve with batches: two replicas."""

import sys
import time

import numpy as np
import ray
from network import Network, decode
from ray import serve
from starlette.requests import Request


@serve.deployment(num_replicas=2, max_ongoing_requests=256, ray_actor_options={"num_cpus": 0.5})
class Deployment:
    def __init__(self):
        self.network = Network()

    @serve.batch(max_batch_size=32, batch_wait_timeout_s=0.001)
    async def predict(self, items):
        return list(self.network(np.stack(items)))

    async def __call__(self, request: Request):
        body = await request.json()
        return {"logits": (await self.predict(decode(body["data"]))).tolist()}


if __name__ == "__main__":
    ray.init(include_dashboard=False, log_to_driver=False, num_cpus=2)
    serve.start(
        http_options={"host": "127.0.0.1", "port": int(sys.argv[1])}, logging_config={"enable_access_log": False}
    )
    serve.run(Deployment.bind(), route_prefix="/predict")
    while True:
        time.sleep(1)
