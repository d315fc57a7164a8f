# SPDX-License-Identifier: Apache-2.0
"""The programs of docs/python.md for PyTorch run as they stand. torch_page_test.py PAGE"""

import os
import re
import sys

import ranks

ranks.require("numpy", "torch", installer="install_torch_test_packages")
import torch

import epx

with open(sys.argv[1], encoding="utf-8") as page:
    programs = re.findall(r"```python\n(.*?)```", page.read().split("## Ten lines: PyTorch")[1], flags=re.DOTALL)

os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
names = {"batches": [(torch.randn(count, 512), torch.randn(count, 512)) for count in (4, 0, 7)]}
exec(programs[0].replace("init_process_group()", 'init_process_group("gloo")'), names)

generator = torch.Generator().manual_seed(1)
tokens, topk_idx = torch.randn(6, 512, generator=generator), torch.randint(0, 8, (6, 2), generator=generator)
up, down = (torch.randn(8, *sizes, generator=generator) / 20 for sizes in ((64, 512), (512, 64)))
names.update(tokens=tokens, topk_idx=topk_idx, topk_weights=torch.rand(6, 2, generator=generator), up=up, down=down)
exec(programs[1], names)
hidden = torch.einsum("tkfh,th->tkf", up[topk_idx], tokens).relu()
wanted = torch.einsum("tk,tkhf,tkf->th", names["topk_weights"], down[topk_idx], hidden)
torch.testing.assert_close(names["out"], wanted, rtol=1e-4, atol=1e-4)
exec(programs[2], names)
torch.testing.assert_close(names["out"], wanted, rtol=1e-4, atol=1e-4)

# Megatron's parts: a router's dense routing_map and probs, and experts that multiply by the probs of their rows.
topk_weights, routing_map, probs = names["topk_weights"], torch.zeros(6, 8, dtype=torch.bool), torch.zeros(6, 8)
topk_idx = torch.rand(6, 8, generator=generator).argsort(1)[:, :2]
routing_map.scatter_(1, topk_idx, True)
probs.scatter_(1, topk_idx, topk_weights)
routing_map[0, topk_idx[0, 0]] = False  # a token with one route
probs[0, topk_idx[0, 0]] = 0
exec(next(program for program in programs if "class EpxTokenDispatcher" in program), names)
for alignment in (1, 4):
    dispatcher = names["EpxTokenDispatcher"](names["group"], 2, alignment)
    sent = tokens.view(3, 2, 512).clone().requires_grad_()
    rows, tokens_per_expert, row_probs = dispatcher.dispatch_postprocess(
        *dispatcher.token_dispatch(*dispatcher.dispatch_preprocess(sent, routing_map, probs))
    )
    parts = zip(rows.split(tokens_per_expert.tolist()), row_probs.split(tokens_per_expert.tolist()), up, down)
    outs = [((part @ one.t()).relu() * weights[:, None]) @ two.t() for part, weights, one, two in parts]
    out = dispatcher.combine_postprocess(dispatcher.token_combine(dispatcher.combine_preprocess(torch.cat(outs))))
    dense = torch.einsum("te,tef,ehf->th", probs, torch.einsum("efh,th->tef", up, tokens).relu(), down)
    torch.testing.assert_close(out, dense.view(3, 2, 512), rtol=1e-4, atol=1e-4)
    out.sum().backward()
    assert sent.grad.isfinite().all() and sent.grad.abs().sum() > 0

# A step of a layer in FP8, whose weights are quantised after it.
names["layer"].destroy()
exec(next(program for program in programs if "quantise_parameters" in program), names)
layer = names["layer"]
before = layer(tokens)
(before - tokens).pow(2).sum().backward()
names["optimizer"].step()
after = layer(tokens)
assert (after - tokens).pow(2).sum() < (before - tokens).pow(2).sum()
del before, after
with torch.no_grad():
    layer.down_weight.mul_(2)
try:
    layer(tokens)
    raise AssertionError("the forward has not seen the change")
except epx.InvalidArgumentError as refusal:
    assert "has changed since quantise_parameters()" in str(refusal), refusal
names["group"].check()
names["layer"].destroy()
names["group"].destroy()
torch.distributed.destroy_process_group()
