"""The classes of `torch.nn` that a file may name: layers whose constructor takes plain values, and containers."""

from __future__ import annotations

from torch import nn

from compress.formats.native.onnx_part import OnnxPart

__all__ = ["CLASSES", "CONTAINERS"]

CONTAINERS: dict[str, type[nn.Module]] = {kind.__name__: kind for kind in (nn.Sequential, nn.ModuleList, nn.ModuleDict)}
_NAMES = (
    "Identity Linear Bilinear Flatten Unflatten Embedding EmbeddingBag "
    "Conv1d Conv2d Conv3d ConvTranspose1d ConvTranspose2d ConvTranspose3d Fold Unfold "
    "BatchNorm1d BatchNorm2d BatchNorm3d SyncBatchNorm InstanceNorm1d InstanceNorm2d InstanceNorm3d "
    "LayerNorm GroupNorm RMSNorm LocalResponseNorm CrossMapLRN2d "
    "MaxPool1d MaxPool2d MaxPool3d MaxUnpool1d MaxUnpool2d MaxUnpool3d AvgPool1d AvgPool2d AvgPool3d "
    "LPPool1d LPPool2d LPPool3d AdaptiveMaxPool1d AdaptiveMaxPool2d AdaptiveMaxPool3d "
    "AdaptiveAvgPool1d AdaptiveAvgPool2d AdaptiveAvgPool3d "
    "ConstantPad1d ConstantPad2d ConstantPad3d ReflectionPad1d ReflectionPad2d ReflectionPad3d "
    "ReplicationPad1d ReplicationPad2d ReplicationPad3d ZeroPad1d ZeroPad2d ZeroPad3d "
    "CircularPad1d CircularPad2d CircularPad3d "
    "Dropout Dropout1d Dropout2d Dropout3d AlphaDropout FeatureAlphaDropout "
    "Upsample UpsamplingNearest2d UpsamplingBilinear2d PixelShuffle PixelUnshuffle ChannelShuffle "
    "CosineSimilarity PairwiseDistance "
    "ReLU ReLU6 LeakyReLU PReLU RReLU ELU SELU CELU GELU GLU SiLU Mish Sigmoid LogSigmoid Tanh Softplus Softsign "
    "Softshrink Hardshrink Tanhshrink Hardtanh Hardsigmoid Hardswish Threshold Softmax Softmin Softmax2d LogSoftmax "
    "RNN LSTM GRU RNNCell LSTMCell GRUCell MultiheadAttention "
    "TransformerEncoderLayer TransformerDecoderLayer TransformerEncoder TransformerDecoder Transformer"
)
CLASSES: dict[str, type[nn.Module]] = {name: getattr(nn, name) for name in _NAMES.split(" ") if hasattr(nn, name)} | {
    "NonDynamicallyQuantizableLinear": nn.modules.linear.NonDynamicallyQuantizableLinear,  # in an attention
    OnnxPart.__name__: OnnxPart,
}
