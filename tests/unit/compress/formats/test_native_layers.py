"""Layers as plain data: each class that is known comes back as it was, and gives the same answers."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from compress.formats.native.graph import GraphError, from_data
from compress.formats.native.layer_classes import CLASSES
from compress.formats.native.layers import LayerError, layer_of, record_of
from compress.formats.pickles.read import unpickle

X1, X2, X3 = (2, 4, 8), (2, 4, 8, 8), (2, 4, 4, 4, 4)


def encoder_layer(**options: Any) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, **options)


def decoder_layer(**options: Any) -> nn.TransformerDecoderLayer:
    return nn.TransformerDecoderLayer(8, 2, 16, batch_first=True, **options)


LAYERS: list[tuple[Callable[[], nn.Module], tuple[tuple[int, ...], ...]]] = [
    (nn.Identity, (X1,)),
    (lambda: nn.Linear(8, 3, bias=False), (X1,)),
    (lambda: nn.Bilinear(8, 8, 3), (X1, X1)),
    (lambda: nn.Flatten(2), (X2,)),
    (lambda: nn.Unflatten(1, (2, 2)), (X2,)),
    (lambda: nn.Conv1d(4, 6, 3, stride=2, padding=1, dilation=2, groups=2), (X1,)),
    (lambda: nn.Conv2d(4, 6, (3, 1), padding="same", padding_mode="reflect", bias=False), (X2,)),
    (lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular"), (X2,)),
    (lambda: nn.Conv3d(4, 6, 2), (X3,)),
    (lambda: nn.ConvTranspose1d(4, 6, 3, stride=2, output_padding=1), (X1,)),
    (lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1, groups=2), (X2,)),
    (lambda: nn.ConvTranspose3d(4, 6, 2), (X3,)),
    (lambda: nn.Fold((4, 4), (2, 2)), ((2, 16, 9),)),
    (lambda: nn.Unfold(3, padding=1), (X2,)),
    (lambda: nn.BatchNorm1d(4), (X1,)),
    (lambda: nn.BatchNorm2d(4, eps=1e-3, momentum=None, affine=False), (X2,)),
    (lambda: nn.BatchNorm3d(4, track_running_stats=False), (X3,)),
    (lambda: nn.InstanceNorm1d(4, affine=True), (X1,)),
    (lambda: nn.InstanceNorm2d(4, track_running_stats=True), (X2,)),
    (lambda: nn.InstanceNorm3d(4), (X3,)),
    (lambda: nn.LayerNorm((8, 8), eps=1e-3), (X2,)),
    (lambda: nn.LayerNorm(8, bias=False), (X1,)),
    (lambda: nn.LayerNorm(8, elementwise_affine=False), (X1,)),
    (lambda: nn.LayerNorm(torch.Size([8])), (X1,)),
    (lambda: nn.GroupNorm(2, 4), (X2,)),
    (lambda: nn.RMSNorm(8, eps=1e-3), (X1,)),
    (lambda: nn.LocalResponseNorm(3), (X2,)),
    (lambda: nn.CrossMapLRN2d(3), (X2,)),
    (lambda: nn.MaxPool1d(2), (X1,)),
    (lambda: nn.MaxPool2d((3, 2), stride=2, padding=1, ceil_mode=True), (X2,)),
    (lambda: nn.MaxPool3d(2), (X3,)),
    (lambda: nn.AvgPool1d(2), (X1,)),
    (lambda: nn.AvgPool2d(3, padding=1, count_include_pad=False, divisor_override=2), (X2,)),
    (lambda: nn.AvgPool3d(2), (X3,)),
    (lambda: nn.LPPool1d(2, 2), (X1,)),
    (lambda: nn.LPPool2d(2, 3), (X2,)),
    (lambda: nn.LPPool3d(2, 2), (X3,)),
    (lambda: nn.AdaptiveMaxPool1d(2), (X1,)),
    (lambda: nn.AdaptiveMaxPool2d((2, None)), (X2,)),
    (lambda: nn.AdaptiveMaxPool3d(2), (X3,)),
    (lambda: nn.AdaptiveAvgPool1d(2), (X1,)),
    (lambda: nn.AdaptiveAvgPool2d((None, 3)), (X2,)),
    (lambda: nn.AdaptiveAvgPool3d(2), (X3,)),
    (lambda: nn.ConstantPad1d(1, 2.5), (X1,)),
    (lambda: nn.ConstantPad2d((1, 2, 3, 4), 1), (X2,)),
    (lambda: nn.ConstantPad3d(1, 0.5), (X3,)),
    *((lambda kind=kind: kind(1), (shape,)) for kind, shape in (
        (nn.ReflectionPad1d, X1), (nn.ReflectionPad2d, X2), (nn.ReflectionPad3d, X3),
        (nn.ReplicationPad1d, X1), (nn.ReplicationPad2d, X2), (nn.ReplicationPad3d, X3),
        (nn.ZeroPad1d, X1), (nn.ZeroPad2d, X2), (nn.ZeroPad3d, X3),
        (nn.CircularPad1d, X1), (nn.CircularPad2d, X2), (nn.CircularPad3d, X3),
    )),
    *((lambda kind=kind: kind(0.3), (shape,)) for kind, shape in (
        (nn.Dropout, X1), (nn.Dropout1d, X1), (nn.Dropout2d, X2), (nn.Dropout3d, X3),
        (nn.AlphaDropout, X1), (nn.FeatureAlphaDropout, X1),
    )),
    (lambda: nn.Upsample(scale_factor=2.5, mode="bilinear", align_corners=True), (X2,)),
    (lambda: nn.Upsample(size=(3, 4)), (X2,)),
    (lambda: nn.UpsamplingNearest2d(scale_factor=2), (X2,)),
    (lambda: nn.UpsamplingBilinear2d(size=5), (X2,)),
    (lambda: nn.PixelShuffle(2), (X2,)),
    (lambda: nn.PixelUnshuffle(2), (X2,)),
    (lambda: nn.ChannelShuffle(2), (X2,)),
    (lambda: nn.CosineSimilarity(2, 1e-3), (X1, X1)),
    (lambda: nn.PairwiseDistance(3, keepdim=True), (X1, X1)),
    *((kind, (X1,)) for kind in (
        nn.ReLU, nn.ReLU6, nn.SELU, nn.SiLU, nn.Mish, nn.Sigmoid, nn.LogSigmoid, nn.Tanh, nn.Softsign, nn.Tanhshrink,
        nn.Hardsigmoid, nn.Hardswish,
    )),
    (lambda: nn.LeakyReLU(0.3, inplace=True), (X1,)),
    (lambda: nn.PReLU(4), (X1,)),
    (lambda: nn.RReLU(0.2, 0.4), (X1,)),
    (lambda: nn.ELU(0.7), (X1,)),
    (lambda: nn.CELU(0.7), (X1,)),
    (lambda: nn.GELU("tanh"), (X1,)),
    (lambda: nn.GLU(1), (X1,)),
    (lambda: nn.Softplus(2, 10), (X1,)),
    (lambda: nn.Softshrink(0.2), (X1,)),
    (lambda: nn.Hardshrink(0.2), (X1,)),
    (lambda: nn.Hardtanh(-0.5, 2), (X1,)),
    (lambda: nn.Threshold(0.1, 20), (X1,)),
    (lambda: nn.Softmax(1), (X1,)),
    (lambda: nn.Softmin(1), (X1,)),
    (lambda: nn.Softmax2d(), (X2,)),
    (lambda: nn.LogSoftmax(1), (X1,)),
    (lambda: nn.RNN(8, 5, nonlinearity="relu", batch_first=True), (X1,)),
    (lambda: nn.LSTM(8, 5, 2, batch_first=True, bidirectional=True, dropout=0.2), (X1,)),
    (lambda: nn.GRU(8, 5, 2, bias=False), (X1,)),
    (lambda: nn.RNNCell(8, 5, nonlinearity="relu"), ((2, 8),)),
    (lambda: nn.LSTMCell(8, 5, bias=False), ((2, 8),)),
    (lambda: nn.GRUCell(8, 5), ((2, 8),)),
    (lambda: nn.MultiheadAttention(8, 2, bias=False, add_bias_kv=True, batch_first=True), (X1, X1, X1)),
    (lambda: nn.MultiheadAttention(8, 2, kdim=8, vdim=6, add_zero_attn=True, batch_first=True), (X1, X1, (2, 4, 6))),
    (lambda: encoder_layer(bias=False, norm_first=True), (X1,)),
    (lambda: encoder_layer(activation="gelu", layer_norm_eps=1e-3), (X1,)),
    (lambda: encoder_layer(activation=nn.GELU("tanh")), (X1,)),
    (lambda: decoder_layer(), (X1, X1)),
    (lambda: nn.TransformerEncoder(encoder_layer(), 2, nn.LayerNorm(8)), (X1,)),
    (lambda: nn.TransformerDecoder(decoder_layer(norm_first=True), 2), (X1, X1)),
    (lambda: nn.Transformer(8, 2, 1, 1, 16, batch_first=True), (X1, X1)),
    (lambda: nn.Sequential(nn.Linear(8, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 2))), (X1,)),
]  # fmt: skip
BY_INDICES = ("Embedding", "EmbeddingBag")
BY_TWO_OUTPUTS = ("MaxUnpool1d", "MaxUnpool2d", "MaxUnpool3d")
INNER = ("NonDynamicallyQuantizableLinear",)  # in an attention
OF_PROCESSES = ("SyncBatchNorm",)
IN_ONNX = ("OnnxPart",)  # see test_kept_parts.py


def made(factory: Callable[[], nn.Module]) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        return factory().eval()


def same(given: Any, wanted: Any) -> bool:
    if isinstance(wanted, torch.Tensor):
        return torch.equal(given, wanted)
    if isinstance(wanted, tuple):
        return all(same(a, b) for a, b in zip(given, wanted, strict=True))
    return given is wanted


def through_a_pickle(layer: nn.Module, path: Path) -> nn.Module:
    torch.save(layer, path)
    return layer_of(record_of(unpickle(path, trust=False), {})).eval()


@pytest.mark.parametrize(
    ("factory", "shapes"), LAYERS, ids=lambda case: type(made(case)).__name__ if callable(case) else ""
)
def test_a_layer_comes_back_as_it_was(
    factory: Callable[[], nn.Module], shapes: tuple[tuple[int, ...], ...], tmp_path: Path
) -> None:
    layer = made(factory)
    before = copy.deepcopy(layer.state_dict())
    tensors = [torch.randn(shape) for shape in shapes]
    for again in (layer_of(record_of(layer, {})).eval(), through_a_pickle(layer, tmp_path / "layer.pt")):
        assert repr(again) == repr(layer)
        assert list(again.state_dict()) == list(before)
        with torch.no_grad():
            assert same(again(*(t.clone() for t in tensors)), layer(*(t.clone() for t in tensors)))
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items()), (
        "the original was changed"
    )


def test_sizes_that_are_numpys_are_numbers() -> None:
    assert layer_of(record_of(nn.Linear(np.int64(8), np.int64(3)), {})).in_features == 8  # type: ignore[arg-type]


def test_a_recurrent_layer_keeps_its_projection() -> None:
    layer = nn.LSTM(8, 5, proj_size=3)
    assert repr(layer_of(record_of(layer, {}))) == repr(layer)


def test_layers_of_indices_come_back_too() -> None:
    indices = torch.tensor([[1, 2, 0]])
    for layer in (nn.Embedding(5, 3, padding_idx=1, max_norm=2.0), nn.EmbeddingBag(5, 3, mode="max", padding_idx=0)):
        assert same(layer_of(record_of(layer, {}))(indices), layer(indices))


def test_every_class_that_is_known_is_tried_here() -> None:
    tried = {type(module).__name__ for factory, _ in LAYERS for module in made(factory).modules()}
    assert set(CLASSES) - tried <= {*BY_INDICES, *BY_TWO_OUTPUTS, *INNER, *OF_PROCESSES, *IN_ONNX}


def test_a_pruned_layer_keeps_its_new_widths() -> None:
    layer = nn.Conv2d(4, 8, 3)
    layer.out_channels, layer.weight = 5, nn.Parameter(layer.weight[:5].detach())
    layer.bias = None
    again = layer_of(record_of(layer, {}))
    assert again.out_channels == 5
    assert again.bias is None
    layer.in_channels = 3
    with pytest.raises(LayerError, match="does not fit"):
        record_of(layer, {})


def test_a_description_is_plain_data() -> None:
    def plain(value: Any) -> bool:
        if type(value) is dict:
            return all(type(key) is str and plain(item) for key, item in value.items())
        if type(value) is tuple:
            return all(map(plain, value))
        return type(value) in (type(None), bool, int, float, str, torch.Tensor, nn.Parameter)

    record = record_of(made(lambda: nn.Transformer(8, 2, 1, 1, 16)), {})
    assert plain(record)
    assert pickle.loads(pickle.dumps(record)).keys() == record.keys()  # noqa: S301  our own


def test_a_layer_that_stands_in_itself_many_times_over_is_refused_by_how_often_it_is_reached() -> None:
    """A description of some hundred bytes a level: eight times in one that stands eight times in the next."""
    record: dict[str, Any] = record_of(nn.ReLU(), {})
    for _ in range(30):
        children = dict.fromkeys("abcdefgh", record)
        record = {"class": "Sequential", "parameters": {}, "buffers": {}, "children": children}
    with pytest.raises(LayerError, match="more than 100,000 layers"):
        layer_of(record)


def test_so_is_a_graph_that_has_many_such_layers_side_by_side() -> None:
    record: dict[str, Any] = record_of(nn.ReLU(), {})
    for _ in range(5):
        children = dict.fromkeys("abcdefgh", record)
        record = {"class": "Sequential", "parameters": {}, "buffers": {}, "children": children}
    graph = {"nodes": [], "modules": {f"a{at}": record for at in range(3)}, "parameters": {}, "buffers": {}}
    with pytest.raises(GraphError, match="more than 100,000 layers"):
        from_data(graph)
