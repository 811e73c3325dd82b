"""The toolkit's own model file: a graph of plain data (`compress.formats.native.graph`) with its signature."""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from compress.artifact import Signature, TensorSpec
from compress.console.wording import counted
from compress.errors import CheckpointError, SignatureError, first_line
from compress.formats.native.graph import GraphError, from_data, to_data
from compress.formats.pickles.read import unpickle
from compress.model import TorchModel, call, example_inputs, sample_inputs, symbols_of
from compress.model.apart import share_of_own_size
from compress.model.frozen import freeze, frozen_names
from compress.vetting.replace import replacing_file

__all__ = ["is_native", "read", "write"]

FORMAT = "compress.model"
VERSION = 2
LARGEST_SAMPLE = 1 << 28
TOLERANCE = 1e-4
MOST_TENSORS, LONGEST = 200, 200  # of a signature, and the letters of each, name and shape


def write(model: TorchModel, path: Path, original: TorchModel | None = None) -> None:
    """Write a layered model.

    Args:
        model: whose forward torch.fx can trace.
        path: the file; replaced whole.
        original: what was written is loaded again, and has to answer as this does.

    Raises:
        CheckpointError: its forward has no plain form, or the layers do more than it says.
    """
    instead = "save model.state_dict() with torch.save instead, and export it with --model package.module:factory"
    try:
        graph = to_data(model.module, inputs=len(model.signature.inputs))
        from_data(graph)
    except GraphError as err:
        raise CheckpointError(
            f"can't write {path} so that it loads without your code", why=str(err), mend=instead
        ) from err
    signature = model.signature.to_dict()
    texts = [*signature["inputs"], *signature["outputs"]]
    if not _told_briefly(texts):
        long = max(texts, key=len)
        raise CheckpointError(
            f"can't write {path}",
            why=f"it has {counted(len(texts), 'inputs and outputs')}, the longest of "
            f"{counted(len(long), 'letters')} with its shape ({long[:20]}…); a file may tell of {MOST_TENSORS}, each "
            f"shorter than {LONGEST}",
            mend="give each input and output a short name, and pack what are many into fewer tensors",
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    data: dict[str, Any] = {"format": FORMAT, "version": VERSION, "signature": signature, "graph": graph}
    if frozen := sorted(frozen_names(model.module)):
        data["frozen"] = frozen
    with replacing_file(path) as file:
        torch.save(data, file)
        file.flush()
        beside = Path(file.name)
        if original is not None and (why := _differs(original, _model(unpickle(beside, trust=False), beside))):
            raise CheckpointError(f"can't write {path} so that it gives the same answers", why=why, mend=instead)


def _differs(original: TorchModel, loaded: TorchModel) -> str | None:
    """How the answers differ, if they do by more than rounding."""
    arrays, wanted = _answers(original, 2)
    try:
        _, given = _answers(loaded, 2, arrays)
    except Exception as err:  # what its forward reads of a tensor may be known only when it is run
        return f"its graph does not run: {first_line(err)[:200]}"
    for (name, want), got in zip(wanted.items(), given.values(), strict=True):
        if want.dtype != got.dtype or want.shape != got.shape:
            return f"{name} is {got.dtype}{list(got.shape)}, not {want.dtype}{list(want.shape)}"
        want, got = want.double(), got.double()
        if torch.equal(torch.nan_to_num(want), torch.nan_to_num(got)):
            continue
        if share_of_own_size(want.numpy(), got.numpy()) > TOLERANCE:
            return f"{name} is off by {float((want - got).abs().max()):.3g}: its layers do more than their forward says"
    return None


def _answers(
    model: TorchModel, batch: int, arrays: Mapping[str, Any] | None = None
) -> tuple[Mapping[str, Any], dict[str, torch.Tensor]]:
    """What the model gives at its representative sizes, or where it does not run at these, at the smallest."""
    specs = model.signature.inputs
    smallest = {symbol: 2 + index for index, symbol in enumerate(symbols_of(specs))}
    tried = [sample_inputs(model.signature, batch), example_inputs(specs, smallest)] if arrays is None else [arrays]
    while True:
        given = tried.pop(0)
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=()):
                torch.manual_seed(0)
                return given, call(model.module, specs, given)
        except Exception:  # of a graph that may be anybody's
            if not tried:
                raise


def is_native(content: Any) -> bool:
    """Whether a file's content is of this format."""
    return isinstance(content, dict) and type(content.get("format")) is str and content["format"] == FORMAT


def read(content: Mapping[str, Any], path: Path) -> TorchModel:
    """The model of a file's content, after its graph has been run once.

    Raises:
        CheckpointError: it is malformed, of a newer format, or gives other outputs than it says.
    """
    model = _model(content, path)
    _refuse_other_outputs(model, path)
    return model


def _model(content: Mapping[str, Any], path: Path) -> TorchModel:
    version = content.get("version")
    if type(version) is int and VERSION < version < 1000:
        why = f"its format is version {version}, this release reads up to {VERSION}"
        raise CheckpointError(f"can't read {path}", why=why, mend="install the release that wrote it, or a newer one")
    again = "write it again with compress.save"
    if type(version) is not int or not 0 < version <= VERSION:
        raise CheckpointError(f"can't read {path}", why="it is malformed: it has no version", mend=again)
    try:
        model = TorchModel(from_data(content["graph"]), _signature(content["signature"]))
        if frozen := content.get("frozen"):
            freeze(model.module, _names(frozen))
        return model
    except (GraphError, LookupError, ArithmeticError, TypeError, ValueError, AttributeError, SignatureError) as err:
        why = err.why if isinstance(err, SignatureError) else str(err)
        raise CheckpointError(f"can't read {path}", why=f"it is malformed: {why[:300]}", mend=again) from err


def _refuse_other_outputs(model: TorchModel, path: Path) -> None:
    """A file says what its graph gives; whether it does is seen when it is run."""
    again = "write it again with compress.save"
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # where torch.fx prints what fails
            _, answers = _answers(model, 1)
    except Exception as err:  # of a graph that may be anybody's
        why = f"its graph does not run on inputs of its signature: {first_line(err)[:200]}"
        raise CheckpointError(f"can't read {path}", why=why, mend=again) from err
    for spec, answer in zip_longest(model.signature.outputs, answers.values()):
        given = None if answer is None else f"{str(answer.dtype).removeprefix('torch.')}{list(answer.shape)}"
        if spec is None or answer is None or not _fits(spec, answer):
            raise CheckpointError(
                f"can't read {path}", why=f"its graph gives {given} where its signature says {spec}", mend=again
            )


def _fits(spec: TensorSpec, answer: torch.Tensor) -> bool:
    return (
        str(answer.dtype).removeprefix("torch.") == spec.dtype
        and answer.dim() == len(spec.shape)
        and all(isinstance(want, str) or want == have for want, have in zip(spec.shape, answer.shape, strict=True))
    )


def _told_briefly(texts: list[Any]) -> bool:
    """Whether inputs and outputs are as few, and as short, as a file may have them."""
    return len(texts) <= MOST_TENSORS and all(type(text) is str and len(text) < LONGEST for text in texts)


def _names(data: Any) -> frozenset[str]:
    if type(data) is not list or not all(type(name) is str for name in data):
        raise ValueError("the names of what is frozen are no list of texts")
    return frozenset(data)


def _signature(data: Any) -> Signature:
    """A signature of a file, whose sizes an array can have."""
    if type(data) is not dict or not all(type(data.get(key)) is list for key in ("inputs", "outputs")):
        raise ValueError("its signature is not plain")
    texts = [*data["inputs"], *data["outputs"]]
    if not _told_briefly(texts):
        raise ValueError("its signature is not plain")
    signature = Signature.from_dict(data)
    sizes = signature.at(1)
    elements = 0  # of all together: each would fit where there are many
    for spec in (*signature.inputs, *signature.outputs):
        sample = [sizes.get(size, 1) if isinstance(size, str) else size for size in spec.shape]
        elements += math.prod(sample)
        if elements > LARGEST_SAMPLE or min(sample, default=1) < 1 or not spec.name.isprintable():
            raise ValueError(f"its signature has sizes that can't be: {spec.name[:100]}")
    return signature
