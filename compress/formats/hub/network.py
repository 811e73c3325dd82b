"""A folder's network: built by transformers from the configuration, with the folder's weights, and given plain ends.

Its forward takes tensors by position and gives a dict of tensors: `embeddings`, all that a head gives (`logits`, of a
detector `pred_boxes`, too), or `last_hidden_state`.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from compress.artifact import TensorSpec
from compress.console.wording import AssumedWarning, counted
from compress.errors import CheckpointError, ToolkitError, first_line
from compress.formats.hub.bounds import TooMuchError, counted_building
from compress.formats.hub.config import architecture_of
from compress.formats.hub.fit import refuse_lack, refuse_leftovers, refuse_misfits, refuse_no_numbers, refuse_types
from compress.formats.hub.folder import WHOLE, HubFolder
from compress.formats.hub.inputs import OWN_MODULE, inputs_of, left_out, main_input
from compress.formats.hub.pooling import Tail, refuse_pooling, tail_by, tail_of, unpoolable
from compress.formats.hub.type_ids import type_ids_of
from compress.processor import EMBEDDINGS

__all__ = ["Built", "build"]

# What a class's name ends with, and what is done with it.
_TASKS: Mapping[str, str] = {
    "ForSequenceClassification": "sequence-classification",
    "ForTokenClassification": "token-classification",
    "ForImageClassification": "image-classification",
    "ForImageClassificationWithTeacher": "image-classification",
    "ForMaskedLM": "logits",
    "ForCausalLM": "logits",
    "LMHeadModel": "logits",
    "ForPreTraining": "features",
    "WithProjection": EMBEDDINGS,
}
# Networks of two towers, each a class by itself.
_TOWERS: Mapping[str, Mapping[str, str]] = {
    "CLIPModel": {"text": "CLIPTextModelWithProjection", "image": "CLIPVisionModelWithProjection"},
    "SiglipModel": {"text": "SiglipTextModel", "image": "SiglipVisionModel"},
}
_PART_CONFIGS = {"text": "text_config", "image": "vision_config"}
# What the body in front of a head gives; the first of them is what a network without a head gives.
_BODY = ("last_hidden_state", "pooler_output", "encoder_last_hidden_state")


@dataclass(frozen=True)
class Built:
    """A network in evaluation mode.

    Attributes:
        module: takes `inputs` by position, gives a dict of tensors.
        inputs: with symbolic batch, and sequence.
        kind, task: see `compress.processor.Processor`.
        missing: names of weights, as the module has them, that the folder lacks.
        config: transformers' own.
        longest: tokens that it has positions for; None where nothing says.
        type_ids: whether its tokenizer passes token_type_ids; None where that can't be known.
        unpooled: whether it is an encoder of texts with something for each token, which a pooling may stand behind.
        left_out: what its forward takes besides, see `left_out`.
    """

    module: Network
    inputs: tuple[TensorSpec, ...]
    kind: str
    task: str
    missing: frozenset[str]
    config: Any
    longest: int | None
    type_ids: bool | None = None
    unpooled: bool = False
    left_out: tuple[str, ...] = ()


class Network(nn.Module):
    """A transformers model whose inputs are tensors by position, and whose outputs are tensors by name.

    Attributes:
        left: names of what it gave besides, in its last run.
    """

    def __init__(self, model: nn.Module, names: tuple[str, ...], tail: nn.Module | None) -> None:
        super().__init__()
        self.model, self.tail, self.names = model, tail, names
        self.left: set[str] = set()

    def forward(self, *tensors: torch.Tensor) -> dict[str, torch.Tensor]:
        given = dict(zip(self.names, tensors, strict=True))
        found = self.model(**given, return_dict=True)
        if self.tail is not None:
            return {"embeddings": self.tail(found["last_hidden_state"], given["attention_mask"])}
        plain = {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}
        heads = {name: value for name, value in plain.items() if name not in _BODY and name not in given}
        if not heads and _BODY[0] in plain:
            heads = {_BODY[0]: plain[_BODY[0]]}
            self.left |= {name for name in plain if name not in heads}
        self.left |= {name for name in found if name not in plain}
        if not heads:
            raise CheckpointError(
                f"can't take a {type(self.model).__name__}",
                why=f"its outputs are {', '.join(list(found)[:4])}, none of them a tensor of its own",
                mend=OWN_MODULE,
            )
        return {"embeddings" if name.endswith("_embeds") else name: value for name, value in heads.items()}


def build(
    transformers: Any, folder: HubFolder, config: Any, state: Mapping[str, torch.Tensor], part: str | None,
    pooling: str | None = None, pairs: bool = False,
) -> Built:  # fmt: skip
    """The network with its weights.

    Args:
        transformers: the library.
        folder: what it is from.
        config: of `config_of`.
        state: of `state_of`.
        part: "text" or "image", of a network of two towers.
        pooling: of `POOLINGS`, behind the encoder of a folder that says none; a head is left out then.
        pairs: whether it is given two texts at a time; an encoder of sentences is not.

    Raises:
        CheckpointError: no class of transformers is named, the weights don't fit, or it takes other inputs than
            tokens, images or a spectrogram.
    """
    name = architecture_of(folder)
    towers = _TOWERS.get(name)
    if towers is not None:
        if part is None or part not in towers:
            raise CheckpointError(
                f"can't take all of {folder.path}",
                why=f"a {name} is two networks that are run apart, {' and '.join(towers)}",
                mend=f"add --part {' or --part '.join(towers)}",
            )
        both, name, config = config, towers[part], getattr(config, _PART_CONFIGS[part])
        # The whole network reads its own; those of the towers may name another width, which nothing reads.
        if getattr(both, "projection_dim", None) is not None and hasattr(config, "projection_dim"):
            config.projection_dim = both.projection_dim
        config.architectures = [name]
    elif part is not None:
        raise CheckpointError(
            f"can't take a part of {folder.path}", why=f"a {name} is one network", mend="leave --part out"
        )
    refuse_pooling(pooling, name, part, folder)
    pooled = bool(folder.modules) or pooling is not None
    kind = _class(transformers, name, config, folder, base=pooled)
    # A decoder that goes from token to token is left out; one of objects (DETR's) answers at once.
    double = bool(getattr(config, "is_encoder_decoder", False)) and main_input(kind.forward) != "pixel_values"
    if name.endswith("ForMultipleChoice") or (double and name.endswith("Classification") and not pooled):
        raise CheckpointError(
            f"can't take the network of {folder.path}",
            why=f"a {name} " + ("classifies by its decoder, and encoders alone are taken" if double else
                                "takes several texts for each sample"),
            mend=OWN_MODULE,
        )  # fmt: skip
    refuse_types(state, _bearable(kind, config, state, folder), folder)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model, told = kind.from_pretrained(
                None, config=config, state_dict=dict(state), dtype=torch.float32, attn_implementation="eager",
                output_loading_info=True, ignore_mismatched_sizes=True, **_without_pooler(kind, state),
            )  # fmt: skip
    except ToolkitError:
        raise
    except Exception as err:  # each class checks its configuration and its weights in its own way
        raise CheckpointError(
            f"the weights of {folder.path} don't fit its configuration",
            why=f"{kind.__name__}: {first_line(err)[:250]}",
            mend=WHOLE,
        ) from err
    refuse_misfits(told, folder)
    refuse_leftovers(model, told, folder, on_purpose=towers is not None or bool(folder.modules))
    refuse_no_numbers(model, folder)
    if 2 * len(told["missing_keys"]) > sum(1 for _ in model.parameters()):
        refuse_lack(told["missing_keys"], model, folder)  # before a network is exported that is mostly made up
    missing = frozenset(f"model.{key}" for key in told["missing_keys"])
    model = model.eval()
    if double:
        told_of = f"{folder.path}: of a {kind.__name__}, an encoder and a decoder, the encoder alone is taken"
        warnings.warn(told_of, AssumedWarning, stacklevel=3)
        whole = {id(module): path for path, module in model.named_modules()}
        model = model.get_encoder()
        path = f"model.{whole[id(model)]}."
        missing = frozenset(f"model.{key.removeprefix(path)}" for key in missing if key.startswith(path))
    tail = tail_of(folder) if folder.modules else tail_by(pooling)
    task = EMBEDDINGS if tail is not None else _task(kind.__name__)
    types = type_ids_of(transformers, folder, config)
    asked = (pairs and task != EMBEDDINGS) or task == "sequence-classification"
    inputs, sort = inputs_of(model, config, folder, types=types, pairs=asked)
    if pooling is not None and sort != "text":
        raise unpoolable(folder, f"a {kind.__name__} takes no tokens of texts")
    module = Network(model, tuple(spec.name for spec in inputs), tail).eval()
    longest = _longest(config) if sort == "text" else None
    unpooled = sort == "text" and _is_unpooled(kind.__name__, task, part, tail)
    besides = left_out(model, config, module.names)
    return Built(module, inputs, sort, task, missing, config, longest, types, unpooled, besides)


def _without_pooler(kind: Any, state: Mapping[str, torch.Tensor]) -> dict[str, bool]:
    """No pooler of BERT's where the weights have none, as a language model's: it would be drawn at random."""
    takes = "add_pooling_layer" in inspect.signature(kind).parameters
    return {"add_pooling_layer": False} if takes and not any("pooler." in name for name in state) else {}


def _is_unpooled(name: str, task: str, part: str | None, tail: Tail | None) -> bool:
    return tail is None and part is None and (task == "features" or name.endswith("ForMaskedLM"))


def _class(transformers: Any, name: str, config: Any, folder: HubFolder, *, base: bool) -> Any:
    found = getattr(transformers, name, None) if name else None
    if name and not (inspect.isclass(found) and issubclass(found, transformers.PreTrainedModel)):
        raise CheckpointError(
            f"can't load {folder.path}",
            why=f"its config.json names {name!a}, which transformers {transformers.__version__} does not have",
            mend="install the release of transformers that has it; or save the model with "
            "compress.save(module, path, inputs=…)",
        )
    if base or found is None:  # a sentence encoder's head is in its modules, or is its pooling
        found = transformers.MODEL_MAPPING.get(type(config), None)
        found = found[0] if isinstance(found, tuple) else found
        if not name and not base and found is not None:
            told = (
                f'{folder.path / "config.json"} has no "architectures", so a {found.__name__} without a head is taken; '
                'if the weights have one, name its class there: "architectures": ["BertForSequenceClassification"], say'
            )
            warnings.warn(told, AssumedWarning, stacklevel=4)
    if found is None:
        raise CheckpointError(
            f"can't load {folder.path}", why="its config.json names no architecture", mend="save it again"
        )
    return found


def _bearable(kind: Any, config: Any, state: Mapping[str, torch.Tensor], folder: HubFolder) -> set[str]:
    """Refuse a configuration of far more than the weights explain, before memory is taken for it.

    Returns:
        Names of the network's tensors of whole numbers.
    """
    held = sum(tensor.numel() for tensor in state.values())
    try:
        with torch.device("meta"), counted_building(len(state), held), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            network = kind(config)
    except TooMuchError as err:
        raise CheckpointError(
            f"the weights of {folder.path} don't fit its configuration",
            why=f"{err}; the files hold {counted(len(state), 'tensors')} of {held:,} elements",
            mend=WHOLE,
        ) from err
    except Exception as err:  # a configuration is anybody's
        raise CheckpointError(
            f"can't build {folder.path}", why=f"{kind.__name__}: {first_line(err)[:250]}", mend=WHOLE
        ) from err
    return {name for name, buffer in network.named_buffers() if not buffer.is_floating_point()}


def _task(name: str) -> str:
    return next((task for end, task in _TASKS.items() if name.endswith(end)), "features")


def _longest(config: Any) -> int | None:
    """Positions that there are, less those that stand before the first token's (RoBERTa's).

    Networks with any number of them say so by none, or by -1 (XLNet's).
    """
    found = getattr(config, "max_position_embeddings", None)
    if not isinstance(found, int) or found < 1:
        return None
    before = (getattr(config, "pad_token_id", None) or 0) + 1
    return found - before if getattr(config, "model_type", "") in _OFFSET and found > before else found


_OFFSET = ("roberta", "xlm-roberta", "camembert", "mpnet", "longformer", "xlm-roberta-xl", "data2vec-text")
