"""Which nodes run faster in INT8 than in float on this machine: found by measuring mixtures, not from a table of costs.

What a node costs in INT8 depends on its neighbours, since each border between float and INT8 is a node of its own: so
whole mixtures take turns, and one replaces another only where it is faster beyond doubt.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from onnx import ModelProto, NodeProto

from compress.console.wording import counted
from compress.formats.files import size_of
from compress.model import OnnxModel, sample_inputs
from compress.quantize.int8_onnx import finish
from compress.quantize.quantize_onnx import QuantizeOnnx, quantized
from compress.quantize.tied_tables import ties
from compress.quantize.weights_onnx import RECURRENT
from compress.runtime.backends import open_model
from compress.runtime.latency import Latency, Ratio, latency, ratio

__all__ = ["Back", "Choice", "DynamicMixture", "Measure", "Mixture", "fastest", "times_as_fast", "turns"]

STEPS = 4  # of the search, each of a dozen mixtures or so
PARTS = 4  # of a network, front to back, that change together
TOGETHER, LARGE = 8, 50_000_000  # mixtures that are open at once; fewer of files of so many bytes
ROUNDS, BLOCK_SECONDS, SECONDS = 11, 0.03, 20.0
LONGER = 4  # times as many rounds where doubt is all that speaks against INT8
LAYERS = ("Conv", "ConvTranspose", "Gemm", "MatMul", "Gather", *RECURRENT)

Back = frozenset[str]


class Mixture(Protocol):
    """A float graph and its quantized form, to choose between them node by node."""

    @property
    def units(self) -> Sequence[str]:
        """Names of the nodes that there is a choice for, front to back."""

    def model(self, back: Collection[str]) -> ModelProto:
        """The quantized graph with these units in float."""


class DynamicMixture:
    """Of dynamic INT8, which has no Q/DQ nodes to take away: each mixture is quantized anew.

    Args:
        options: how to quantize; mode "dynamic".
        plain: the float graph; each node has a name of its own.
    """

    def __init__(self, options: QuantizeOnnx, plain: ModelProto) -> None:
        self._options, self._plain = options, plain
        self._whole = quantized(options, plain, None)
        same = {node.name: node for node in self._whole.graph.node}
        self.units: list[str] = [node.name for node in plain.graph.node if same.get(node.name) != node]

    def model(self, back: Collection[str]) -> ModelProto:
        if not back:
            copy = ModelProto()
            copy.CopyFrom(self._whole)
            return copy
        options = dataclasses.replace(self._options, exclude=(*self._options.exclude, *back))
        return quantized(options, self._plain, None)


@dataclass(frozen=True)
class Choice:
    """What measuring chose.

    Attributes:
        back: units that stay in float; all of them where no mixture is faster than the float model.
        whole: how many times as fast as the float model the mixture with all units in INT8 is; None if it doesn't run.
        tried: how many mixtures were measured.
        units: how many nodes there was a choice for.
    """

    back: Back
    whole: Ratio | None
    tried: int
    units: int


Measure = Callable[[Sequence[Back]], Mapping[Back, Latency]]
"""Latencies of mixtures, given by what is in float in each, that took turns."""


def fastest(
    mixture: Mixture, original: ModelProto, measure: Measure, together: int, progress: Callable[[int, int, str], None]
) -> Choice:
    """The mixture that takes least time.

    Kinds of nodes go back to float, or into INT8, first; then quarters of the network, front to back. A step takes the
    best of its mixtures where its interval of paired rounds is above the best one's before; the search ends where none
    is.

    Args:
        mixture: to choose from.
        original: the float graph.
        measure: see `turns`.
        together: how many mixtures it takes, beside the best one.
        progress: called with mixtures measured, how many there may be, and a note.
    """
    units = tuple(mixture.units)
    kinds = _kinds(original, units)
    layers = {name for kind, names in kinds.items() if kind[0] in LAYERS for name in names}
    floats = best = frozenset(units)
    whole: Ratio | None = None
    seen: set[Back] = {floats}
    for step in range(STEPS):
        tries = _beside(best, kinds, units) if step else _first(kinds, units)
        candidates = [each for each in dict.fromkeys(tries) if each not in seen and layers - each]
        began = best
        for start in range(0, len(candidates), together):
            few = candidates[start : start + together]
            times = measure([best, *few])
            found = {back: ratio(times[best].rounds_ms, times[back].rounds_ms) for back in few}
            whole = found.get(frozenset(), whole) if best == floats else whole
            faster = {back: each.value for back, each in found.items() if each is not None and each.faster}
            best = max(faster, key=lambda back: faster[back]) if faster else best
            seen |= set(few)
            note = f"{len(units) - len(best)} of {counted(len(units), 'nodes')} in INT8"
            progress(len(seen) - 1, len(seen) + len(candidates) - start, note)
        if best == began:
            break
    if best == floats and whole is not None and not whole.faster and not whole.slower:
        whole = _longer(measure, floats, frozenset())
        return Choice(frozenset() if whole is not None and whole.faster else floats, whole, len(seen) - 1, len(units))
    if best == floats:
        return Choice(best, whole, len(seen) - 1, len(units))
    # The best of many is the one that was measured luckiest, too: again, by itself.
    times = measure([*dict.fromkeys((floats, frozenset(), best))])
    gains = {back: ratio(times[floats].rounds_ms, found.rounds_ms) for back, found in times.items()}
    over = ratio(times[frozenset()].rounds_ms, times[best].rounds_ms)
    if best and not (over is not None and over.faster):
        best = frozenset()
    last = gains[best]
    if last is not None and not last.faster and not last.slower:
        last = _longer(measure, floats, best)
    best = best if last is not None and last.faster else floats
    return Choice(best, whole, len(seen) - 1, len(units))


def _longer(measure: Measure, first: Back, second: Back) -> Ratio | None:
    """How many times as fast the second is, by more rounds than many candidates can have: a busy machine needs them."""
    times = [measure([first, second]) for _ in range(LONGER)]
    pooled = ([ms for found in times for ms in found[back].rounds_ms] for back in (first, second))
    return ratio(*pooled)


def turns(mixture: Mixture, original: ModelProto, model: OnnxModel, threads: int) -> tuple[Measure, int]:
    """How mixtures are measured, at batch 1 and the signature's sizes, and how many files may be open beside the best.

    Args:
        mixture: what they are of.
        original: the float graph.
        model: its file, as it would be shipped.
        threads: that each model runs with.
    """

    def measure(backs: Sequence[Back]) -> Mapping[Back, Latency]:
        with tempfile.TemporaryDirectory() as folder:
            opened = {}
            for number, back in enumerate(backs):
                path = model.path
                if back != frozenset(mixture.units):
                    path = Path(folder) / f"{number}.onnx"
                    finish(mixture.model(back), path, ties(original))
                opened[str(number)] = open_model(OnnxModel(path, model.signature), threads=threads)
            inputs = sample_inputs(model.signature, 1)
            found = latency(opened, inputs, rounds=ROUNDS, block_seconds=BLOCK_SECONDS, seconds=SECONDS)
        return {back: found[str(number)] for number, back in enumerate(backs)}

    return measure, TOGETHER if size_of(model.path) < LARGE else 2


def times_as_fast(first: OnnxModel, second: OnnxModel, threads: int) -> Ratio | None:
    """How many times as fast the second model is as the first, at batch 1 and the signature's sizes."""
    opened = {name: open_model(model, threads=threads) for name, model in (("first", first), ("second", second))}
    found = latency(opened, sample_inputs(first.signature, 1), rounds=LONGER * ROUNDS, seconds=SECONDS)
    return ratio(found["first"].rounds_ms, found["second"].rounds_ms)


def _kinds(original: ModelProto, units: Sequence[str]) -> dict[tuple[str, str], list[str]]:
    """Units by what they are: their operator, and whether a convolution goes through channels one by one."""
    wanted = set(units)
    dims = {tensor.name: tensor.dims for tensor in original.graph.initializer}
    found: dict[tuple[str, str], list[str]] = {}
    for node in original.graph.node:
        if node.name in wanted:
            found.setdefault((node.op_type, _manner(node, dims)), []).append(node.name)
    return found


def _manner(node: NodeProto, dims: dict[str, Sequence[int]]) -> str:
    if node.op_type != "Conv" or len(node.input) < 2:
        return ""
    shape = dims.get(node.input[1], ())
    groups = next((attribute.i for attribute in node.attribute if attribute.name == "group"), 1)
    if groups > 1:
        return "depthwise" if len(shape) > 1 and shape[1] == 1 else "grouped"
    return "pointwise" if shape and all(size == 1 for size in shape[2:]) else ""


def _first(kinds: dict[tuple[str, str], list[str]], units: Sequence[str]) -> Iterator[Back]:
    yield frozenset()
    everything = frozenset(units)
    yield everything - {name for kind, names in kinds.items() if kind[0] in LAYERS for name in names}
    for names in map(frozenset, (*kinds.values(), *_parts(units))):
        yield names
        yield everything - names


def _beside(best: Back, kinds: dict[tuple[str, str], list[str]], units: Sequence[str]) -> Iterator[Back]:
    for names in kinds.values():
        yield best.union(names)
        yield best.difference(names)
    for part in _parts([name for name in units if name not in best]):
        yield best.union(part)
    for part in _parts([name for name in units if name in best]):
        yield best.difference(part)


def _parts(units: Sequence[str]) -> Iterator[Sequence[str]]:
    size = -(-len(units) // PARTS)
    for start in range(0, len(units), size or 1):
        yield units[start : start + size]
