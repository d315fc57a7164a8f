# SPDX-License-Identifier: Apache-2.0
"""The layer of moe_torch.py's variant `torch-fp8`: rows travel to their experts in FP8, and experts multiply in FP8.

A row is E4M3 codes and a scale, a power of 2 as in torchao's FP8 training. all_to_all_single carries both, as bytes. The
codes that arrive go straight into torch._scaled_grouped_mm. The gradients of weights sum over rows, so they need scales
along each expert's rows: torchao's kernel makes them, or the products are of bfloat16 rows, whichever is faster. The way
home is in bfloat16. Gradients go straight through the quantiser.

Without a GPU the same is computed from dequantised rows in float32, for correctness only.
"""
import dataclasses
import importlib.metadata
import importlib.util
import sys

import torch
import torch.distributed as dist

FP8, MAX_FP8 = torch.float8_e4m3fn, 448.0
LEAST_AMAX = 1e-12  # torchao's; so a row of zeros has a scale, too
ALIGNMENT = 16  # of each expert's rows, and at least so many: torch._scaled_grouped_mm takes no other sums over rows
SCALE_BYTES = 16  # beside a row on the wire; four are the scale, and the others keep rows at multiples of 16 bytes


def left_out(shape, device):
    """Returns why the variant is not measured, or nothing."""
    if shape.biases:
        return "experts in FP8 have no biases"
    if shape.hidden % ALIGNMENT or shape.ffn % ALIGNMENT:
        return f"H is {shape.hidden} and F is {shape.ffn}, and both must be multiples of {ALIGNMENT}"
    if device.type == "cuda" and importlib.util.find_spec("torchao") is None:
        return f"{sys.executable} has no package torchao"
    return None


def versions(device):
    return {"torchao": importlib.metadata.version("torchao")} if device.type == "cuda" else {}


def scale_of(amax):
    """Returns the least power of 2 by which FP8's range reaches amax, in float32."""
    bits = (amax.clamp(min=LEAST_AMAX) / MAX_FP8).view(torch.int32)
    return ((bits + 0x7FFFFF) & 0x7F800000).view(torch.float32)


def quantise(rows):
    """Returns codes [..., n] and scales [...] of rows [..., n]; a row is about its codes times its scale."""
    rows = rows.float()
    scales = scale_of(rows.abs().amax(-1))
    return (rows * scales.reciprocal()[..., None]).to(FP8), scales


def dequantise(codes, scales):
    return (codes.float() * scales[..., None]).to(torch.bfloat16)


def quantise_weights(weights):
    """Returns the codes [E_l, n, k] and scales [E_l, n] of weights [E_l, n, k]; expert by expert, for the memory's sake."""
    codes = torch.empty(weights.shape, dtype=FP8, device=weights.device)
    scales = torch.empty(weights.shape[:-1], device=weights.device)
    for expert, of_expert in enumerate(weights):
        codes[expert], scales[expert] = quantise(of_expert)
    return codes, scales


def swiglu(pre_act):
    """Returns SwiGLU of pre_act [N, 2F] in FP8: codes [N, F] and scales [N]."""
    gate, up = pre_act.float().chunk(2, dim=-1)
    return quantise(torch.nn.functional.silu(gate) * up)


def swiglu_bwd(pre_act, grad):
    """Returns the gradient of pre_act in FP8 and in bfloat16, and SwiGLU in bfloat16, for the gradient of `down`."""
    gate, up = pre_act.float().chunk(2, dim=-1)
    grad, sigmoid = grad.float(), torch.sigmoid(gate)
    silu = gate * sigmoid
    halves = grad * up * (sigmoid + silu * (1 - sigmoid)), grad * silu
    scales = scale_of(torch.maximum(*(half.abs().amax(-1) for half in halves)))
    inverse = scales.reciprocal()[:, None]
    codes = torch.cat([(half * inverse).to(FP8) for half in halves], dim=-1)
    return codes, scales, torch.cat([half.to(torch.bfloat16) for half in halves], dim=-1), (silu * up).to(torch.bfloat16)


def sum_of_routes(rows, row_of_route, weights=None):
    """Returns the sum of each token's rows [T, H], which `weights` [T, K] multiply."""
    total = 0
    for k in range(row_of_route.shape[1]):
        of_route = rows[row_of_route[:, k]].float()
        total = total + (of_route if weights is None else of_route * weights[:, k, None])
    return total.to(rows.dtype)


def grad_of_weights_of_routes(rows, row_of_route, grad_out):
    return (rows[row_of_route].float() * grad_out[:, None].float()).sum(-1)


def zones_of(rows, ends):
    """Returns the rows of each expert, for loops on the CPU."""
    return rows.tensor_split(ends[:-1].tolist())


def grouped(rows, weights, ends):
    """Returns rows @ weights[e].T for the rows of each expert e, [N, n]; rows [N, k] and weights [E_l, n, k] are in FP8."""
    if ends.is_cuda:
        return torch._scaled_grouped_mm(rows[0], weights[0].transpose(1, 2), rows[1], weights[1], offs=ends,
                                        out_dtype=torch.bfloat16, use_fast_accum=True)
    wide_rows, wide_weights = (codes.float() * scales[..., None] for codes, scales in (rows, weights))
    products = [zone @ weight.T for zone, weight in zip(zones_of(wide_rows, ends), wide_weights)]
    return torch.cat(products).to(torch.bfloat16)


def weight_grads_in_bf16(grads, rows, ends):
    """Returns grads.T @ rows over the rows of each expert, [E_l, n, k]; grads [N, n] and rows [N, k] are in bfloat16."""
    if ends.is_cuda:
        return torch._grouped_mm(grads.t(), rows, offs=ends)
    products = [grad.float().T @ zone.float() for grad, zone in zip(zones_of(grads, ends), zones_of(rows, ends))]
    return torch.stack(products).to(torch.bfloat16)


def weight_grads_in_fp8(grads, rows, ends):
    """The same as a product in FP8, both quantised along the rows of each expert."""
    if not ends.is_cuda:
        def rounded(wide):
            return torch.cat([dequantise(*quantise(zone.T)).T for zone in zones_of(wide, ends)])

        return weight_grads_in_bf16(rounded(grads), rounded(rows), ends)
    # The kernel for one tensor, triton_fp8_per_group_colwise_scales, is wrong where a group is much larger than the mean.
    from torchao.prototype.moe_training.kernels import triton_fp8_per_group_colwise_scales_dual

    grad_codes, grad_scales, codes, scales = triton_fp8_per_group_colwise_scales_dual(grads, rows, ends, FP8, True)
    # torchao's scales multiply what is quantised; those of a product multiply the sum.
    return torch._scaled_grouped_mm(grad_codes.t(), codes, grad_scales.reciprocal(), scales.reciprocal(), offs=ends,
                                    out_dtype=torch.bfloat16, use_fast_accum=True)


WEIGHT_GRADS = {"gradients of weights in FP8": weight_grads_in_fp8,
                "gradients of weights in bfloat16": weight_grads_in_bf16}


@dataclasses.dataclass
class Exchange:
    """Where rows go, for one routing. A rank sends a row for each of its T * K routes, and R rows arrive. Their experts
    read them in N slots: zones, one for each expert, whose pads are rows of zeros."""
    sends: list  # rows to each rank
    receives: list  # rows from each rank
    token_of_row: torch.Tensor  # [T * K], of the rows that are sent
    route_of_row: torch.Tensor  # [T * K]
    row_of_route: torch.Tensor  # [T, K]
    slot_of_row: torch.Tensor  # [R], of the rows that arrive
    row_of_slot: torch.Tensor  # [N]; pads have R
    ends: torch.Tensor  # [E_l], of the zones, int32

    @staticmethod
    def of(routing, top_k):
        return Exchange(routing.sends, routing.receives, routing.by_expert // top_k, routing.by_expert,
                        routing.by_route.view(-1, top_k),
                        *zones(routing.counts, routing.counts_on_host, sum(routing.receives)))

    def send(self, codes, scales):
        """Sends each token's codes [T, H] to its experts, with scales [T * K] by row. Returns what `receive` takes."""
        hidden = codes.shape[1]
        rows = torch.empty((scales.shape[0], hidden + SCALE_BYTES), dtype=torch.uint8, device=codes.device)
        torch.index_select(codes.view(torch.uint8), 0, self.token_of_row, out=rows[:, :hidden])
        rows.view(torch.float32)[:, hidden // 4] = scales
        num_rows = sum(self.receives)
        arrived = rows.new_empty((num_rows + 1, rows.shape[1]))
        arrived[num_rows].zero_()  # the row of all pads
        return arrived, dist.all_to_all_single(arrived[:num_rows], rows, self.receives, self.sends, async_op=True)

    def receive(self, travel):
        """Returns codes [N, H] and scales [N], once the rows have arrived."""
        arrived, work = travel
        work.wait()
        hidden = arrived.shape[1] - SCALE_BYTES
        codes = arrived[:, :hidden].index_select(0, self.row_of_slot).view(FP8)
        return codes, arrived.view(torch.float32)[:, hidden // 4].index_select(0, self.row_of_slot)

    def send_home(self, rows):
        """Returns rows [T * K, H] from those of the slots, and what to wait for before they are read."""
        leaving = rows.index_select(0, self.slot_of_row)
        returned = leaving.new_empty((self.route_of_row.numel(), rows.shape[1]))
        return returned, dist.all_to_all_single(returned, leaving, self.sends, self.receives, async_op=True)


def zones(counts, counts_on_host, num_rows):
    """Returns slot_of_row, row_of_slot and ends of an Exchange; counts [P, E_l]: rows from each rank for each expert."""
    sizes = ((counts.sum(0) + ALIGNMENT - 1) // ALIGNMENT).clamp(min=1) * ALIGNMENT
    num_slots = sum(max(-(-count // ALIGNMENT), 1) * ALIGNMENT for count in counts_on_host.sum(0).tolist())
    ends = sizes.cumsum(0)
    of_segment = counts.reshape(-1)  # rows from one rank for one expert follow each other, on arrival and in the zone
    begins = ((ends - sizes) + counts.cumsum(0) - counts).view(-1)
    shifts = begins - (of_segment.cumsum(0) - of_segment)
    rows = torch.arange(num_rows, device=counts.device)
    slot_of_row = rows + torch.repeat_interleave(shifts, of_segment, output_size=num_rows)
    row_of_slot = torch.full((num_slots,), num_rows, device=counts.device).scatter_(0, slot_of_row, rows)
    return slot_of_row, row_of_slot, ends.to(torch.int32)


class Fp8Layer:
    """A moe_torch.Layer whose experts are in FP8."""

    def __init__(self, layer):
        def compiled(function):
            return torch.compile(function, dynamic=False) if layer.device.type == "cuda" else function

        self.layer, self.weight_grads = layer, weight_grads_in_fp8
        self.quantise, self.dequantise, self.swiglu, self.swiglu_bwd = map(
            compiled, (quantise, dequantise, swiglu, swiglu_bwd))
        self.sum_of_routes, self.grad_of_weights = map(compiled, (sum_of_routes, grad_of_weights_of_routes))
        with torch.no_grad():  # once for each step of the optimizer, and not timed
            weights = layer.gate_up, layer.down
            self.gate_up, self.down = map(quantise_weights, weights)
            self.gate_up_t, self.down_t = (quantise_weights(each.transpose(1, 2)) for each in weights)

    def take_fastest(self, time):
        """Takes those gradients of weights with which time() is the least. Returns all times, by name."""
        times = {}
        for name, self.weight_grads in WEIGHT_GRADS.items():
            times[name] = time()
        self.weight_grads = WEIGHT_GRADS[min(times, key=times.get)]
        return times

    def forward(self, tokens, logits):
        routing = self.layer.route(logits, is_best=True)
        exchange = Exchange.of(routing, self.layer.shape.top_k)
        return Experts.apply(tokens, routing.weights, self.layer.gate_up, self.layer.down, self, exchange)


class Experts(torch.autograd.Function):
    """From tokens and the weights of their routes to the layer's output: dispatch, experts and combine."""

    @staticmethod
    def forward(ctx, tokens, weights, _gate_up, _down, fp8, exchange):
        codes, scales = fp8.quantise(tokens)  # before a token is copied for each of its routes
        rows = exchange.receive(exchange.send(codes, scales[exchange.token_of_row]))
        pre_act = grouped(rows, fp8.gate_up, exchange.ends)
        returned, work = exchange.send_home(grouped(fp8.swiglu(pre_act), fp8.down, exchange.ends))
        work.wait()
        ctx.fp8, ctx.exchange = fp8, exchange
        ctx.save_for_backward(*rows, pre_act, returned, weights)
        return fp8.sum_of_routes(returned, exchange.row_of_route, weights)

    @staticmethod
    def backward(ctx, grad_out):
        fp8, exchange = ctx.fp8, ctx.exchange
        codes, scales, pre_act, returned, weights = ctx.saved_tensors
        # The rows of a token's gradient differ by the weights of its routes alone, so the weights go into their scales.
        grad_codes, grad_scales = fp8.quantise(grad_out)
        travel = exchange.send(grad_codes, grad_scales[exchange.token_of_row] * weights.view(-1)[exchange.route_of_row])
        grad_weights = fp8.grad_of_weights(returned, exchange.row_of_route, grad_out)
        grad_result = exchange.receive(travel)

        grad_inner = grouped(grad_result, fp8.down_t, exchange.ends)
        grad_codes, grad_scales, grad_pre_act, inner = fp8.swiglu_bwd(pre_act, grad_inner)
        home, work = exchange.send_home(grouped((grad_codes, grad_scales), fp8.gate_up_t, exchange.ends))
        grad_down = fp8.weight_grads(fp8.dequantise(*grad_result), inner, exchange.ends)
        grad_gate_up = fp8.weight_grads(grad_pre_act, fp8.dequantise(codes, scales), exchange.ends)
        work.wait()
        return fp8.sum_of_routes(home, exchange.row_of_route), grad_weights, grad_gate_up, grad_down, None, None
