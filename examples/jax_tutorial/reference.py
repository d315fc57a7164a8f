# SPDX-License-Identifier: Apache-2.0
"""The MoE layer on all tokens and all experts at once, with numpy in float64, and its gradients, written out."""

import types

import numpy
import scipy.special


def softmax(scores):
    shifted = numpy.exp(scores - scores.max(-1, keepdims=True))
    return shifted / shifted.sum(-1, keepdims=True)


def through_softmax(shares, grads):
    """Gradients of what softmax() took, from those of the shares that it returned."""
    return shares * (grads - (shares * grads).sum(-1, keepdims=True))


def log_sigmoid(logits):
    return -numpy.logaddexp(0, -logits)


def activate(name, pre_act):
    """Returns the activation, and the function that makes gradients of pre_act from those of the activation."""
    if name == "gelu":
        cdf, density = scipy.special.ndtr(pre_act), numpy.exp(-(pre_act**2) / 2) / numpy.sqrt(2 * numpy.pi)
        return pre_act * cdf, lambda grad: grad * (cdf + pre_act * density)
    if name == "relu2":
        positive = numpy.maximum(pre_act, 0)
        return positive**2, lambda grad: grad * 2 * positive
    gate, up = numpy.split(pre_act, 2, axis=-1)
    share = scipy.special.expit(gate)

    def through_swiglu(grad):
        return numpy.concatenate([grad * up * share * (1 + gate * (1 - share)), grad * gate * share], axis=-1)

    return gate * share * up, through_swiglu


def select(options, keys):
    """[T, K]: the experts of the largest keys, best first, ties by the lower index."""
    if options.num_groups > 1:
        per_group = options.group_score_top_k or options.top_k // options.topk_groups
        grouped = keys.reshape(len(keys), options.num_groups, -1)
        group_scores = -numpy.sort(-grouped, axis=-1)[..., :per_group].sum(-1)
        best = numpy.argsort(-group_scores, axis=1, kind="stable")[:, : options.topk_groups]
        chosen = (best[..., None] == numpy.arange(options.num_groups)).any(1)
        keys = numpy.where(chosen[..., None], grouped, -numpy.inf).reshape(keys.shape)
    return numpy.argsort(-keys, axis=1, kind="stable")[:, : options.top_k]


def weigh(options, logits, topk_idx):
    """Returns the weights [T, K], and the function that makes gradients of the logits from those of the weights."""
    selected = numpy.take_along_axis(logits, topk_idx, 1)
    is_sigmoid = options.score_function == "sigmoid"

    def at_selected(grads):
        whole = numpy.zeros_like(logits)
        numpy.put_along_axis(whole, topk_idx, grads, 1)
        return whole

    if is_sigmoid and not options.renormalize:
        scores = scipy.special.expit(selected)
        return scores, lambda grads: at_selected(grads * scores * (1 - scores))
    if not is_sigmoid and options.use_pre_softmax and not options.renormalize:
        scores = softmax(logits)
        return numpy.take_along_axis(scores, topk_idx, 1), lambda grads: through_softmax(scores, at_selected(grads))
    shares = softmax(log_sigmoid(selected) if is_sigmoid else selected)
    factor = scipy.special.expit(-selected) if is_sigmoid else 1.0
    return shares, lambda grads: at_selected(through_softmax(shares, grads) * factor)


def balance(options, logits, counts):
    """Returns the load-balance loss and the gradient of the logits."""
    is_sigmoid = options.score_function == "sigmoid"
    probabilities = softmax(log_sigmoid(logits) if is_sigmoid else logits)
    scale = logits.shape[1] * options.aux_loss_coeff / (options.top_k * len(logits) ** 2)
    grads = through_softmax(probabilities, numpy.broadcast_to(scale * counts, logits.shape))
    return scale * (probabilities.sum(0) @ counts), grads * (scipy.special.expit(-logits) if is_sigmoid else 1.0)


def run(options, params, inputs, grad_out):
    """The layer and its gradients. options: anything with the fields of epx.flax.MoEBlock.  params: arrays by name.
    inputs, grad_out: [..., H].

    Returns out, loss (the load-balance loss), counts [E], and the gradients of sum(out * grad_out) + loss: grad_inputs, and
    grads by name.
    """
    params = {name: numpy.asarray(array, numpy.float64) for name, array in params.items()}
    tokens, grad = (numpy.asarray(array, numpy.float64).reshape(-1, array.shape[-1]) for array in (inputs, grad_out))
    logits = tokens @ params["gate_kernel"]
    is_sigmoid = options.score_function == "sigmoid"
    scores = scipy.special.expit(logits) if is_sigmoid else softmax(logits) if options.use_pre_softmax else logits
    topk_idx = select(options, scores + params.get("expert_bias", 0))
    shares, through_weights = weigh(options, logits, topk_idx)
    weights = shares * options.scaling_factor
    counts = numpy.bincount(topk_idx.ravel(), minlength=logits.shape[1])
    loss, grad_logits = balance(options, logits, counts)

    out, grad_tokens, grad_weights = numpy.zeros_like(tokens), numpy.zeros_like(tokens), numpy.zeros_like(weights)
    grads = {name: numpy.zeros_like(array) for name, array in params.items()}
    for expert in range(logits.shape[1]):
        wi, wo = params["wi"][expert], params["wo"][expert]
        token, k = numpy.nonzero(topk_idx == expert)
        pre_act = tokens[token] @ wi + (params["wi_bias"][expert] if "wi_bias" in params else 0)
        inner, through_activation = activate(options.activation, pre_act)
        expert_out = inner @ wo + (params["wo_bias"][expert] if "wo_bias" in params else 0)
        weight = weights[token, k][:, None]
        out[token] += weight * expert_out
        grad_weights[token, k] = (grad[token] * expert_out).sum(1)
        grad_expert_out = weight * grad[token]
        grad_pre_act = through_activation(grad_expert_out @ wo.T)
        grad_tokens[token] += grad_pre_act @ wi.T
        grads["wi"][expert], grads["wo"][expert] = tokens[token].T @ grad_pre_act, inner.T @ grad_expert_out
        if "wi_bias" in params:
            grads["wi_bias"][expert], grads["wo_bias"][expert] = grad_pre_act.sum(0), grad_expert_out.sum(0)
    grad_logits = grad_logits + through_weights(grad_weights * options.scaling_factor)
    grads["gate_kernel"] = tokens.T @ grad_logits
    grad_tokens += grad_logits @ params["gate_kernel"].T
    shape = inputs.shape
    return types.SimpleNamespace(
        out=out.reshape(shape), loss=loss, counts=counts, grad_inputs=grad_tokens.reshape(shape), grads=grads
    )
