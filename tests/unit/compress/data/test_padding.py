"""Which rows are padding: whatever the mask says it by and however rows lie, if nothing but that hides tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from compress.data.dataset import Dataset
from compress.prune.repair.samples import Samples
from tests.unit.compress.prune.test_prune_channels import wrapped

Array = np.ndarray[Any, Any]
WIDTH = 8


@dataclass(frozen=True)
class Made:
    """How a network is built.

    Attributes:
        hides: what its mask says of padding; None where it looks at no mask.
        by_sample: whether its layers read samples first.
        flat: whether they read rows.
        turned: whether they read the tokens of a text from its end.
        ends: what it answers: one vector for a sample, or one for each token.
        attends: whether tokens look at each other, or only back.
    """

    hides: int | None = 0
    by_sample: bool = True
    flat: bool = False
    turned: bool = False
    ends: str = "pooled"
    attends: str = "all"


class Network(nn.Module):
    """A layer, an attention, and a layer whose rows are looked at."""

    def __init__(self, made: Made) -> None:
        super().__init__()
        self.made = made
        self.embed = nn.Embedding(50, WIDTH)
        self.into, self.values, self.seen = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        made = self.made
        kept = torch.ones_like(mask) == 1 if made.hides is None else mask != made.hides
        if made.turned:
            ids, kept = ids.flip(1), kept.flip(1)
        x = self.into(self.embed(ids))
        scores = (x @ x.transpose(1, 2)).masked_fill(~kept[:, None], -1e4)
        if made.attends == "back":
            scores = scores.masked_fill(torch.ones_like(scores[0]).triu(1) == 1, -1e4)
        x = x if made.attends == "none" else x + scores.softmax(-1) @ self.values(x)
        x = x if made.by_sample else x.transpose(0, 1)
        shape = x.shape
        x = self.seen(x.reshape(-1, WIDTH) if made.flat else x).reshape(shape)
        if made.ends == "tokens":
            return cast(torch.Tensor, x)
        x = x if made.by_sample else x.transpose(0, 1)
        return cast(torch.Tensor, (x * kept[:, :, None]).sum(1) / kept.sum(1, keepdim=True))


def drawn(samples: int = 40, tokens: int = 6, padding: int = 0, seed: int = 0) -> tuple[Array, Array]:
    """Ids that are 0 at padding, and a mask that says it by a number; texts of several lengths."""
    random = np.random.default_rng(seed)
    real = np.arange(tokens) < random.integers(1, tokens, (samples, 1))
    ids = np.where(real, random.integers(1, 50, real.shape), 0)
    return ids, np.where(real, 1 - padding, padding).astype(np.int64)


def samples_of(module: nn.Module, inputs: Mapping[str, Array], batch: int = 32) -> Samples:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for parameter in module.parameters():
            nn.init.normal_(parameter, 0.0, 0.5)
    specs = [
        f"{name}:{array.dtype.name}[batch,{','.join(map(str, array.shape[1:]))}]" for name, array in inputs.items()
    ]
    model = wrapped(module, *specs)
    return Samples(Dataset("made up", dict(inputs), None, "0"), model.module, model.signature, batch)


def reads(samples: Samples, batch: int, layer: str) -> torch.Tensor:
    """What a layer reads of a batch."""
    module, found = samples.module, []
    hook = module.get_submodule(layer).register_forward_pre_hook(lambda _, read: found.append(read[0]))
    with torch.no_grad():
        module(*samples.tensors(batch))
    hook.remove()
    return cast(torch.Tensor, found[0])


def answers(samples: Samples) -> torch.Tensor:
    """To the first batch."""
    with torch.no_grad():
        return cast(torch.Tensor, samples.module(*samples.tensors(0)))


def left_out(samples: Samples, layer: str, real: Array, *, by_sample: bool = True) -> bool:
    """Whether in each batch exactly padding is left out of a layer; if not, nothing is."""
    for batch, index in enumerate(samples.batches):
        read = reads(samples, batch, layer)
        kept = samples.kept(batch, layer, read)
        if kept is None:
            return False
        rows = real[index] if by_sample else real[index].T
        assert np.array_equal(kept.numpy(), rows if read.ndim == 3 else rows.reshape(-1))
    return True


BATCHES = {"few": (6, 32), "as many samples as tokens": (6, 6), "one more": (6, 5)}
TOLD = {
    "attention_mask": Made(),
    "padding is True": Made(hides=1),
    "tokens first": Made(by_sample=False),
    "tokens first, padding is True": Made(hides=1, by_sample=False),
    "rows": Made(flat=True),
    "rows, tokens first": Made(flat=True, by_sample=False),
    "an answer for each token": Made(ends="tokens"),
    "an answer for each token, tokens first, padding is True": Made(hides=1, by_sample=False, ends="tokens"),
}
UNTOLD = {
    "a mask that it does not look at": Made(hides=None),
    "the same, tokens first": Made(hides=None, by_sample=False),
    "turned round": Made(turned=True),
}


@pytest.mark.parametrize("sizes", BATCHES)
@pytest.mark.parametrize("kind", TOLD)
def test_padding_is_left_out_as_the_layer_has_it(kind: str, sizes: str) -> None:
    made, (tokens, batch) = TOLD[kind], BATCHES[sizes]
    ids, mask = drawn(tokens=tokens, padding=made.hides or 0)
    name = "attention_mask" if made.hides == 0 else "src_key_padding_mask"
    samples = samples_of(Network(made), {"ids": ids, name: mask if made.hides == 0 else mask.astype(bool)}, batch)
    assert left_out(samples, "seen", ids > 0, by_sample=made.by_sample)
    assert left_out(samples, "values", ids > 0)
    if made.ends == "tokens":
        kept = samples.kept_of(0, "output", answers(samples))
        assert kept is not None
        real = (ids > 0)[samples.batches[0]]
        assert np.array_equal(kept.numpy(), real if made.by_sample else real.T)


@pytest.mark.parametrize("by_sample", [True, False])
def test_one_padded_sample_does_not_tell_the_order_of_rows(*, by_sample: bool) -> None:
    ids, mask = np.random.default_rng(0).integers(1, 50, (40, 6)), np.ones((40, 6), np.int64)
    ids[3, 4:], mask[3, 4:] = 0, 0
    samples = samples_of(Network(Made(flat=True, by_sample=by_sample)), {"ids": ids, "attention_mask": mask})
    assert not left_out(samples, "seen", ids > 0)
    assert left_out(samples, "values", ids > 0)


@pytest.mark.parametrize("name", ["attention_mask", "mask"])
@pytest.mark.parametrize("kind", UNTOLD)
def test_where_answers_hang_on_it_or_rows_lie_otherwise_all_count(kind: str, name: str) -> None:
    ids, mask = drawn()
    samples = samples_of(Network(UNTOLD[kind]), {"ids": ids, name: mask})
    assert not left_out(samples, "seen", ids > 0)


def test_a_mask_called_attention_mask_that_says_padding_by_1_is_read_as_the_model_reads_it() -> None:
    ids, mask = drawn(padding=1)
    assert left_out(samples_of(Network(Made(hides=1)), {"ids": ids, "attention_mask": mask}), "seen", ids > 0)


@pytest.mark.parametrize("attends", ["back", "none"])
@pytest.mark.parametrize("first", [0, 1])
def test_the_second_half_of_a_text_is_no_padding_of_the_first(attends: str, first: int) -> None:
    """A network that looks back alone reads it for nothing that the first half is asked for."""
    ids, halves = drawn(padding=first)
    ids = np.where(ids == 0, 7, ids)
    made = Made(hides=None, attends=attends, ends="tokens")
    samples = samples_of(Network(made), {"ids": ids, "segments": halves})
    assert all(samples.kept(0, name, reads(samples, 0, name)) is None for name in ("into", "seen"))
    assert samples.kept_of(0, "output", answers(samples)) is None


def test_without_a_mask_all_tokens_count() -> None:
    class Alone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = Network(Made())

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.network(ids, ids > 0)  # type: ignore[no-any-return]

    samples = samples_of(Alone(), {"ids": drawn()[0]})
    assert samples.kept(0, "network.seen", reads(samples, 0, "network.seen")) is None


class Two(nn.Module):
    """A text, and another of the same length that looks at it."""

    def __init__(self, hides: tuple[int, int]) -> None:
        super().__init__()
        self.first, self.second = (Network(Made(hides=each, ends="tokens")) for each in hides)
        self.hides = hides
        self.end = nn.Linear(WIDTH, WIDTH)

    def forward(
        self, ids: torch.Tensor, mask: torch.Tensor, others: torch.Tensor, other_mask: torch.Tensor
    ) -> torch.Tensor:
        one, two = self.first(ids, mask), self.second(others, other_mask)
        scores = (two @ one.transpose(1, 2)).masked_fill((mask == self.hides[0])[:, None], -1e4)
        kept = (other_mask != self.hides[1])[:, :, None]
        return cast(torch.Tensor, (self.end(two + scores.softmax(-1) @ one) * kept).sum(1))


@pytest.mark.parametrize("hides", [(0, 0), (0, 1), (1, 1)])
def test_of_two_texts_each_has_its_own_padding(hides: tuple[int, int]) -> None:
    (ids, mask), (others, other_mask) = drawn(padding=hides[0]), drawn(padding=hides[1], seed=1)
    inputs = {"ids": ids, "attention_mask": mask, "others": others, "other_mask": other_mask}
    samples = samples_of(Two(hides), inputs)
    assert left_out(samples, "first.seen", ids > 0)
    assert left_out(samples, "second.seen", others > 0)


class Torchs(nn.Module):
    """torch's own encoder: tokens first, if nothing else is said; its mask is True at padding."""

    def __init__(self, *, batch_first: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.0, batch_first=batch_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.embed, self.batch_first = nn.Embedding(50, WIDTH), batch_first

    def forward(self, ids: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        x = x if self.batch_first else x.transpose(0, 1)
        x = self.encoder(x, src_key_padding_mask=padding)
        x = x if self.batch_first else x.transpose(0, 1)
        return cast(torch.Tensor, x.masked_fill(padding[:, :, None], 0.0).sum(1))


@pytest.mark.parametrize("batch_first", [True, False])
def test_of_torch_s_encoder_padding_is_left_out_in_its_order(*, batch_first: bool) -> None:
    ids, mask = drawn(padding=1)
    samples = samples_of(Torchs(batch_first=batch_first), {"ids": ids, "src_key_padding_mask": mask.astype(bool)})
    for layer in ("encoder.layers.0.linear1", "encoder.layers.1.linear2"):
        assert left_out(samples, layer, ids > 0, by_sample=batch_first)


class Cut(nn.Module):
    """Tokens behind the last that counts in a batch are taken away."""

    def __init__(self) -> None:
        super().__init__()
        self.network = Network(Made(ends="tokens"))

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        longest = int(mask.any(0).nonzero().max()) + 1
        return cast(torch.Tensor, (self.network(ids[:, :longest], mask[:, :longest]) * mask[:, :longest, None]).sum(1))


def test_of_a_batch_that_the_model_cuts_all_rows_count() -> None:
    """Four texts are filled up in front of them; of the next four none reaches the end."""
    ids, mask = drawn(samples=16, tokens=6)
    ids[:4], mask[:4] = ids[:4, ::-1].copy(), mask[:4, ::-1].copy()
    ids[4:8, -2:], mask[4:8, -2:] = 0, 0
    samples = samples_of(Cut(), {"ids": ids, "attention_mask": mask}, 4)
    kept = [samples.kept(batch, "network.seen", reads(samples, batch, "network.seen")) for batch in range(2)]
    assert kept[0] is not None
    assert kept[1] is None


@settings(deadline=None, max_examples=20)
@given(
    st.booleans(), st.booleans(), st.booleans(), st.sampled_from([0, 1]), st.sampled_from(["pooled", "tokens"]),
    st.integers(2, 9), st.integers(1, 12), st.integers(0, 100),
)  # fmt: skip
def test_what_is_left_out_is_what_no_answer_hangs_on(
    by_sample: bool, flat: bool, turned: bool, hides: int, ends: str, tokens: int, batch: int, seed: int
) -> None:
    """Whatever a layer reads in rows that are left out, answers of what counts stay."""
    ids, mask = drawn(tokens=tokens, padding=hides, seed=seed)
    module = Network(Made(hides, by_sample, flat, turned, ends))
    samples = samples_of(module, {"ids": ids, "mask": mask}, batch)
    for name in ("into", "values", "seen"):
        kept = samples.kept(0, name, reads(samples, 0, name))
        if kept is None:
            continue

        def noise(_layer: nn.Module, read: tuple[torch.Tensor], kept: torch.Tensor = kept) -> torch.Tensor:
            shaped = kept.reshape(read[0].shape[:-1])[..., None]
            return torch.where(shaped, read[0], torch.randn_like(read[0]))

        given_ = samples.tensors(0)
        before = module(*given_)
        hook = module.get_submodule(name).register_forward_pre_hook(noise)
        after = module(*given_)
        hook.remove()
        counts = torch.as_tensor(np.ascontiguousarray(_real(module.made, ids[samples.batches[0]])))
        torch.testing.assert_close(*(each[counts] for each in (before, after)) if ends == "tokens" else (before, after))


def _real(made: Made, ids: Array) -> Array:
    real = ids[:, ::-1] > 0 if made.turned else ids > 0
    return real if made.by_sample else real.T
