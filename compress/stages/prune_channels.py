"""Structural pruning: whole channels go, so that the layers become smaller, not sparser.

Dependency graph and group importance: Fang et al., DepGraph: Towards Any Structural Pruning, CVPR 2023, section 3.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
import torch_pruning as tp
from torch import nn

from compress.artifact import Signature
from compress.errors import RecipeError, StageError
from compress.measure import torch_macs, torch_params
from compress.model import Model, TorchModel, call, example_inputs
from compress.stages import Given, Progress

__all__ = ["PruneChannels"]

TOLERANCE = 0.02
SEARCH_STEPS = 14
# Channel counts that vector units like, tried in this order until one meets the fraction.
ROUND_TO = (16, 8, 4, 2, 1)
PRUNABLE = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, nn.Linear)


@dataclass(frozen=True)
class PruneChannels:
    """Remove a fraction of the model's MACs.

    Attributes:
        fraction: of the MACs, above 0 and below 1; reached within 0.02.
        importance: "magnitude" (L2 norm of all weights that go with a channel) or "random", the control.
        seed: for "random".
        round_to: channel counts are multiples of this; None takes the largest of 16, 8, 4, 2, 1 that still reaches the
            fraction.
    """

    fraction: float
    importance: Literal["magnitude", "random"] = "magnitude"
    seed: int = 0
    round_to: int | None = None

    name: ClassVar[str] = "prune_channels"
    takes: ClassVar[type] = TorchModel
    gives: ClassVar[type] = TorchModel

    @property
    def options(self) -> Mapping[str, Any]:
        return {"fraction": self.fraction, "importance": self.importance, "seed": self.seed, "round_to": self.round_to}

    def check(self, model: Model) -> None:
        if not 0 < self.fraction < 1:
            raise RecipeError(
                f"can't prune {self.fraction}",
                why="--prune is the fraction of multiply-accumulates to remove: above 0 and below 1",
                mend="try --prune 0.5",
            )
        if self.round_to is not None and self.round_to < 1:
            why = f"--round-to is {self.round_to}: channel counts are multiples of it"
            raise RecipeError("can't prune to such channel counts", why=why, mend="give 8 or 16, or leave it out")
        if isinstance(model, TorchModel) and not model.layered:
            raise RecipeError(
                "can't prune this file",
                why="TorchScript and exported programs have no layers any more",
                mend="give the model from before: compress.save(module, path, inputs=…), or leave --prune out",
            )

    def run(self, model: TorchModel, folder: Path, progress: Progress) -> Given:  # noqa: ARG002
        before = torch_macs(model.module, model.signature)
        progress(0, SEARCH_STEPS + 1, "finding what must keep its shape")
        ignored = fixed_layers(model)
        best: tuple[float, nn.Module] | None = None
        rounded = 1
        for rounded in ROUND_TO if self.round_to is None else (self.round_to,):
            best = self._search(model, before, list(ignored), rounded, progress)
            if best is not None and abs(best[0] - self.fraction) <= TOLERANCE:
                break
        if best is None or best[0] <= 0:
            raise StageError(
                "nothing was pruned",
                why=f"no layer could lose a channel; {_listed(ignored)}",
                mend="leave --prune out for this model",
            )
        removed, pruned = best
        if abs(removed - self.fraction) > TOLERANCE:
            raise StageError(
                f"can't remove {self.fraction:.0%} of the MACs",
                why=f"the nearest that keeps the outputs' shapes is {removed:.1%}; {_listed(ignored)}",
                mend=f"ask for --prune {max(removed, 0.01):.2f}",
            )
        _same_outputs(pruned, model.signature)
        progress(1, 1, f"{removed:.1%} of the MACs removed")
        return Given(
            TorchModel(pruned, model.signature),
            did=f"removed {removed:.1%} of the MACs and {1 - torch_params(pruned) / torch_params(model.module):.1%} of "
            f"the weights by {self.importance}",
            details={
                "macs_removed": removed,
                "round_to": rounded,
                "channels": _channels(model.module, pruned),
                "left_alone": ignored,
            },
        )

    def _search(
        self, model: TorchModel, before: int, ignored: list[str], rounded: int, progress: Progress
    ) -> tuple[float, nn.Module] | None:
        """Bisect the channel ratio: it is not the fraction of MACs, since a layer shrinks on both sides."""
        lowest, highest = 0.0, 1.0
        best: tuple[float, nn.Module] | None = None
        for step in range(SEARCH_STEPS):
            ratio = (lowest + highest) / 2
            candidate = self._pruned(model, ratio, ignored, rounded)
            removed = 1 - torch_macs(candidate, model.signature) / before
            if best is None or abs(removed - self.fraction) < abs(best[0] - self.fraction):
                best = removed, candidate
            lowest, highest = (ratio, highest) if removed < self.fraction else (lowest, ratio)
            progress(step + 1, SEARCH_STEPS + 1, f"channel ratio {ratio:.3f} removes {removed:.1%}")
            if abs(removed - self.fraction) < TOLERANCE / 10:
                break
        return best

    def _pruned(self, model: TorchModel, ratio: float, ignored: list[str], rounded: int) -> nn.Module:
        """A copy that lost this ratio of channels, over all layers together (the weakest groups go first)."""
        module = copy.deepcopy(model.module)
        for parameter in module.parameters():
            parameter.requires_grad_(parameter.is_floating_point())
        importance = (
            tp.importance.GroupMagnitudeImportance(p=2)
            if self.importance == "magnitude"
            else tp.importance.RandomImportance()
        )
        with torch.random.fork_rng(), torch.enable_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of parameters outside layers, which fixed_layers has tried
            torch.manual_seed(self.seed)
            pruner = tp.pruner.BasePruner(
                module,
                _example(model.signature),
                importance=importance,
                pruning_ratio=ratio,
                # With one ratio over all layers, a weak layer could vanish altogether.
                max_pruning_ratio=min(0.9, ratio * 1.5),
                global_pruning=True,
                round_to=rounded,
                ignored_layers=[module.get_submodule(name) for name in ignored],
            )
            pruner.step()
        return module.eval()


def fixed_layers(model: TorchModel) -> dict[str, str]:
    """Layers whose channels can't go, with the reason: found by taking one from each group and running the model."""
    reasons: dict[str, str] = {}
    while True:
        module = copy.deepcopy(model.module)
        for parameter in module.parameters():
            parameter.requires_grad_(parameter.is_floating_point())
        failed = _first_failure(module, model.signature, reasons)
        if failed is None:
            return reasons
        reasons |= failed


def _first_failure(module: nn.Module, signature: Signature, known: Mapping[str, str]) -> dict[str, str] | None:
    names = {layer: name for name, layer in module.named_modules()}
    with torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        graph = tp.DependencyGraph().build_dependency(module, example_inputs=_example(signature))
        tried: set[nn.Module] = set()
        for name, layer in list(module.named_modules()):
            if name in known or layer in tried or not isinstance(layer, PRUNABLE):
                continue
            try:
                prune = graph.get_pruner_of_module(layer).prune_out_channels
                width = graph.get_out_channels(layer)
                step = max(1, width // getattr(layer, "groups", 1))
                group = graph.get_pruning_group(layer, prune, idxs=list(range(0, width, step)))
                roots = {d.dep.target.module for d in group if d.dep.pruning_fn == prune}
                tried |= roots
                if any(names.get(root) in known for root in roots):
                    return {name: f"shares its channels with {next(names[r] for r in roots if names.get(r) in known)}"}
                if not graph.check_pruning_group(group):
                    continue
                group.prune()
                _same_outputs(module, signature)
            except StageError as err:
                return {name: err.why}
            except Exception as err:  # torch_pruning fails in many ways on layers that it does not know
                return {name: f"{type(err).__name__}: {str(err).splitlines()[0] if str(err) else ''}"}
    return None


def _same_outputs(module: nn.Module, signature: Signature) -> None:
    """Raise StageError unless the module runs and its outputs have the signature's shapes."""
    with torch.no_grad():
        try:
            outputs = list(call(module, signature.inputs, example_inputs(signature.inputs, 2)).values())
        except (RuntimeError, ValueError, IndexError) as err:
            raise StageError(
                "a pruned model does not run",
                why=f"its forward fails: {str(err).splitlines()[0]}",
                mend="look for sizes written into the forward, such as view(-1, 512)",
            ) from err
    for spec, tensor in zip(signature.outputs, outputs, strict=True):
        fits = all(isinstance(want, str) or want == have for want, have in zip(spec.shape, tensor.shape, strict=True))
        if not fits:
            why = f"the shape of the output {spec.name!r} hangs on it"
            raise StageError("a pruned model has other outputs", why=why, mend="leave --prune out for this model")


def _example(signature: Signature) -> tuple[torch.Tensor, ...]:
    arrays = example_inputs(signature.inputs, 2)
    return tuple(torch.from_numpy(arrays[spec.name]) for spec in signature.inputs)


def _channels(before: nn.Module, after: nn.Module) -> dict[str, list[int]]:
    """Output channels of each layer, before and after."""
    table = {}
    for name, layer in before.named_modules():
        if isinstance(layer, PRUNABLE):
            now = after.get_submodule(name)
            table[name] = [_width(layer), _width(now)]
    return table


def _width(layer: Any) -> int:
    return int(layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels)


def _listed(ignored: Mapping[str, str]) -> str:
    shown = "; ".join(f"{name} ({reason})" for name, reason in list(ignored.items())[:3])
    return f"left alone: {shown or 'none'}" + (f" and {len(ignored) - 3} more" if len(ignored) > 3 else "")
