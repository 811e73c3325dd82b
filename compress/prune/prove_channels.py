"""Proof that removing channels is the same as silencing them.

The network without the channels and the network with all of them, these zero where they are made and where they are
read (and left out where others are normalized together with them), have to give the same answers: with the weights as
they are, and with weights drawn anew, since a branch that a trained network hardly uses would hide a mistake.
"""

from __future__ import annotations

import contextlib
import io
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from compress.artifact import Signature, TensorSpec
from compress.console.wording import with_error
from compress.data.dataset import Dataset
from compress.errors import StageError, first_line
from compress.model import Arrays, sample_inputs
from compress.model.apart import share_of_own_size
from compress.model.drawn import drawn_taken, indices_of
from compress.model.inputs import telling
from compress.model.unfused import unfused
from compress.prune.cut_layers import Cut, Layers
from compress.runtime.measure import torch_macs
from compress.storage.shortages import raise_shortage

__all__ = ["Proof"]

BATCH = 2
# Shares of the largest output. Within the first, single precision agrees; between them, double precision decides, which
# has to agree to the third. Where a network can't run in double precision, the fourth decides.
CLOSE, APART, EXACT, SINGLE = 1e-5, 1e-2, 1e-9, 1e-4
# An output of which fewer values are unlike each other, as one in so many, is taken for a rounded or cut off one.
TELLING = 4
# A run that takes longer than these seconds is replaced by one on shapes alone, where shapes are what is asked for.
LONG = 0.2


class Proof:
    """Tries cuts on a module.

    Args:
        layers: of the module, in eval mode.
        signature: of the module.
        samples: what it is made for, where there is some; two of them are tried besides random inputs.
    """

    def __init__(self, layers: Layers, signature: Signature, samples: Dataset | None = None) -> None:
        self._layers = layers
        self._signature = signature
        # Of one sample, at the sizes that stand for all others.
        self._single = Signature(
            tuple(
                TensorSpec(spec.name, spec.dtype, array.shape)
                for spec, array in zip(signature.inputs, sample_inputs(signature, 1).values(), strict=True)
            ),
            signature.outputs,
        )
        indices, sizes = indices_of(layers.module, signature), signature.at(BATCH)
        self.inputs = [drawn_taken(self._telling, signature, sizes, indices, seed) for seed in (0, 1)]
        if samples is not None:
            few = np.random.default_rng(0).choice(len(samples), min(BATCH, len(samples)), replace=False)
            self.inputs.append(samples.take(np.sort(few))[0])
        self._fakes = False
        with unfused(), torch.no_grad():
            seconds = []
            for _ in range(2):  # the first run is slower than others
                start = time.perf_counter()
                self._shapes = [tuple(tensor.shape) for tensor in self.run(self.inputs[0])]
                seconds.append(time.perf_counter() - start)
            if min(seconds) > LONG:
                self._fakes = self._fakes_tell_the_truth()

    def _telling(self, arrays: Arrays) -> Arrays:
        with unfused(), torch.no_grad():
            return telling(arrays, lambda tried: [t.numpy() for t in self.run(tried) if t.is_floating_point()])

    def _fakes_tell_the_truth(self) -> bool:
        """Whether the model runs on shapes alone, and these are those of a run in earnest."""
        macs = self._count({})
        self._fakes = True
        with contextlib.redirect_stderr(io.StringIO()):
            try:
                return self._run_shapes({}) == self._shapes and self._count({}) == macs
            except Exception:  # an operation that depends on values
                return False

    def macs(self, cut: Cut) -> int:
        """Multiply-accumulates for one sample without these channels; where shapes are enough, from these alone.

        Raises:
            StageError: it can't be cut like this.
        """
        return self._count(cut)

    def misfit(self, cut: Cut) -> str | None:
        """Why the model can't run without these channels, or gives outputs of other shapes; by shapes alone."""
        try:
            with contextlib.redirect_stderr(io.StringIO()):  # where torch.fx prints what fails
                shapes = self._run_shapes(cut)
        except StageError as err:
            return err.why
        except Exception as err:  # whatever the model's forward raises
            raise_shortage(err)
            return _failed(err)
        specs = self._signature.outputs if len(self._signature.outputs) == len(self._shapes) else ()
        for at, (have, want) in enumerate(zip_longest(shapes, self._shapes)):
            if have != want and not (specs and have is not None and _varies(specs[at], have)):
                name = specs[at].name if specs else str(at)
                return f"the shape of the output {name!r} hangs on it"
        return None if shapes else "the model gives no tensors that could be compared"

    def difference(self, cut: Cut, *, thorough: bool = False) -> str | None:
        """Why removing these channels is not the same as silencing them.

        Args:
            cut: what goes.
            thorough: all inputs, rather than the first.
        """
        misfit = self.misfit(cut)
        if misfit is not None:
            return misfit
        for arrays, seed in self.trials(thorough=thorough):
            try:
                with contextlib.redirect_stderr(io.StringIO()), unfused(), self.weights(seed):
                    apart = self._apart(cut, arrays)
                    if CLOSE < apart < APART:
                        apart = self._apart_exactly(cut, arrays, apart)
            except StageError as err:
                return err.why
            except Exception as err:
                raise_shortage(err)
                return _failed(err)
            if apart > CLOSE:
                return "removing channels that are zero changes the answers: they are counted or mixed on the way"
        return None

    def trials(self, *, thorough: bool) -> list[tuple[Arrays, int | None]]:
        """Inputs, each with the seed of `weights`."""
        return [*((arrays, None) for arrays in self.inputs[: None if thorough else 1]), (self.inputs[0], 0)]

    @torch.no_grad()
    def _apart(self, cut: Cut, arrays: Arrays) -> float:
        with self._layers.silenced(cut):
            wanted = self.run(arrays)
            inside = self._inside(arrays) if any(map(_coarse, wanted)) else None
        with self._layers.without(cut):
            apart = _distance(self.run(arrays), wanted)
            if inside is None or apart > CLOSE:
                return apart
            have = self._inside(arrays)
        same = [key for key, tensor in inside.items() if key in have and have[key].shape == tensor.shape]
        if all(map(_whole, (*wanted, *(inside[key] for key in same)))):
            raise StageError("", why="the outputs are too coarse to tell what removing it does", mend="")
        return max(apart, _distance([have[key] for key in same], [inside[key] for key in same]))

    def _inside(self, arrays: Arrays) -> dict[tuple[str, int], torch.Tensor]:
        """What the layers give, by name and call: an output that is rounded, cut off or a class id hides mistakes."""
        found: dict[tuple[str, int], torch.Tensor] = {}
        calls: dict[str, int] = defaultdict(int)

        def seen(layer: nn.Module, _given: Any, output: Any) -> None:
            name = self._layers.names[layer]
            calls[name] += 1
            for leaf in tree_leaves(output):
                if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
                    found[name, calls[name]] = leaf.clone()

        leaves = [layer for layer in self._layers.names if not any(True for _ in layer.children())]
        hooks = [layer.register_forward_hook(seen) for layer in leaves]
        try:
            self.run(arrays)
        finally:
            for hook in hooks:
                hook.remove()
        return found

    def _apart_exactly(self, cut: Cut, arrays: Arrays, apart: float) -> float:
        """The same in double precision: 0 if it agrees."""
        double = {
            name: array.astype(np.float64) if array.dtype.kind == "f" else array for name, array in arrays.items()
        }
        try:
            with self._doubled():
                exactly = self._apart(cut, double)
        except Exception:  # types that are written into the forward
            return 0.0 if apart <= SINGLE else apart
        return 0.0 if exactly <= EXACT else apart

    def run(self, arrays: Arrays, module: nn.Module | None = None) -> list[torch.Tensor]:
        """All tensors that the module gives, however deep they lie; what it draws at random is always the same.

        Args:
            arrays: its inputs.
            module: another one that takes these.
        """
        module = self._layers.module if module is None else module
        tensors = [torch.as_tensor(arrays[spec.name]) for spec in self._signature.inputs]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return [leaf for leaf in tree_leaves(module(*tensors)) if isinstance(leaf, torch.Tensor)]

    @torch.no_grad()
    def _run_shapes(self, cut: Cut) -> list[tuple[int, ...]]:
        with self._layers.without(cut, shapes_only=True), self._faked(), unfused():
            return [tuple(tensor.shape) for tensor in self.run(self.inputs[0])]

    def _count(self, cut: Cut) -> int:
        with self._layers.without(cut, shapes_only=True) as module, self._faked():
            return torch_macs(module, self._single)

    @contextlib.contextmanager
    def _faked(self) -> Iterator[None]:
        """Tensors of shapes without values, where that works for the model."""
        with FakeTensorMode(allow_non_fake_inputs=True) if self._fakes else contextlib.nullcontext():
            yield

    @contextlib.contextmanager
    def weights(self, seed: int | None) -> Iterator[None]:
        """Other weights, of the same size, none so small that it hides what goes through it; None: as they are."""
        if seed is None:
            yield
            return
        random = torch.Generator().manual_seed(seed)
        drawn = {name for name, _ in self._layers.module.named_parameters()}
        drawn |= {
            name for name, _ in self._layers.module.named_buffers() if name.endswith(("running_mean", "running_var"))
        }
        with self._changed(lambda name, tensor: _redrawn(name, tensor, random) if name in drawn else tensor):
            yield

    @contextlib.contextmanager
    def _doubled(self) -> Iterator[None]:
        with self._changed(lambda _name, tensor: tensor.double()):
            yield

    @contextlib.contextmanager
    def _changed(self, change: Callable[[str, torch.Tensor], torch.Tensor]) -> Iterator[None]:
        module = self._layers.module
        tensors = [*module.named_parameters(), *module.named_buffers()]
        floats = [(name, tensor) for name, tensor in tensors if tensor.is_floating_point()]
        before = [(tensor, tensor.data) for _, tensor in floats]
        try:
            for name, tensor in floats:
                tensor.data = change(name, tensor.detach())
            yield
        finally:
            for tensor, values in before:
                tensor.data = values


def _varies(spec: TensorSpec, shape: tuple[int, ...]) -> bool:
    """Whether a shape differs in what varies alone: in how many there are, say, of those above 0."""
    pairs = zip(spec.shape, shape, strict=False)
    return len(spec.shape) == len(shape) and all(isinstance(want, str) or want == have for want, have in pairs)


def _failed(err: BaseException) -> str:
    """Why channels can't go, of what a forward without them raised."""
    said = first_line(err)[:160]
    if "is invalid for input of size" in said:  # by view and reshape; a head is many channels, which go together
        return with_error("a reshape in its forward needs all of them, as one into attention heads does", said)
    return with_error("its forward fails without some of them", said)


def _redrawn(name: str, tensor: torch.Tensor, random: torch.Generator) -> torch.Tensor:
    last = name.rpartition(".")[2]
    if last == "running_var" or (tensor.ndim == 1 and not last.startswith(("bias", "running_mean"))):
        return torch.rand(tensor.shape, generator=random, dtype=tensor.dtype) + 0.5
    size = float(tensor.std()) if tensor.numel() > 1 else 0.0
    return tensor + max(size, 0.02) * torch.randn(tensor.shape, generator=random, dtype=tensor.dtype)


def _coarse(output: torch.Tensor) -> bool:
    """Whether an output may say little of what it was made from: hardly two of its values differ."""
    return _whole(output) or TELLING * _distinct(output) < output.numel()


def _whole(output: torch.Tensor) -> bool:
    """Whether an output says little: whole numbers, or one value throughout."""
    if not output.is_floating_point():
        return True
    finite = output[output.isfinite()]
    return bool((finite == finite.round()).all()) or _distinct(finite) < 2


def _distinct(values: torch.Tensor) -> int:
    return len(values.unique())  # type: ignore[no-untyped-call]


def _distance(have: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> float:
    """The largest difference, by the scale of what differs; infinite where an output has no finite value to compare."""
    apart = 0.0
    for given, expected in zip(have, wanted, strict=True):
        if given.shape != expected.shape:
            return math.inf
        got, want = (torch.view_as_real(t) if t.is_complex() else t for t in (given, expected))
        if not want.is_floating_point():
            apart = max(apart, 0.0 if torch.equal(got, want) else APART / 2)  # rounding may tip an answer
            continue
        apart = max(apart, share_of_own_size(want.double().numpy(), got.double().numpy()))
    return apart
