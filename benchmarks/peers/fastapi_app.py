"""Plain FastAPI with ONNX Runtime in the process, without batching: uvicorn fastapi_app:app --workers 2."""

from typing import Any

from fastapi import FastAPI
from network import Network, decode
from pydantic import BaseModel

app = FastAPI()
network = Network()


class Item(BaseModel):
    data: Any


@app.post("/predict")
def predict(item: Item):
    return {"logits": network(decode(item.data)[None])[0].tolist()}
