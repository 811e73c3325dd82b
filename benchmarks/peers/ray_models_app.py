"""Ray Serve's model multiplexing: one replica with so many ONNX Runtime sessions, least recently used first out."""

import asyncio
import os
import sys
import time
from pathlib import Path

import numpy as np
import onnxruntime
import ray
from ray import serve
from starlette.requests import Request

MODELS, FIT = Path(os.environ["MODELS"]), int(os.environ["FIT"])


def note(what, model):
    with Path(os.environ["NOTES"]).open("a") as file:
        file.write(f"{time.time()} {what} {model}\n")


class Network:
    def __init__(self, name):
        self.name = name
        note("loading", name)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(MODELS / name / "1" / "model.onnx", options)
        note("loaded", name)

    def __del__(self):
        note("unloading", self.name)


@serve.deployment(num_replicas=1, max_ongoing_requests=256, ray_actor_options={"num_cpus": 1})
class Deployment:
    @serve.multiplexed(max_num_models_per_replica=FIT)
    async def network(self, name):
        return await asyncio.to_thread(Network, name)

    async def __call__(self, request: Request):
        body = await request.json()
        network = await self.network(serve.get_multiplexed_model_id())
        (output,) = network.session.run(None, {"x": np.array(body["x"], np.float32)})
        return output.tolist()


if __name__ == "__main__":
    ray.init(include_dashboard=False, log_to_driver=False, num_cpus=2)
    serve.start(
        http_options={"host": "127.0.0.1", "port": int(sys.argv[1])}, logging_config={"enable_access_log": False}
    )
    serve.run(Deployment.bind(), route_prefix="/predict")
    print("ready", flush=True)
    while True:
        time.sleep(1)
