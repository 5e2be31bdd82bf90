"""Operators of torch that a block may use as they are.

Only pure operators are here: equal inputs give equal outputs, on any peer and however often a task is redone.
That excludes random operators, in-place ones, those that read memory they did not write (`empty`,
`as_strided`) and those that touch files. Ask the same of each name to be added. An operator that is allowed
only for some arguments is in guarded_operators.py, one that depends on the task, such as dropout, in
own_operators.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch

from hetpeer.stages.operators.operator_family import Operator, aten

EQUATION = re.compile(r"[A-Za-z.,>\- ]{1,100}")

FAMILY: Mapping[str, Operator] = {
    # Arithmetic
    **aten(
        """
        abs.default acos.default add.Scalar add.Tensor addcdiv.default addcmul.default
        asin.default atan.default atan2.default bitwise_not.default ceil.default clamp.default
        clamp.Tensor clamp_max.default clamp_min.default cos.default div.Scalar div.Tensor
        div.Tensor_mode erf.default exp.default exp2.default expm1.default floor.default
        floor_divide.default fmod.Scalar fmod.Tensor lerp.Scalar lerp.Tensor log.default
        log10.default log1p.default log2.default max.other maximum.default min.other
        minimum.default mul.Scalar mul.Tensor multiply.Scalar multiply.Tensor nan_to_num.default
        neg.default pow.Scalar pow.Tensor_Scalar pow.Tensor_Tensor reciprocal.default
        remainder.Scalar remainder.Tensor round.default rsqrt.default rsub.Scalar sign.default
        sin.default sqrt.default square.default sub.Scalar sub.Tensor tan.default trunc.default
        """
    ),
    # Activations
    **aten(
        """
        _softmax.default celu.default elu.default gelu.default glu.default hardsigmoid.default
        hardswish.default hardtanh.default leaky_relu.default log_sigmoid.default log_softmax.int
        mish.default prelu.default relu.default relu6.default selu.default sigmoid.default
        silu.default softmax.int softplus.default tanh.default
        """
    ),
    # Products, convolutions, attention, tables
    **aten(
        """
        addmm.default baddbmm.default bmm.default col2im.default conv1d.default conv1d.padding conv2d.default
        conv2d.padding conv3d.default conv_transpose1d.default conv_transpose2d.input
        conv_transpose3d.input dot.default embedding.default im2col.default index_select.default
        linear.default matmul.default mm.default mv.default outer.default scaled_dot_product_attention.default
        """
    ),
    **aten("einsum.default", text=EQUATION),
    # Normalisation, pooling, losses
    **aten(
        """
        _weight_norm.default adaptive_avg_pool1d.default adaptive_avg_pool2d.default avg_pool1d.default
        avg_pool2d.default binary_cross_entropy.default binary_cross_entropy_with_logits.default
        cosine_similarity.default cross_entropy_loss.default group_norm.default huber_loss.default
        kl_div.default l1_loss.default layer_norm.default linalg_vector_norm.default
        max_pool1d.default max_pool2d.default max_pool3d.default mse_loss.default
        native_layer_norm.default nll_loss_nd.default rms_norm.default smooth_l1_loss.default
        soft_margin_loss.default
        """
    ),
    # Sums
    **aten(
        """
        all.default all.dim amax.default amin.default any.default any.dim argmax.default
        argmin.default argsort.default  cummax.default cumprod.default
        cumsum.default logsumexp.default max.default max.dim mean.default mean.dim min.default min.dim
        prod.default prod.dim_int sort.default std.correction std.dim  sum.default
        sum.dim_IntList topk.default var.correction var.dim
        """
    ),
    **aten("argsort.stable sort.stable", keywords=frozenset({"dim"})),
    # Shapes
    **aten(
        """
        alias.default broadcast_tensors.default detach.default expand.default expand_as.default
        flatten.using_ints flip.default movedim.int narrow.default permute.default
        pixel_shuffle.default reshape.default roll.default select.int slice.Tensor
        split_with_sizes.default squeeze.default squeeze.dim squeeze.dims t.default transpose.int
        unflatten.int unsqueeze.default view_as.default
        """,
        moves=True,
    ),
    # Copies, indexing, making tensors
    **aten(
        """
        _to_copy.default constant_pad_nd.default diff.default fill.Scalar fill.Tensor
        full_like.default gather.default index.Tensor new_full.default new_ones.default
        new_zeros.default ones_like.default pad.default select_scatter.default
        slice_scatter.default take_along_dim.default tril.default triu.default type_as.default
        _upsample_bicubic2d_aa.vec upsample_bicubic2d.vec upsample_bilinear2d.vec
        upsample_nearest1d.vec upsample_nearest2d.vec zeros_like.default
        """
    ),
    **aten(
        """
        cat.default clone.default concat.default concatenate.default repeat.default repeat_interleave.self_int
        stack.default
        """,
        moves=True,
    ),
    **aten(
        """
        arange.default arange.start arange.start_step eye.default full.default linspace.default
        ones.default scalar_tensor.default zeros.default
        """,
        factory=True,
    ),
    # Comparing and choosing
    **aten(
        """
        __and__.Tensor __or__.Tensor bitwise_and.Scalar bitwise_and.Tensor bitwise_or.Tensor
        bitwise_or.Scalar bitwise_xor.Tensor eq.Scalar eq.Tensor ge.Scalar ge.Tensor gt.Scalar
        gt.Tensor _is_all_true.default isfinite.default isinf.default isnan.default le.Scalar
        le.Tensor logical_and.default logical_not.default logical_or.default logical_xor.default
        lt.Scalar lt.Tensor masked_fill.Scalar masked_fill.Tensor ne.Scalar ne.Tensor where.Scalar
        where.ScalarOther where.ScalarSelf where.self
        """
    ),
    # A trace fixes strides that another device's kernels do not give; reshape is a view where one is
    # possible.
    "aten._unsafe_view.default": Operator(torch.ops.aten.reshape.default, moves=True),
    "aten.view.default": Operator(torch.ops.aten.reshape.default, moves=True),
}
