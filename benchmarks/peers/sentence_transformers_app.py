"""sentence-transformers behind FastAPI, as its users do it: uvicorn sentence_transformers_app:app."""

import os

import torch
from fastapi import FastAPI
from pydantic import BaseModel
from sentence_transformers import SentenceTransformer

if threads := int(os.environ.get("THREADS", "0")):
    torch.set_num_threads(threads)
app = FastAPI()
model = SentenceTransformer(os.environ["FOLDER"], device="cpu")


class Asked(BaseModel):
    model: str
    input: list[str]
    encoding_format: str = "float"


@app.post("/v1/embeddings")
def embeddings(asked: Asked):
    rows = model.encode(asked.input, show_progress_bar=False)
    data = [{"object": "embedding", "index": at, "embedding": row.tolist()} for at, row in enumerate(rows)]
    return {"object": "list", "data": data, "model": asked.model, "usage": {"prompt_tokens": 0, "total_tokens": 0}}
