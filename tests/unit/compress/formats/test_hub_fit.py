"""A Hugging Face folder whose weights and network are not one another's is refused, and says what of it."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from compress.console.wording import AssumedWarning
from compress.errors import CheckpointError
from compress.formats.checkpoint import load
from compress.formats.hub.config import offline
from compress.formats.hub.folder import open_hub_folder
from compress.formats.hub.pooling import tail_of
from compress.model import call, sample_inputs
from tests.hub_models import SIZES, bert_folder, with_config

State = dict[str, torch.Tensor]
QUERY = "bert.encoder.layer.0.attention.self.query"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bert_folder(tmp_path_factory.mktemp("hub") / "bert")


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "bert"))


def _written(folder: Path, configuration: str, network: str, **sizes: Any) -> Path:
    with offline() as transformers:
        torch.manual_seed(0)
        config = getattr(transformers, configuration)(**sizes)
        getattr(transformers, network)(config).save_pretrained(folder)
    return folder


def _with_weights(folder: Path, change: Callable[[State], State]) -> Path:
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    state = change(load_file(path))
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, path, metadata={"format": "pt"})
    return folder


def _refused(folder: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    return caught.value


def _second_layer(state: State) -> State:
    layer = {name: value for name, value in state.items() if "layer.0" in name}
    return state | {name.replace("layer.0", "layer.1"): value.clone() for name, value in layer.items()}


MISFITS: dict[str, tuple[Callable[[State], State], str, str]] = {
    "a layer more than the configuration says": (_second_layer, "16 tensors, bert.encoder.layer.1.", "again"),
    "an adapter": (lambda s: s | {f"{QUERY}.lora_A.weight": torch.ones(4, 32)}, "adapter", "merge"),
    "an adapter beside the network": (lambda s: s | {"extra.lora_B.default.weight": torch.ones(4)}, "adapter", "merge"),
    "scales": (lambda s: s | {f"{QUERY}.weight_scale": torch.ones(32)}, "scales", "float32"),
    "scales in front of the base's name": (
        lambda s: s | {f"{QUERY.removeprefix('bert.')}.SCB": torch.ones(32)}, "scales", "float32",
    ),
    "a norm that there is not": (lambda s: s | {f"{QUERY}_norm.weight": torch.ones(32)}, "query_norm", "again"),
    "INT8": (lambda s: s | {f"{QUERY}.weight": torch.ones(32, 32, dtype=torch.int8)}, "int8", "float32"),
    "FP8": (lambda s: {k: v.to(torch.float8_e4m3fn) for k, v in s.items()}, "float8_e4m3fn", "float32"),
    "NaN": (lambda s: s | {f"{QUERY}.bias": torch.full((32,), torch.nan)}, f"{QUERY}.bias is NaN", "checkpoint"),
    "infinity": (lambda s: s | {f"{QUERY}.bias": torch.full((32,), torch.inf)}, "is infinite", "checkpoint"),
    "another number of classes": (
        lambda s: s | {"classifier.weight": torch.ones(5, 32), "classifier.bias": torch.ones(5)},
        "classifier.bias is [5], not [3]; classifier.weight is [5, 32], not [3, 32]", "again",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", MISFITS)
def test_weights_of_another_network_are_refused_and_named(folder: Path, fault: str) -> None:
    change, why, mend = MISFITS[fault]
    refused = _refused(_with_weights(folder, change))
    assert why in refused.why
    assert mend in refused.mend


@pytest.mark.parametrize(
    ("prefix", "told"),
    [
        ("module.", True),
        ("_orig_mod.", False),
        ("_orig_mod.module.", True),
        ("module._orig_mod.", True),
        ("_fsdp_wrapped_module.", False),
    ],
)
def test_what_pytorch_put_around_the_network_is_taken_off_the_names(
    folder: Path, whole: Path, prefix: str, *, told: bool
) -> None:
    _with_weights(folder, lambda state: {f"{prefix}{name}": tensor for name, tensor in state.items()})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", AssumedWarning)
        found = load(folder)
    assert any("behind 'module.'" in str(each.message) for each in caught) is told
    given = found.signature.inputs, sample_inputs(found.signature, 2)
    answers = call(found.module, *given)
    for name, answer in call(load(whole).module, *given).items():
        torch.testing.assert_close(answers[name], answer)


def test_heads_that_the_class_has_no_use_for_are_left_out_and_told(tmp_path: Path) -> None:
    folder = with_config(bert_folder(tmp_path, kind="BertForPreTraining"), architectures=["BertForMaskedLM"])
    older = {"bert.embeddings.position_ids": torch.arange(40)[None]}
    left_out = r"4 tensors left out.*: bert\.pooler\.dense\.bias"
    with pytest.warns(AssumedWarning, match="no pooling"), pytest.warns(AssumedWarning, match=left_out):
        assert load(_with_weights(folder, lambda state: state | older)).layered


def test_a_configuration_that_gives_no_numbers_is_told_apart_from_weights(folder: Path) -> None:
    assert "gives NaN as 'logits'" in _refused(with_config(folder, layer_norm_eps=-1e3)).why


def test_statistics_that_are_missing_are_not_made_up(tmp_path: Path) -> None:
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 8], "depths": [1, 1], "layer_type": "basic", "num_labels": 2}
    folder = _written(tmp_path, "ResNetConfig", "ResNetForImageClassification", **sizes, image_size=32)
    (folder / "preprocessor_config.json").write_text(json.dumps({"size": {"height": 32, "width": 32}}))
    counts = lambda state: {name: value for name, value in state.items() if "num_batches" not in name}  # noqa: E731
    assert load(_with_weights(folder, counts)).layered
    _with_weights(folder, lambda state: {name: value for name, value in state.items() if "running_var" not in name})
    refused = _refused(folder)
    assert "running_var" in refused.why
    assert "running_mean" not in refused.why


def test_several_poolings_stand_in_the_order_of_sentence_transformers(tmp_path: Path) -> None:
    folder = bert_folder(tmp_path, kind="BertModel")
    modules = [{"type": "x.Transformer", "path": ""}, {"type": "x.Pooling", "path": "1_Pooling"}]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    ids, mask = torch.randint(4, 60, (2, 7)), torch.ones(2, 7, dtype=torch.int64)
    with offline() as transformers, torch.no_grad():
        states = transformers.BertModel.from_pretrained(folder).eval()(ids, mask).last_hidden_state
    (folder / "1_Pooling" / "config.json").write_text(
        json.dumps({"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True})
    )
    model = load(folder)
    given = call(model.module, model.signature.inputs, {"input_ids": ids, "attention_mask": mask})["embeddings"]
    torch.testing.assert_close(given, torch.cat([states.amax(1), states.mean(1)], 1))
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": ["mean", "max"]}))
    assert tail_of(open_hub_folder(folder)).modes == ("mean_tokens", "max_tokens")  # the newer form has its own order


SMALL = {
    "vocab_size": 40, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "max_position_embeddings": 32,
    "eos_token_id": 3, "pad_token_id": 0,
}  # fmt: skip


def test_a_classifier_that_ends_in_a_decoder_is_refused(tmp_path: Path) -> None:
    refused = _refused(_written(tmp_path, "BartConfig", "BartForSequenceClassification", **SMALL))
    assert "by its decoder" in refused.why


def test_a_network_of_several_texts_a_sample_is_refused(tmp_path: Path) -> None:
    refused = _refused(bert_folder(tmp_path, kind="BertForMultipleChoice"))
    assert "several texts" in refused.why
    assert "compress.save" in refused.mend


YOLOS = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "image_size": [16, 16],
    "patch_size": 8, "num_detection_tokens": 3, "num_labels": 4,
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*none can be pruned")
@pytest.mark.parametrize(
    ("config", "kind", "sizes", "names"),
    [
        ("YolosConfig", "YolosForObjectDetection", YOLOS, ["logits", "pred_boxes"]),
        ("BertConfig", "BertForQuestionAnswering", SIZES, ["start_logits", "end_logits"]),
        ("BertConfig", "BertForPreTraining", SIZES, ["prediction_logits", "seq_relationship_logits"]),
        ("BertConfig", "BertForMaskedLM", SIZES, ["logits"]),
    ],
)
def test_all_tensors_that_a_head_gives_come_out_as_transformers_gives_them(
    config: str, kind: str, sizes: dict[str, Any], names: list[str], tmp_path: Path
) -> None:
    folder = _written(tmp_path, config, kind, **sizes)
    loaded = load(folder)
    assert [spec.name for spec in loaded.signature.outputs] == names
    arrays = sample_inputs(loaded.signature, 3)
    with offline() as transformers, torch.no_grad():
        original = getattr(transformers, kind).from_pretrained(folder).eval()
        wanted = original(**{name: torch.as_tensor(values) for name, values in arrays.items()})
        found = call(loaded.module, loaded.signature.inputs, arrays)
    for name in names:
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-4, atol=1e-5)


def test_what_a_network_gives_besides_is_told(tmp_path: Path) -> None:
    sizes = YOLOS | {"image_size": 16}
    with pytest.warns(AssumedWarning, match="of what a ViTModel gives, pooler_output left out.*compress.save"):
        loaded = load(_written(tmp_path / "vit", "ViTConfig", "ViTModel", **sizes))
    assert [spec.name for spec in loaded.signature.outputs] == ["last_hidden_state"]


VAST: dict[str, dict[str, Any]] = {
    "labels": {"num_labels": 2_000_000, "id2label": None, "label2id": None},
    "layers": {"num_hidden_layers": 100_000_000},
    "layers of another class": {
        "model_type": "qwen2", "architectures": ["Qwen2ForSequenceClassification"], "num_hidden_layers": 100_000_000,
    },
    "layers in a list": {"model_type": "swin", "architectures": ["SwinModel"], "depths": [1500, 1], "image_size": 32},
    "a number inside": {"text_config": {"encoder": [{"n_layer": 5000}]}},
}  # fmt: skip


@pytest.mark.parametrize("what", VAST)
def test_numbers_that_no_weights_explain_are_refused_before_a_class_sees_them(
    folder: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with offline() as transformers:
        monkeypatch.setattr(transformers, "CONFIG_MAPPING", dict.fromkeys(("bert", "qwen2", "swin")))
        refused = _refused(with_config(folder, **VAST[what]))
    assert "the files hold 25 tensors" in refused.why


def _nested(depth: int) -> Any:
    return {"more": _nested(depth - 1)} if depth else 1


def test_a_configuration_that_is_nested_deeply_is_refused(folder: Path) -> None:
    assert "nested too deeply" in _refused(with_config(folder, more=_nested(400))).why


@pytest.mark.parametrize(("value", "why"), [(torch.int8, "int8"), (torch.float32, "NaN")])
def test_a_sentence_encoders_dense_layer_has_weights_that_are_numbers(
    tmp_path: Path, value: torch.dtype, why: str
) -> None:
    from safetensors.torch import save_file

    folder = bert_folder(tmp_path, kind="BertModel")
    kinds = {"Transformer": "", "Pooling": "1_Pooling", "Dense": "2_Dense"}
    (folder / "modules.json").write_text(json.dumps([{"type": f"x.{kind}", "path": at} for kind, at in kinds.items()]))
    for place, config in (
        ("1_Pooling", {"pooling_mode": "mean"}),
        ("2_Dense", {"activation_function": "torch.nn.modules.activation.Tanh"}),
    ):
        (folder / place).mkdir()
        (folder / place / "config.json").write_text(json.dumps(config))
    weight = torch.full((4, 32), torch.nan) if value.is_floating_point else torch.ones(4, 32, dtype=value)
    save_file({"linear.weight": weight}, folder / "2_Dense" / "model.safetensors")
    assert why in _refused(folder).why


def test_masks_that_grow_with_the_square_of_positions_are_counted(tmp_path: Path) -> None:
    sizes = {"vocab_size": 40, "hidden_size": 8, "num_layers": 2, "num_heads": 1, "intermediate_size": 8}
    kinds = {"attention_types": [[["global", "local"], 1]], "max_position_embeddings": 16}
    folder = _written(tmp_path, "GPTNeoConfig", "GPTNeoForCausalLM", **sizes, **kinds)
    name = "transformer.wpe.weight"
    _with_weights(with_config(folder, max_position_embeddings=8192), lambda s: s | {name: torch.zeros(8192, 8)})
    assert "elements of buffers" in _refused(folder).why


def test_modules_are_counted_while_they_are_built(folder: Path) -> None:
    assert "1,125 modules" in _refused(with_config(folder, num_hidden_layers=80)).why
