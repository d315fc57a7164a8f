# SPDX-License-Identifier: Apache-2.0
"""The block of epx_moe.h with gradients, wide and in FP8."""

import weakref

import torch

from .._values import refuse, refuse_dtype
from ._derivatives import differentiable_once
from ._gathered import GatheredWeights, transposes_of
from ._group import call, require_usable
from ._library import layers, new_tensor, ops
from ._ops import _refuse_transforms

_block_fwd, _block_bwd = ops.block_fwd.default, ops.block_bwd.default
_block_fwd_fp8, _block_bwd_fp8 = ops.block_fwd_fp8.default, ops.block_bwd_fp8.default
_quantise_weights = ops.quantise_weights.default
WEIGHTS = "first_weight", "down_weight"  # of experts in FP8
_MASTERS = torch.float32, torch.bfloat16  # their dtypes
_FP8_BLOCK = 128  # their rows and columns that have one scale


def _fake_outputs(block, tokens):
    layer = layers[block]
    num_tokens, top_k = tokens.shape[0], layer.router.top_k
    return (
        torch.empty_like(tokens),
        new_tensor(tokens, num_tokens, top_k, dtype=torch.int32),
        new_tensor(tokens, num_tokens, top_k, dtype=torch.float32),
        new_tensor(tokens, layer.group.num_ranks, layer.group.num_experts, dtype=torch.int64),
        new_tensor(tokens, 3, dtype=torch.int64),
        torch.empty(2, dtype=torch.int64, device="cpu"),
    )


@torch.library.register_fake("epx::block_fwd")
def _(block, tokens, logits, selection_bias, token_mask, first_weight, down_weight, first_bias, down_bias, keeps_flight):
    return _fake_outputs(block, tokens)


@torch.library.register_fake("epx::block_fwd_fp8")
def _(block, tokens, logits, selection_bias, token_mask, gate_up_codes, gate_up_scales, down_codes, down_scales, keeps_flight):
    return _fake_outputs(block, tokens)


@torch.library.register_fake("epx::block_bwd")
def _(block, flight, grad_out, logits, first_weight, down_weight, first_bias, down_bias, aux_loss_grad):
    nothing = new_tensor(grad_out, 0)
    return (
        torch.empty_like(grad_out),
        torch.empty_like(logits),
        torch.empty_like(first_weight),
        torch.empty_like(down_weight),
        nothing if first_bias is None else torch.empty_like(first_bias),
        nothing.clone() if down_bias is None else torch.empty_like(down_bias),
    )


@torch.library.register_fake("epx::block_bwd_fp8")
def _(block, flight, grad_out, logits, gate_up_codes, gate_up_scales, gate_up, _, down, __, float_grads, aux_loss_grad):
    dtype = torch.float32 if float_grads else grad_out.dtype
    grads = [new_tensor(codes, *(codes.shape[dim] for dim in (0, 2, 1)), dtype=dtype) for codes in (gate_up, down)]
    return torch.empty_like(grad_out), torch.empty_like(logits), *grads


@torch.library.register_fake("epx::quantise_weights")
def _(weights, transposed):
    local, rows, columns = [weights.shape[dim] for dim in ((0, 2, 1) if transposed else (0, 1, 2))]
    scales = new_tensor(weights, local, rows // _FP8_BLOCK, columns // _FP8_BLOCK, dtype=torch.float32)
    return new_tensor(weights, local, rows, columns, dtype=torch.float8_e4m3fn), scales


def _scaled(num_ranks, grad_out, aux_loss_grad):
    """(scale, grad_out, aux_loss_grad) for a backward whose experts' gradients become those of a mean over the ranks: they are
    sums over the ranks. What arrives is scaled instead of them, because they are much larger than tokens, and by a power of two,
    which rounds nothing that is a normal number. Gradients in float16 are too small for that."""
    _refuse_transforms(grad_out)
    scale = 1.0 if grad_out.dtype == torch.float16 else 0.5 ** (num_ranks.bit_length() - 1)
    if num_ranks > 1:
        grad_out, aux_loss_grad = grad_out * scale, aux_loss_grad * scale * num_ranks
    return scale, grad_out.contiguous(), aux_loss_grad


def _unscaled(num_ranks, scale, grad_tokens, grad_logits, *grads):
    """The gradients that such a backward returns."""
    if num_ranks > 1:
        grad_tokens, grad_logits = grad_tokens / scale, grad_logits / scale
    if scale * num_ranks != 1:
        grads = [None if grad is None else grad.div_(scale * num_ranks) for grad in grads]
    return grad_tokens, grad_logits, *grads


class Block(torch.autograd.Function):
    """numbers: those of the block and of its group, and the number of ranks that experts' gradients are a mean over."""

    @staticmethod
    def forward(ctx, numbers, aux_loss_grad, selection_bias, token_mask, tokens, logits, first, down, first_bias, down_bias):
        block, group, _ = numbers
        *outputs, flight = call(
            group, _block_fwd, block, tokens, logits, selection_bias, token_mask, first, down, first_bias, down_bias, True
        )
        ctx.layer = *numbers, aux_loss_grad
        ctx.save_for_backward(flight, logits, first, down, first_bias, down_bias)
        ctx.mark_non_differentiable(*outputs[1:])
        return tuple(outputs)

    @staticmethod
    @differentiable_once
    def backward(ctx, grad_out, *_):
        block, group, num_ranks, aux_loss_grad = ctx.layer
        flight, logits, first, down, first_bias, down_bias = ctx.saved_tensors
        scale, grad_out, aux_loss_grad = _scaled(num_ranks, grad_out, aux_loss_grad)
        made = call(group, _block_bwd, block, flight, grad_out, logits, first, down, first_bias, down_bias, aux_loss_grad)
        of = grad_out, logits, first, down, first_bias, down_bias
        made = [None if each is None else grad for each, grad in zip(of, made)]
        return None, None, None, None, *_unscaled(num_ranks, scale, *made)


def quantised(group, weights, transposed):
    """The codes and the scales of each of the weights, or of their transposes."""
    return [part for each in weights for part in call(group, _quantise_weights, each.detach(), transposed)]


def params_of(group, weights):
    """What a forward reads of the weights: codes and scales, as they were gathered, or quantised here."""
    if isinstance(weights[0], GatheredWeights):
        return [part for each in weights for part in (each.codes, each.scales)]
    return quantised(group, weights, False)


def require_masters(*weights):
    """Refuses weights of a dtype that cannot be quantised."""
    for name, each in zip(WEIGHTS, weights):
        if each.dtype not in _MASTERS:
            refuse_dtype(name, each.dtype, _MASTERS)


class Fp8Block(torch.autograd.Function):
    """The same with a recipe in FP8. kept: those of KeptWeights. Where there are none, forward and backward quantise what they
    need, and the weights themselves are saved in between, as those of a wide block are. Of weights gathered in FP8 codes
    and scales are saved, whose memory FSDP2 frees in between and fills again, and the backward transposes them."""

    @staticmethod
    def forward(ctx, numbers, recomputes, aux_loss_grad, selection_bias, token_mask, tokens, logits, first, down, *kept):
        block, group, _ = numbers
        params = kept[:4] or params_of(group, (first, down))
        *outputs, flight = call(group, _block_fwd_fp8, block, tokens, logits, selection_bias, token_mask, *params, True)
        ctx.layer = *numbers, recomputes, aux_loss_grad, first.dtype == torch.float32
        ctx.num_kept, ctx.are_gathered = len(kept), isinstance(first, GatheredWeights)
        saved = (*params[:2], *kept[4:]) if kept else params if ctx.are_gathered else (first, down)
        ctx.save_for_backward(flight, logits, *saved)
        ctx.mark_non_differentiable(*outputs[1:])
        return tuple(outputs)

    @staticmethod
    @differentiable_once
    def backward(ctx, grad_out, *_):
        block, group, num_ranks, recomputes, aux_loss_grad, float_grads = ctx.layer
        flight, logits, *saved = ctx.saved_tensors
        gate_up = None, None
        if ctx.num_kept:
            gate_up, transposed = saved[:2], saved[2:]
        elif ctx.are_gathered:
            gate_up, transposed = saved[:2], transposes_of(saved)
        else:
            transposed = quantised(group, saved, True)
            if recomputes:
                gate_up = quantised(group, saved[:1], False)
        scale, grad_out, aux_loss_grad = _scaled(num_ranks, grad_out, aux_loss_grad)
        made = call(group, _block_bwd_fp8, block, flight, grad_out, logits, *gate_up, *transposed, float_grads, aux_loss_grad)
        return None, None, None, None, None, *_unscaled(num_ranks, scale, *made), *([None] * ctx.num_kept)


class KeptWeights:
    """Weights in FP8 that many calls share: codes and scales of both, and then those of their transposes. They stay where they
    are, since a CUDA graph may read them."""

    def __init__(self, group):
        self._group = group
        self.tensors = ()
        self._seen = ()

    def update(self, *weights):
        if torch.compiler.is_compiling():
            refuse("quantise_parameters is not supported under torch.compile: call it outside of what is compiled")
        for name, each in zip(WEIGHTS, weights):
            require_usable(self._group, name, each)
            if isinstance(each, GatheredWeights):
                refuse(f"{name} has been gathered in FP8: quantise_parameters() is for weights that are not sharded")
            if hasattr(each, "to_local"):
                refuse(f"{name} is a DTensor, which is sharded: quantise_parameters() is for whole weights")
        require_masters(*weights)
        with torch.inference_mode(False), torch.no_grad():  # autograd does not save tensors of inference mode
            made = [part for transposed in (False, True) for part in quantised(self._group.number, weights, transposed)]
            if self.tensors:
                for kept, each in zip(self.tensors, made):
                    kept.copy_(each)  # which also tells autograd, where a backward is still to come
            else:
                self.tensors = tuple(made)
        self._seen = [(weakref.ref(each), _version(each)) for each in weights]

    def require_current(self, *weights):
        """Refuses weights that are known to have changed. A compiled graph cannot ask."""
        if not self.tensors or torch.compiler.is_compiling():
            return
        for name, each, (seen, version) in zip(WEIGHTS, weights, self._seen):
            if seen() is not each or _version(each) != version:
                refuse(f"{name} has changed since quantise_parameters(): call it after each step of the optimizer")


def _version(tensor):
    return 0 if tensor.is_inference() else tensor._version
