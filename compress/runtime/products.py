"""Products of matrices beside those of ONNX's oldest operators: which operators make some, and of how many numbers."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import onnx

from compress.formats.onnx.scope import inner_bodies

__all__ = ["countable", "multiplies", "product_macs", "weights_in"]

MICROSOFT = "com.microsoft"
# Of whatever domain; what is not counted by its shapes below is told to be left out.
_PRODUCTS = re.compile(
    r"Conv|MatMul|Gemm(?!a)|Attention|LSTM|GRU|RNN|MoE|Einsum|LinearClassifier|LinearRegressor|SVM"
    r"|^(?:CDist|GatedDeltaNet|GatedRelativePositionBias|AttnLSTM|BeamSearch|WhisperBeamSearch|GreedySearch|Sampling"
    r"|EPContext)$"
)
# What can take a matrix of weights and multiplies none by another.
_OF_ONNX = """
    Abs Acos Acosh Add AffineGrid And ArgMax ArgMin Asin Asinh Atan Atanh AveragePool BatchNormalization Bernoulli
    BitCast BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor BlackmanWindow Cast CastLike Ceil Celu CenterCropPad
    Clip Col2Im Compress Concat ConcatFromSequence Constant ConstantOfShape Cos Cosh CumProd CumSum DFT DepthToSpace
    DequantizeLinear Det Div Dropout DynamicQuantizeLinear Elu Equal Erf Exp Expand EyeLike Flatten Floor Gather
    GatherElements GatherND Gelu GlobalAveragePool GlobalLpPool GlobalMaxPool Greater GreaterOrEqual GridSample
    GroupNormalization HammingWindow HannWindow HardSigmoid HardSwish Hardmax Identity If ImageDecoder
    InstanceNormalization IsInf IsNaN LRN LayerNormalization LeakyRelu Less LessOrEqual Log LogSoftmax Loop
    LpNormalization LpPool Max MaxPool MaxRoiPool MaxUnpool Mean MeanVarianceNormalization MelWeightMatrix Min Mish
    Mod Mul Multinomial Neg NegativeLogLikelihoodLoss NonMaxSuppression NonZero Not OneHot Optional OptionalGetElement
    OptionalHasElement Or PRelu Pad Pow QuantizeLinear RMSNormalization RandomNormal RandomNormalLike RandomUniform
    RandomUniformLike Range Reciprocal ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin
    ReduceProd ReduceSum ReduceSumSquare RegexFullMatch Relu Reshape Resize ReverseSequence RoiAlign RotaryEmbedding
    Round STFT Scan Scatter ScatterElements ScatterND Selu SequenceAt SequenceConstruct SequenceEmpty SequenceErase
    SequenceInsert SequenceLength SequenceMap Shape Shrink Sigmoid Sign SimplifiedLayerNormalization Sin Sinh Size
    Slice Softmax SoftmaxCrossEntropyLoss Softplus Softsign SpaceToDepth Split SplitToSequence Sqrt Squeeze
    StringConcat StringNormalizer StringSplit Sub Sum SwiGLU Swish Tan Tanh TensorScatter TfIdfVectorizer
    ThresholdedRelu Tile TopK Transpose Trilu Unique Unsqueeze Upsample Where Xor
"""
_OF_ONNX_RUNTIME = """
    BiasAdd BiasDropout BiasGelu BiasSoftmax BiasSplitGelu BitmaskBiasDropout BitmaskDropout BranchwiseRMSNorm
    ComplexMul ComplexMulConj CropAndResize DequantizeBFP DequantizeLinear DequantizeWithOrder DynamicTimeWarping
    EmbedLayerNormalization ExpandDims FastGelu GatedAdd GatedRMSNorm GatherBlockQuantized GatherND Gelu
    GemmaRotaryEmbedding GridSample GroupNorm IsAllFinite MRotaryEmbedding MaxpoolWithMask MulInteger MurmurHash3
    NGramRepeatBlock NhwcMaxPool Pad QEmbedLayerNormalization QLinearAdd QLinearAveragePool QLinearConcat
    QLinearGlobalAveragePool QLinearLeakyRelu QLinearMul QLinearReduceMean QLinearSigmoid QLinearSoftmax QLinearWhere
    QOrderedGelu QOrderedLayerNormalization QuantizeBFP QuantizeLinear QuantizeWithOrder QuickGelu Range
    ReduceSumInteger RelativePositionBias RemovePadding RestorePadding RotaryEmbedding SampleOp ScaledSiLU
    SkipGroupNorm SkipLayerNormalization SkipSimplifiedLayerNormalization TorchEmbedding Trilu UnfoldTensor Unique
"""
_NO_PRODUCTS = {"": frozenset(_OF_ONNX.split()), MICROSOFT: frozenset(_OF_ONNX_RUNTIME.split())}
# These give their first input in another form.
_MOVES = (
    "Cast", "DequantizeLinear", "Flatten", "Identity", "QuantizeLinear", "Reshape", "Slice", "Split", "Squeeze",
    "Transpose", "Unsqueeze",
)  # fmt: skip
_NOT_NUMBERS = tuple(getattr(onnx.TensorProto, name) for name in ("INT32", "INT64", "BOOL", "STRING"))


def weights_in(graph: onnx.GraphProto) -> set[str]:
    """Names of matrices of weights, as they are stored or moved, in bodies as well: not of shapes, masks and places."""
    found = set()
    for each in (graph, *inner_bodies(graph)):
        found |= {t.name for t in each.initializer if len(t.dims) > 1 and t.data_type not in _NOT_NUMBERS}
        for node in each.node:
            if node.op_type in _MOVES and node.input and node.input[0] in found:
                found |= {*node.output}
    return found


def multiplies(node: onnx.NodeProto, weights: Collection[str]) -> bool:
    """Whether a node makes products of matrices: by its name, or it takes weights and is not known to make none.

    Args:
        node: of any domain.
        weights: by name, see `weights_in`.
    """
    domain, name = _kind(node)
    if name in _NO_PRODUCTS.get(domain, ()):
        return False
    return _PRODUCTS.search(name) is not None or any(given in weights for given in node.input)


def countable(node: onnx.NodeProto) -> bool:
    """Whether shapes may tell how much a node multiplies."""
    return _kind(node) in _COUNTED


def _kind(node: onnx.NodeProto) -> tuple[str, str]:
    return "" if node.domain == "ai.onnx" else node.domain, node.op_type


@dataclasses.dataclass(frozen=True)
class _Node:
    """A node by its shapes.

    Attributes:
        op: its type.
        inputs: shapes, [] where there is none.
        out: shape of the first output.
        told: attributes.
        given: places of the inputs that are there.
    """

    op: str
    inputs: Sequence[Sequence[int]]
    out: Sequence[int]
    told: Mapping[str, Any]
    given: Collection[int]

    def has(self, *places: int) -> bool:
        return any(place in self.given for place in places)


def product_macs(node: onnx.NodeProto, shapes: Mapping[str, Sequence[int]]) -> int | None:
    """Multiply-accumulates of a node by shapes; None where they don't tell.

    Args:
        node: that multiplies.
        shapes: of the first four inputs and the first output.
    """
    count = _COUNTED.get(_kind(node))
    if count is None:
        return None
    told = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    inputs = [shapes.get(name, ()) for name in node.input]
    given = [at for at, name in enumerate(node.input) if name]
    try:
        return count(_Node(node.op_type, inputs, shapes.get(node.output[0], ()), told, given))
    except (IndexError, ValueError):  # it lacks what such a node has
        return None


def _convolution(it: _Node) -> int | None:
    return math.prod(it.out[2:]) * it.out[0] * math.prod(it.inputs[1])


def _product(it: _Node) -> int | None:
    if it.told.get("transBatchA"):
        return None
    return math.prod(it.out) * it.inputs[0][-2 if it.told.get("transA") else -1]


def _attention(it: _Node) -> int | None:
    """Of the scores and of their product with the values; those that a mask leaves out are made as well."""
    query, key, value = it.inputs[:3]
    if it.has(4, 5, 6):  # what was before: as long as the data has it
        return None
    if len(query) == 4:  # [batch, heads, length, size]
        return query[0] * query[1] * query[2] * key[2] * (query[3] + value[3])
    return query[0] * query[1] * key[1] * (query[2] + it.out[-1])


def _packed_attention(it: _Node) -> int | None:
    """With the projections to queries, keys and values, in one matrix."""
    (batch, length, _), weights = it.inputs[:2]
    if it.has(8 if it.op == "QAttention" else 4):
        return None
    queries, _, values = it.told.get("qkv_hidden_sizes") or [weights[1] // 3] * 3
    return batch * length * (math.prod(weights) + length * (int(queries) + int(values)))


def _heads(it: _Node) -> int | None:
    query, key = it.inputs[0], it.inputs[1] if it.has(1) else it.inputs[0]
    if it.has(6, 7):
        return None
    length = key[2] if len(key) == 4 else key[1]
    size = query[2] if len(query) == 3 else query[2] * query[4]  # [batch, length, heads, 3, size]
    return query[0] * query[1] * length * (size + it.out[-1])


_COUNTED = {
    ("", "Attention"): _attention,
    ("", "DeformConv"): _convolution,
    (MICROSOFT, "FusedConv"): _convolution,
    (MICROSOFT, "FusedGemm"): _product,
    (MICROSOFT, "FusedMatMul"): _product,
    (MICROSOFT, "TransposeMatMul"): _product,
    (MICROSOFT, "Attention"): _packed_attention,
    (MICROSOFT, "QAttention"): _packed_attention,
    (MICROSOFT, "MultiHeadAttention"): _heads,
}
