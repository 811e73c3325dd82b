"""The models of `compress measure`: opened, held to one signature and its sizes, and what each runs on."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from compress.artifact import RUNTIMES, Artifact, Runtime, Signature
from compress.data.dataset import Dataset
from compress.data.reading import arrays_of
from compress.data.sizes import sizes_in
from compress.errors import RecipeError, StageError
from compress.formats.hub.folder import is_hub_folder
from compress.formats.onnx.read import signature_of_onnx, vetted_onnx
from compress.jobs.source import load_source, read_by, refuse_folder
from compress.model import EngineModel, Model, OnnxModel, TorchModel, sample_inputs
from compress.options import MeasureOptions
from compress.processor import Processor
from compress.runtime.backends import Backend, open_model
from compress.runtime.backends.onnxrt_device import OnnxDeviceBackend, ProviderOptions
from compress.runtime.backends.openvino_cpu import installed
from compress.runtime.backends.pytorch_device import TorchDeviceBackend
from compress.signature import parse_sizes
from compress.tensorrt.profiles import ranges_of

__all__ = ["backends_of", "names_of", "one_signature", "opened", "sized"]


def names_of(paths: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that tell them apart."""
    for parts in range(1, max(len(path.parts) for path in paths) + 1):
        names = [str(Path(*path.parts[-parts:])) for path in paths]
        if len(set(names)) == len(names):
            return names
    raise RecipeError("can't tell the models apart", why="a path is given twice", mend="give each once")


def opened(path: Path, options: MeasureOptions) -> Model:
    refuse_folder(path)
    if path.is_dir() and not is_hub_folder(path):
        artifact = Artifact.load(path)
        if artifact.format == "plan":
            if not options.trust:
                raise StageError(
                    f"won't load {artifact.model_path}: it may run code",
                    why="a TensorRT engine is compiled code, and TensorRT does not check it",
                    mend="measure its model.onnx; or, if you built it or trust whoever did, add --trust",
                )
            return EngineModel(artifact.model_path, artifact.signature)
        return OnnxModel(vetted_onnx(artifact.model_path), artifact.signature, processor=read_by(artifact, options))
    if path.suffix == ".onnx":
        return OnnxModel(path, signature_of_onnx(path))
    return load_source(path, options)


def one_signature(models: Mapping[str, Model]) -> Signature:
    """The first model's: all are given its inputs by name, and their answers are held against its."""
    (first, model), *others = models.items()
    for name, other in others:
        if _taken(other.signature) != _taken(model.signature):
            raise RecipeError(
                f"can't measure {name} beside {first}",
                why=f"it takes {', '.join(map(str, other.signature.inputs))}, the other "
                f"{', '.join(map(str, model.signature.inputs))}",
                mend="measure models of one signature",
            )
        if len(other.signature.outputs) != len(model.signature.outputs):
            raise RecipeError(
                f"can't measure {name} beside {first}",
                why=f"it gives {', '.join(map(str, other.signature.outputs))}, the other "
                f"{', '.join(map(str, model.signature.outputs))}",
                mend="measure models of one signature",
            )
    return model.signature


def _taken(signature: Signature) -> dict[str, tuple[str, tuple[int | str, ...]]]:
    return {spec.name: (spec.dtype, tuple(spec.shape)) for spec in signature.inputs}


def backends_of(
    name: str,
    model: Model,
    device: torch.device,
    options: MeasureOptions,
    signature: Signature,
    not_run: dict[str, str],
) -> Iterator[tuple[str, Backend]]:
    """What a model runs on: torch once or twice, an ONNX file once for each runtime or provider."""
    cpu = device.type == "cpu"
    if isinstance(model, TorchModel):
        eager = open_model(model, threads=options.threads) if cpu else TorchDeviceBackend(model, device)
        yield f"{name} (torch)", eager
        if options.compile:
            yield f"{name} (compiled)", TorchDeviceBackend(model, device, compiled=True)
    elif isinstance(model, EngineModel):
        if cpu:
            raise StageError(
                f"can't measure {name} on the CPU", why="it is a TensorRT engine", mend="add --device cuda"
            )
        from compress.runtime.backends.trt import TrtBackend

        yield name, TrtBackend(model)
    elif cpu:
        yield from _on_cpu(name, model, options, signature, not_run)
    else:
        for provider in options.provider:
            asked = ProviderOptions(
                provider,
                options.cuda_graphs,
                options.tf32,
                options.engine_cache,
                options.threads,
                channels_last=options.channels_last,
            )
            yield f"{name} ({provider})" if len(options.provider) > 1 else name, OnnxDeviceBackend(model, asked)


def _on_cpu(
    name: str, model: OnnxModel, options: MeasureOptions, signature: Signature, not_run: dict[str, str]
) -> Iterator[tuple[str, Backend]]:
    """An ONNX file, once for each runtime: what is asked for must run it, what is only there need not."""
    both: tuple[Runtime, ...] = RUNTIMES if installed() else ("onnxruntime",)
    runtimes = both if options.runtime == "auto" else (options.runtime,)
    for runtime in runtimes:
        shown = f"{name} ({runtime})" if len(runtimes) > 1 else name
        try:
            backend = open_model(dataclasses.replace(model, runtime=runtime), threads=options.threads)
            if runtime == "openvino" and options.runtime == "auto":
                backend.infer(sample_inputs(signature, 1))
        except StageError as err:
            if options.runtime == "auto" and runtime == "openvino":
                not_run[shown] = err.why
                continue
            raise
        if backend.emulated:
            raise StageError(
                f"can't time {name} on the CPU",
                why="it is in BF16, which ONNX Runtime only emulates on this CPU",
                mend="add --device cuda where there is a GPU",
            )
        yield shown, backend


def sized(
    signature: Signature, options: MeasureOptions, processor: Processor | None
) -> tuple[Signature, Dataset | None]:
    """With the sizes that are asked for, else those of the data, else those of the first model's file; and the data.

    Raises:
        RecipeError: the data is of another size than is asked for.
    """
    asked = parse_sizes(options.size)
    asked |= {name: sizes[1] for name, sizes in ranges_of(options.dims).items() if name not in signature.batches}
    data = None if options.data is None else Dataset.open(arrays_of(options.data, processor), signature)
    held = {} if data is None else sizes_in(data, signature)
    for dim, size in asked.items():
        if held.get(dim, size) != size:
            raise RecipeError(
                f"can't measure {options.data} at {dim} = {size}",
                why=f"its samples have {dim} = {held[dim]}",
                mend="leave --size and --dims out, or --data for random inputs",
            )
    return signature.sized(held, "from the data").sized(asked), data
