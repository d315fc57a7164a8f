# SPDX-License-Identifier: Apache-2.0
"""The programs of docs/python.md for PyTorch run as they stand. torch_page_test.py PAGE"""

import os
import re
import sys

import ranks

ranks.require("numpy", "torch", installer="install_torch_test_packages")
import torch

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
names["group"].check()
names["layer"].destroy()
names["group"].destroy()
torch.distributed.destroy_process_group()
