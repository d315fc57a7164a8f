# SPDX-License-Identifier: Apache-2.0
"""Where the model's rates come from, what was measured on one node, and what others have published."""
import dataclasses

from costs import Shape
from routing import Routing

RAILS = "record 0018, 4 H200 as two hosts of two"

# (name of a field of Rates, what it is, unit, source; None: nothing was measured, it is assumed)
SOURCES = (
    ("nvlink_gbs", "payload over NVLink, each GPU in one direction", "GB/s",
     f"measured: record 0001, 4 H200, 64 to 128 CTAs; 349 between two GPUs ({RAILS})"),
    ("local_gbs", "reads and writes of a GPU's own memory by all SMs", "GB/s",
     "measured: record 0014, bound of dispatch on one H200, 186 us for 52,478 rows"),
    ("call_us", "a call beside its rows", "us",
     "measured: record 0006, 4 H200, prepare, dispatch and combine of 1 token in 28.4 us, a third for each"),
    ("leg_us", "a leg of 1,024 tokens beside its rows", "us",
     "measured: record 0012, combine_bwd of 1,024 and 4,096 tokens on 2 H200 in 57.2 and 176.0 us, so that 4 calls in place of "
     "1 take 52.8 more"),
    ("prepare_us", "prepare on one node", "us", "measured: record 0006, 4 H200"),
    ("overlap_exponent", "an operation takes (wires^x + local^x)^(1/x)", "",
     "fitted to the figures of one node below; not a measurement"),
    ("rail_gbs", "a rail on paper, 400 Gb/s", "GB/s", None),
    ("rail_efficiency", "payload of the rail's rate on paper", "", None),
    ("rail_latency_us", "one chunk's grouped ncclSend and ncclRecv beside its bytes", "us", None),
    ("all_gather_us", "all-gather of the counts over nodes in prepare", "us", None),
    ("host_wait_us", "exact sizes: the wait on the host in dispatch and in combine", "us", None),
)


@dataclasses.dataclass(frozen=True)
class Measured:
    """A time that a decision record prints; `us` is the median of the slowest rank."""
    ranks: int
    tokens: int
    top_k: int
    operation: str  # of costs.OPERATIONS
    alignment: int
    us: float
    source: str

    def shape(self):
        return Shape(tokens=self.tokens, hidden=7168, element_bytes=2, routing=Routing(256, self.top_k), nodes=1,
                     ranks_per_node=self.ranks, alignment=self.alignment)


# bfloat16, H 7168, 256 experts, uniform routing, H200, windows, all SMs
ONE_NODE = (
    Measured(4, 4096, 8, "dispatch", 1, 473.0, "the first design"),
    Measured(4, 4096, 8, "dispatch", 128, 474.3, "record 0006, 132 SMs"),
    Measured(4, 4096, 8, "combine wire", 128, 485.9, "record 0006, 132 SMs"),
    Measured(4, 4096, 8, "combine wire", 1, 482.0, "the first design"),
    Measured(2, 4096, 8, "dispatch", 128, 208.3, "record 0005"),
    Measured(2, 4096, 8, "combine wire", 128, 204.9, "record 0005"),
    Measured(2, 11264, 3, "dispatch", 128, 414.5, "record 0005"),
    Measured(2, 11264, 3, "combine wire", 128, 416.9, "record 0005"),
    Measured(2, 16384, 1, "dispatch", 128, 361.2, "record 0005"),
    Measured(2, 16384, 1, "combine wire", 128, 347.5, "record 0005"),
    Measured(1, 4096, 8, "dispatch", 128, 200.0, "record 0014, 132 SMs"),
    Measured(1, 4096, 8, "combine wire", 128, 149.0, "record 0014, 132 SMs"),
)

# Grouped ncclSend and ncclRecv over NCCL's socket transport between two hosts of two, GB/s each way (least, most); record 0018
SOCKETS = (("NCCL's default sockets", 2.0, 2.2), ("4 socket threads of 4 sockets", 3.7, 4.4))
SOCKET_LATENCY_US = 200.0  # assumed; all-gathers of 256 int32 over these sockets took 60 to 390, record 0018


@dataclasses.dataclass(frozen=True)
class Published:
    """What others have published for groups of 8 GPUs a node: GB/s by their own counting of bytes, or microseconds."""
    system: str
    gpus: int
    dispatch: float
    combine: float

    @property
    def nodes(self):
        return self.gpus // 8


DEEPEP_V1 = tuple(Published("DeepEP V1", *figures) for figures in ((16, 43, 43), (32, 58, 57), (64, 51, 50)))
DEEPEP_V2 = tuple(Published("DeepEP V2, SM90", *figures) for figures in ((16, 90, 81), (32, 61, 61)))
# 128 tokens; of NCCL EP rates, of DeepEP times
NCCL_EP_LL = tuple(Published("NCCL EP, low latency", *figures)
                   for figures in ((16, 76.7, 73.0), (32, 53.6, 50.0), (64, 48.8, 43.8)))
DEEPEP_V1_LL = tuple(Published("DeepEP V1, low latency", *figures)
                     for figures in ((16, 118, 195), (32, 155, 273), (64, 173, 314)))

# DeepSeek-V3's gate takes of 8 groups the 4 with the largest sums of their two best scores. This is the number of distinct
# nodes of a token, where each group is a node, for independent scores. A simulation in cost_model_test.py finds it.
GATE_DISTINCT_NODES = 3.95

