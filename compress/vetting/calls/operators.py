"""The operators that an exported program may call, by name.

Functions of tensors: none reads or writes files, takes raw storages, skips the checks of what a sparse or nested tensor
holds, changes the process's settings, or is registered by another package. Backward passes are left out, too.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping

import torch

__all__ = ["SUBGRAPHS", "allowed", "function_of_tensors"]

# A name stands for its in-place form, too: `relu` for `relu_`.
_NAMES = """
_adaptive_avg_pool2d _adaptive_avg_pool3d _addmm_activation _assert_async _assert_scalar _assert_tensor_metadata
_cdist_forward _conj _convolution _embedding_bag _euclidean_dist _fused_rms_norm _log_softmax
_native_batch_norm_legit _native_batch_norm_legit_no_training _prelu_kernel _reshape_copy _safe_softmax
_scaled_dot_product_attention_math _scaled_dot_product_flash_attention_for_cpu _shape_as_tensor _softmax _to_copy
_trilinear _unique2 _unsafe_index _unsafe_index_put _unsafe_view _upsample_bicubic2d_aa _upsample_bilinear2d_aa
_upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d _weight_norm _weight_norm_interface
__and__ __or__ __xor__ abs absolute acos acosh adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d
adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d add addbmm addcdiv addcmul addmm addmv addr adjoint
affine_grid_generator alias alias_copy all allclose alpha_dropout amax amin aminmax angle any arange arccos arccosh
arcsin arcsinh arctan arctan2 arctanh argmax argmin argsort argwhere as_strided as_strided_copy as_strided_scatter
asin asinh atan atan2 atanh atleast_1d atleast_2d atleast_3d avg_pool1d avg_pool2d avg_pool3d baddbmm
bartlett_window batch_norm bernoulli bilinear binary_cross_entropy binary_cross_entropy_with_logits bincount
bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor blackman_window block_diag bmm
broadcast_tensors broadcast_to bucketize cartesian_prod cat cdist ceil celu chain_matmul chalf channel_shuffle
cholesky chunk clamp clamp_max clamp_min clip clone col2im column_stack combinations complex concat concatenate conj
conj_physical constant_pad_nd contiguous conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d
conv_transpose3d convolution copy copysign corrcoef cos cosh cosine_embedding_loss cosine_similarity count_nonzero
cov cross cross_entropy_loss cudnn_batch_norm cummax cummin cumprod cumsum cumulative_trapezoid deg2rad det detach
detach_copy diag diag_embed diagflat diagonal diagonal_copy diagonal_scatter diff digamma dist div divide dot
dropout dsplit dstack einsum elu embedding embedding_bag embedding_renorm empty empty_like empty_permuted
empty_strided eq equal erf erfc erfinv exp exp2 expand expand_as expand_copy expm1 exponential eye
fake_quantize_per_channel_affine fake_quantize_per_tensor_affine feature_alpha_dropout feature_dropout fft_fft
fft_fft2 fft_fftfreq fft_fftn fft_fftshift fft_hfft fft_ifft fft_ifft2 fft_ifftn fft_ifftshift fft_ihfft fft_irfft
fft_irfft2 fft_irfftn fft_rfft fft_rfft2 fft_rfftfreq fft_rfftn fill fix flatten flip fliplr flipud float_power
floor floor_divide fmax fmin fmod frac frexp frobenius_norm full full_like gather gcd ge gelu ger glu gradient
greater greater_equal grid_sampler grid_sampler_2d grid_sampler_3d group_norm gru gru_cell gt hamming_window
hann_window hardshrink hardsigmoid hardswish hardtanh heaviside hinge_embedding_loss histc hsplit hstack huber_loss
hypot i0 igamma igammac im2col imag index index_add index_copy index_fill index_put index_reduce index_select inner
instance_norm inverse is_complex is_floating_point is_nonzero isclose isfinite isin isinf isnan isneginf isposinf
isreal istft item kaiser_window kl_div kron kthvalue l1_loss layer_norm lcm ldexp le leaky_relu lerp less less_equal
lgamma lift lift_fresh lift_fresh_copy linalg_cholesky linalg_cholesky_ex linalg_cond linalg_cross linalg_det
linalg_diagonal linalg_eigh linalg_eigvalsh linalg_householder_product linalg_inv linalg_inv_ex linalg_lu_factor
linalg_lu_factor_ex linalg_matmul linalg_matrix_exp linalg_matrix_norm linalg_matrix_power linalg_matrix_rank
linalg_multi_dot linalg_norm linalg_pinv linalg_qr linalg_slogdet linalg_solve linalg_solve_ex
linalg_solve_triangular linalg_svd linalg_svdvals linalg_tensorinv linalg_tensorsolve linalg_vander linalg_vecdot
linalg_vector_norm linear linspace log log10 log1p log2 log_sigmoid log_sigmoid_forward log_softmax logaddexp
logaddexp2 logcumsumexp logdet logical_and logical_not logical_or logical_xor logit logspace logsumexp lstm
lstm_cell lt mH mT margin_ranking_loss masked_fill masked_scatter masked_select matmul matrix_H matrix_exp
matrix_power max max_pool1d max_pool1d_with_indices max_pool2d max_pool2d_with_indices max_pool3d
max_pool3d_with_indices maximum mean median meshgrid min minimum mish mm mode moveaxis movedim mse_loss msort mul
multinomial multiply mv mvlgamma nan_to_num nanmean nanmedian nanquantile nansum narrow narrow_copy
native_channel_shuffle native_dropout native_group_norm native_layer_norm native_norm ne neg negative new_empty
new_empty_strided new_full new_ones new_zeros nextafter nll_loss nll_loss2d nll_loss_nd nonzero nonzero_numpy
nonzero_static norm norm_except_dim normal normal_functional not_equal nuclear_norm numpy_T one_hot ones ones_like
orgqr outer pad pad_sequence pairwise_distance pdist permute permute_copy pinverse pixel_shuffle pixel_unshuffle
poisson_nll_loss polar polygamma positive pow prelu prod qr quantile rad2deg rand rand_like randint randint_like
randn randn_like randperm range ravel real reciprocal reflection_pad1d reflection_pad2d reflection_pad3d relu relu6
remainder renorm repeat repeat_interleave replication_pad1d replication_pad2d replication_pad3d reshape reshape_as
resolve_conj resolve_neg rms_norm rnn_relu rnn_relu_cell rnn_tanh rnn_tanh_cell roll rot90 round row_stack rrelu
rrelu_with_noise rrelu_with_noise_functional rsqrt rsub scalar_tensor scaled_dot_product_attention scatter
scatter_add scatter_reduce searchsorted select select_copy select_scatter selu sgn sigmoid sign signbit silu sin
sinc sinh slice slice_copy slice_scatter slogdet smooth_l1_loss soft_margin_loss softmax softplus softshrink sort
special_bessel_j0 special_bessel_j1 special_digamma special_entr special_erf special_erfc special_erfcx
special_erfinv special_exp2 special_expit special_expm1 special_gammaln special_i0 special_i0e special_i1
special_i1e special_log1p special_log_ndtr special_log_softmax special_logit special_logsumexp special_multigammaln
special_ndtr special_ndtri special_polygamma special_psi special_round special_sinc special_softmax special_xlog1py
special_xlogy special_zeta split split_copy split_with_sizes split_with_sizes_copy sqrt square squeeze squeeze_copy
stack std std_mean stft sub subtract sum sum_to_size svd swapaxes swapdims sym_constrain_range
sym_constrain_range_for_size sym_numel sym_size sym_storage_offset sym_stride t t_copy take take_along_dim tan tanh
tensor_split tensordot threshold tile to topk trace transpose transpose_copy trapezoid trapz triangular_solve tril
tril_indices triplet_margin_loss triu triu_indices true_divide trunc type_as unbind unbind_copy unflatten unfold
unfold_copy uniform unique_consecutive unique_dim unsafe_chunk unsafe_split unsafe_split_with_sizes unsqueeze
unsqueeze_copy upsample_bicubic2d upsample_bilinear2d upsample_linear1d upsample_nearest1d upsample_nearest2d
upsample_nearest3d upsample_trilinear3d vander var var_mean vdot view view_as view_as_complex view_as_complex_copy
view_as_real view_as_real_copy view_copy vsplit vstack where xlogy zero zeros zeros_like
"""
_ATEN = frozenset(_NAMES.split())
_PRIMS = frozenset(
    {"broadcast_in_dim", "convert_element_type", "device_put", "div", "fma", "iota", "squeeze", "view_of", "where"}
)
_IN_PLACE = frozenset({"copy", "embedding_renorm", "fill", "zero"})  # their names without "_" are others', or none
_UNLIKE_IN_PLACE = frozenset({"as_strided"})
# Of packed sequences, whose lengths are believed.
_PACKED = [[name, "data"] for name in ("gru", "lstm", "rnn_relu", "rnn_tanh")]
SUBGRAPHS = frozenset({"cond", "wrap_with_set_grad_enabled", "wrap_with_autocast"})
"""Operators that take graphs, which are checked as the outer one is. Loops are none of them: they may never end."""

_NUMBERS: Mapping[str, frozenset[str]] = {
    # torch._export.serde.serialize._SYM_OPS, and what takes a part of several outputs; shifts can fill the memory
    "_operator": frozenset(
        {
            "eq",
            "ne",
            "le",
            "ge",
            "lt",
            "gt",
            "neg",
            "pos",
            "mul",
            "add",
            "sub",
            "floordiv",
            "mod",
            "truediv",
            "pow",
            "and_",
            "or_",
            "getitem",
        }
    ),
    "math": frozenset({"trunc", "ceil", "floor"}),
    "torch": frozenset({"sym_not", "sym_int", "sym_float", "sym_ite", "sym_max", "sym_min", "sym_sqrt", "_sym_sqrt"}),
}
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@functools.lru_cache(4096)
def allowed(target: str) -> bool:
    """Whether a program may call a target, written as torch writes it ("torch.ops.aten.relu.default")."""
    parts = target.split(".")
    if not all(_WORD.fullmatch(part) for part in parts):
        return False
    if parts[:2] != ["torch", "ops"]:
        return len(parts) == 2 and parts[1] in _NUMBERS.get(parts[0], frozenset())
    if parts[2:3] == ["higher_order"]:
        return len(parts) == 4 and parts[3] in SUBGRAPHS
    if len(parts) != 5 or not _listed(parts[2], parts[3]):
        return False
    packet = getattr(getattr(torch.ops, parts[2]), parts[3], None)
    if packet is None or parts[4] not in packet.overloads() or parts[3:] in _PACKED:
        return False
    # TorchScript has overloads of its own, of plain numbers and lists, whose code believes its arguments.
    name = f"{parts[2]}::{parts[3]}" + ("" if parts[4] == "default" else f".{parts[4]}")
    return torch._C._dispatch_has_kernel(name) and not _raw(getattr(packet, parts[4]))


def function_of_tensors(name: str) -> bool:
    """Whether torch's own operator of that name, or of the name without the "_" of what works in place, is listed."""
    base = name.removesuffix("_") if not name.endswith("__") else name
    return name in _ATEN or (base in _ATEN | _IN_PLACE and base not in _UNLIKE_IN_PLACE)


def _listed(namespace: str, name: str) -> bool:
    return name in _PRIMS if namespace == "prims" else namespace == "aten" and function_of_tensors(name)


def _raw(overload: torch._ops.OpOverload) -> bool:
    """Whether an overload takes or gives what is no tensor and no plain value: a storage, a stream, an object."""
    schema = overload._schema
    kinds = " ".join(str(value.type) for value in (*schema.arguments, *schema.returns))
    return bool(re.search(r"Storage|Stream|__torch__|Any|Future|RRef|Capsule|QScheme", kinds))
