"""Which channels of a network go together, and which can go at all.

The dependency graph is torch_pruning's (Fang et al., DepGraph: Towards Any Structural Pruning, CVPR 2023, section 3).
What it says is not believed: each group is tried. Half of its channels are set to zero, then removed; the model has to
run, its outputs have to keep their shapes, and, since a zero contributes nothing, their values. What fails is left
alone, by name and with the reason.
"""

from __future__ import annotations

import contextlib
import copy
import io
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch_pruning as tp
from torch import nn

from compress.artifact import Signature
from compress.errors import StageError, first_line
from compress.model import TorchModel, call, sample_inputs
from compress.stages import Progress

__all__ = ["PRUNABLE", "ChannelGroup", "Channels", "same_outputs"]

PRUNABLE = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, nn.Linear)
NORMALIZING = (nn.LayerNorm, nn.GroupNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d, nn.RMSNorm)
WHOLE: tuple[tuple[type[nn.Module], str], ...] = (
    (nn.RNNBase, "recurrent layers keep their size: their gates share one matrix"),
    (nn.MultiheadAttention, "nn.MultiheadAttention keeps its heads: their projections share one matrix"),
    (nn.Bilinear, "bilinear layers keep their size"),
    (nn.EmbeddingBag, "embedding bags keep their size"),
)
TOLERANCE = 1e-3


@dataclass(frozen=True)
class ChannelGroup:
    """Channels that can only go together.

    Attributes:
        root: the layer that the group is named by.
        layers: all layers that give these channels, the root first.
        width: how many channels the root gives.
        units: how many can be chosen from: `width`, or, where layers cut channels into equal parts (grouped
            convolutions, group normalization), the width of one part; one unit then takes a channel from each part.
    """

    root: str
    layers: tuple[str, ...]
    width: int
    units: int

    def channels(self, units: Sequence[int]) -> list[int]:
        """The root's channels of these units."""
        return [unit + part for part in range(0, self.width, self.units) for unit in units]


class Channels:
    """The channel groups of a model, on a copy of it that loses channels and gets them back.

    Args:
        model: layered; left as it is.
        progress: is told of layers looked at.

    Attributes:
        groups: what can lose channels.
        left_alone: layers that can't, with the reason.
        module: the copy, with all its channels.
    """

    def __init__(self, model: TorchModel, progress: Progress = lambda _done, _total, _note: None) -> None:
        self.signature = model.signature
        self.module = copy.deepcopy(model.module)
        for parameter in self.module.parameters():
            parameter.requires_grad_(parameter.is_floating_point())
        self._names = {layer: name for name, layer in self.module.named_modules()}
        self.left_alone: dict[str, str] = {}
        with _quiet():
            self._graph = tp.DependencyGraph().build_dependency(self.module, example_inputs=_example(self.signature))
        self.groups = self._find(progress)

    def scores(self, importance: Callable[[Any], torch.Tensor | None]) -> dict[str, torch.Tensor]:
        """The importance of each unit, float32 [units], by the group's root; large is important."""
        found = {}
        with _quiet():
            for group in self.groups:
                scores = importance(self._group(group, range(group.units)))
                if scores is not None:
                    found[group.root] = scores.detach().float().cpu().view(-1, group.units).mean(0)
        return found

    @contextlib.contextmanager
    def without(self, removed: Mapping[str, Sequence[int]]) -> Iterator[nn.Module]:
        """The module without these units (by root), until the end of the block."""
        by_root = {group.root: group for group in self.groups}
        with self._restored():
            with _quiet():
                for root, units in removed.items():
                    if len(units):
                        self._group(by_root[root], units).prune()
            yield self.module

    def pruned(self, removed: Mapping[str, Sequence[int]]) -> nn.Module:
        """A module of its own without these units, in eval mode, its gradients dropped."""
        with self.without(removed) as module:
            own = copy.deepcopy(module).eval()
        for parameter in own.parameters():
            parameter.grad = None
        return own

    def _group(self, group: ChannelGroup, units: Sequence[int]) -> Any:
        layer = self.module.get_submodule(group.root)
        prune = self._graph.get_pruner_of_module(layer).prune_out_channels
        return self._graph.get_pruning_group(layer, prune, idxs=group.channels(list(units)))

    def _find(self, progress: Progress) -> list[ChannelGroup]:
        groups: list[ChannelGroup] = []
        covered: dict[str, str] = {}
        layers = [(name, layer) for name, layer in self.module.named_modules() if isinstance(layer, PRUNABLE)]
        whole = [name for name, layer in self.module.named_modules() if isinstance(layer, tuple(w[0] for w in WHOLE))]
        for name in whole:
            layer = self.module.get_submodule(name)
            self.left_alone[name] = next(reason for kind, reason in WHOLE if isinstance(layer, kind))
        for number, (name, layer) in enumerate(layers):
            progress(number, len(layers), f"finding what can lose channels: {name}")
            if name in covered or any(name.startswith(f"{outer}.") for outer in whole):
                continue
            try:
                group = self._whole_group(name, layer)
                covered |= dict.fromkeys(group.layers, name)
                if group.units < 2:
                    raise StageError("", why="it has one channel, or one for each part", mend="")
                through = self._through(group, whole)
                if through is not None:
                    raise StageError("", why=f"its channels go through {through}, which keeps its size", mend="")
                bound = next((other for other in group.layers if other in self.left_alone), None)
                if bound is not None:
                    raise StageError("", why=f"shares its channels with {bound}", mend="")
                self._try(group)
            except StageError as err:
                self.left_alone[name] = err.why
            except Exception as err:  # torch_pruning fails in many ways on layers that it does not know
                said = str(err).splitlines()[0] if str(err) else ""
                self.left_alone[name] = f"its channels can't be followed ({type(err).__name__}: {said[:120]})"
            else:
                groups.append(group)
        return groups

    def _whole_group(self, name: str, layer: nn.Module) -> ChannelGroup:
        with _quiet():
            prune = self._graph.get_pruner_of_module(layer).prune_out_channels
            width = int(self._graph.get_out_channels(layer))
            found = self._graph.get_pruning_group(layer, prune, idxs=list(range(width)))
        names = [name]
        parts = 1
        for dep, _ in found:
            target = dep.target.module
            if not isinstance(target, nn.Module):
                continue
            pruner = self._graph.get_pruner_of_module(target)
            if self._graph.is_out_channel_pruning_fn(dep.handler):
                if isinstance(target, PRUNABLE) and self._names[target] not in names:
                    names.append(self._names[target])
                if not (isinstance(target, PRUNABLE) and getattr(target, "groups", 1) == _width(target)):
                    parts = max(parts, pruner.get_out_channel_groups(target))
            else:
                parts = max(parts, pruner.get_in_channel_groups(target))
        return ChannelGroup(name, tuple(names), width, width // parts if width % parts == 0 else 1)

    def _through(self, group: ChannelGroup, whole: Sequence[str]) -> str | None:
        """A layer that keeps its size, in this group: all of an attention, what a recurrent layer gives."""
        with _quiet():
            for dep, _ in self._group(group, range(group.units)):
                name = self._names.get(dep.target.module)
                if name in whole and (
                    isinstance(dep.target.module, nn.MultiheadAttention)
                    or self._graph.is_out_channel_pruning_fn(dep.handler)
                ):
                    return name
        return None

    def _try(self, group: ChannelGroup) -> None:
        """Raise StageError unless half of the units can go, and going is the same as being zero."""
        with self._restored() as silenced:
            with _quiet():
                found = self._group(group, range(0, group.units, 2))
                if not self._graph.check_pruning_group(found):
                    raise StageError("", why="a layer would be left with nothing", mend="")
                comparable = _silence(found, self._graph.is_out_channel_pruning_fn, silenced)
                expected = self._outputs() if comparable else {}
                found.prune()
            same_outputs(self.module, self.signature)
            for name, tensor in self._outputs().items() if expected else ():
                want = expected[name]
                scale = max(float(want.abs().max()) if want.numel() else 0.0, 1e-3)
                if want.is_floating_point() and not torch.allclose(tensor, want, rtol=0, atol=TOLERANCE * scale):
                    why = "removing channels that are zero changes the answers: they are counted or mixed on the way"
                    raise StageError("", why=why, mend="")

    def _outputs(self) -> dict[str, torch.Tensor]:
        with torch.no_grad():
            return call(self.module, self.signature.inputs, sample_inputs(self.signature, 2))

    @contextlib.contextmanager
    def _restored(self) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
        """Whatever the block does to the layers is undone at its end; gives a list for (tensor, its old values)."""
        saved = [(m, _attributes(m), dict(m._parameters), dict(m._buffers)) for m in self.module.modules()]
        nodes, names = dict(self._graph.module2node), dict(self._graph._param_to_name)
        # Concatenations and splits keep the widths of their parts.
        operators = [
            (key, _attributes(key)) for key in nodes if key not in self._names and not isinstance(key, nn.Parameter)
        ]
        silenced: list[tuple[torch.Tensor, torch.Tensor]] = []
        try:
            yield silenced
        finally:
            for module, attributes, parameters, buffers in saved:
                module.__dict__.clear()
                module.__dict__.update(attributes)
                module._parameters.clear()
                module._parameters.update(parameters)
                module._buffers.clear()
                module._buffers.update(buffers)
            for operator, attributes in operators:
                operator.__dict__.update(attributes)
            for tensor, values in reversed(silenced):  # a layer that reads and gives the same group is there twice
                tensor.data.copy_(values)
            self._graph.module2node, self._graph._param_to_name = nodes, names
            for key, node in nodes.items():
                if isinstance(key, nn.Parameter):
                    node.module = key


def _attributes(module: nn.Module) -> dict[str, Any]:
    """A module's attributes, its lists copied: pruning changes some in place."""
    return {name: list(value) if isinstance(value, list) else value for name, value in vars(module).items()}


def same_outputs(module: nn.Module, signature: Signature) -> None:
    """Raise StageError unless the module runs and its outputs have the signature's shapes."""
    with torch.no_grad(), contextlib.redirect_stderr(io.StringIO()):  # where torch.fx prints what fails
        try:
            outputs = list(call(module, signature.inputs, sample_inputs(signature, 2)).values())
        except (RuntimeError, ValueError, IndexError, AssertionError) as err:
            raise StageError(
                "a pruned model does not run",
                why=f"its forward fails: {first_line(err)}",
                mend="look for sizes written into the forward, such as view(-1, 512)",
            ) from err
    for spec, tensor in zip(signature.outputs, outputs, strict=True):
        fits = all(isinstance(want, str) or want == have for want, have in zip(spec.shape, tensor.shape, strict=True))
        if not fits:
            why = f"the shape of the output {spec.name!r} hangs on it"
            raise StageError("a pruned model has other outputs", why=why, mend="leave --prune out for this model")


def _silence(group: Any, gives: Callable[[Any], bool], silenced: list[tuple[torch.Tensor, torch.Tensor]]) -> bool:
    """Set the group's channels to zero where they are made and where they are read; False if zero is not nothing.

    A normalization over channels counts those that are zero, too: there, removal and zero differ.
    """
    for dep, idxs in group:
        target = dep.target.module
        at = [int(getattr(index, "idx", index)) for index in idxs]
        if isinstance(target, NORMALIZING):
            return False
        if isinstance(target, nn.Parameter):
            _zero(target, dep.handler.__self__.pruning_dim if hasattr(dep.handler, "__self__") else -1, at, silenced)
        elif isinstance(target, PRUNABLE):
            transposed = bool(getattr(target, "transposed", False))
            plain = getattr(target, "groups", 1) == 1
            if gives(dep.handler):
                if plain or not transposed:
                    _zero(target.weight, 1 if transposed else 0, at, silenced)
                if target.bias is not None:
                    _zero(target.bias, 0, at, silenced)
            elif plain:
                _zero(target.weight, 0 if transposed else 1, at, silenced)
        elif isinstance(target, nn.modules.batchnorm._BatchNorm):
            for tensor in (target.weight, target.bias, target.running_mean):
                if tensor is not None:
                    _zero(tensor, 0, at, silenced)
        elif isinstance(target, nn.Embedding):
            _zero(target.weight, 1, at, silenced)
    return True


def _zero(tensor: torch.Tensor, dim: int, at: Sequence[int], silenced: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    silenced.append((tensor, tensor.detach().clone()))
    tensor.data.index_fill_(dim, torch.tensor(list(at)), 0)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """With gradients, which the graph is read from; without warnings of parameters outside layers, which are tried."""
    with torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


def _example(signature: Signature) -> tuple[torch.Tensor, ...]:
    arrays = sample_inputs(signature, 2)
    return tuple(torch.from_numpy(arrays[spec.name]) for spec in signature.inputs)


def _width(layer: Any) -> int:
    return int(layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels)
