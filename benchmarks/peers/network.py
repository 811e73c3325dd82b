"""The network as each peer runs it: ONNX Runtime, one thread, no spinning, as behind our Triton."""

import base64
import json
import os

import numpy as np
import onnxruntime

MODEL, SHAPE = os.environ["NETWORK"], tuple(json.loads(os.environ["SHAPE"]))


class Network:
    def __init__(self):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self.session = onnxruntime.InferenceSession(MODEL, options, providers=["CPUExecutionProvider"])
        self.name = self.session.get_inputs()[0].name

    def __call__(self, batch):
        return self.session.run(None, {self.name: batch})[0]


def decode(value):
    """One item: a list of numbers, or the base64 of its bytes."""
    if isinstance(value, str):
        return np.frombuffer(base64.b64decode(value), np.float32).reshape(SHAPE)
    return np.asarray(value, np.float32).reshape(SHAPE)
