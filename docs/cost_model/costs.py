# SPDX-License-Identifier: Apache-2.0
"""The cost model: rows by NVLink, by rail and in local memory, and the time of each operation as a pipeline of chunks.

Rank (n, i), index i on node n, has a rail to (m, i) on each other node m. In dispatch a token crosses once to each node that it
goes to, by the rail of its rank's index, and is relayed there over NVLink. Combine goes back the same way. Rows cross in chunks
of tokens. A relay is a leg: a call among the ranks of a node, for one chunk of the tokens of one node (decision record 0019).
- dispatch: the own node's legs come first, beside the first chunks on the rails; then the legs of each chunk that has come.
- combine, node: the legs of a chunk, whose sums are on the rails beside those of the next chunk; then the own node's.
- combine, wire and exact: the legs of all chunks; then all rows are on the rails at once, beside the own node's legs.

All ranks have the same number of tokens and draw their experts from the same distribution. A stage takes as long as the rank
that has the most rows in or out. Links are full duplex.
"""
import dataclasses
import math

from routing import Placement, Routing

MAX_RANKS = 1024  # of a group of several nodes
WEIGHT_BYTES = 4  # dispatch: the weight of a route, beside a row on the rail
TABLE_WORDS = 4   # prepare sends each rail peer a table with these, and 1 + 2 K for each token, of 4 bytes

OPERATIONS = ("dispatch", "combine node", "combine wire", "combine exact")


@dataclasses.dataclass(frozen=True)
class Rates:
    """GB/s are 1e9 bytes per second of payload, of one GPU in one direction. figures.py tells which are measured, and where."""
    nvlink_gbs: float = 350.0
    local_gbs: float = 4050.0      # reads and writes of the GPU's own memory
    overlap_exponent: float = 4.0  # an operation takes the norm of this exponent of its time on the wires and in local memory
    call_us: float = 9.5           # what a call takes beside its rows
    leg_us: float = 17.6           # what a leg takes beside its rows
    prepare_us: float = 27.0       # on one node
    rail_gbs: float = 50.0         # on paper
    rail_efficiency: float = 0.85  # payload of what is on paper
    rail_latency_us: float = 20.0  # one chunk's exchange with all other nodes, beside its bytes
    all_gather_us: float = 50.0    # prepare's all-gather of the counts over nodes
    host_wait_us: float = 20.0     # exact sizes: the host learns them at the beginning of a call

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            least_is_zero = field.name.endswith("_us")
            if not math.isfinite(value) or value < 0 or (value == 0 and not least_is_zero):
                raise ValueError(f"{field.name} is {value}; it must be {'at least' if least_is_zero else 'above'} 0")
        if self.rail_efficiency > 1:
            raise ValueError(f"rail_efficiency is {self.rail_efficiency}; it must be at most 1")
        if self.overlap_exponent < 1:
            raise ValueError(f"overlap_exponent is {self.overlap_exponent}; it must be at least 1, which is no overlap at all")

    def rail_us(self, data_bytes):
        return data_bytes / (1e3 * self.rail_gbs * self.rail_efficiency)

    def nvlink_us(self, data_bytes):
        return data_bytes / (1e3 * self.nvlink_gbs)

    def local_us(self, data_bytes):
        return data_bytes / (1e3 * self.local_gbs)


@dataclasses.dataclass(frozen=True)
class Shape:
    """One layer on N nodes of G ranks."""
    tokens: int                # T, of each rank
    hidden: int                # H, elements
    element_bytes: int
    routing: Routing
    nodes: int                 # N
    ranks_per_node: int        # G
    sidecar_bytes: int = 0     # of each row of dispatch
    alignment: int = 1         # rows; dispatch writes the pads of the experts' zones
    chunk_tokens: int = 1024   # tokens of a rank that cross to a node at a time
    fixed_rail_tokens: int = 0 # tokens of a rank that cross to each node in every call; 0: as many as the routing needs

    def __post_init__(self):
        for name in ("tokens", "hidden", "element_bytes", "nodes", "ranks_per_node", "alignment", "chunk_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.sidecar_bytes < 0:
            raise ValueError(f"sidecar_bytes is {self.sidecar_bytes}; it must be at least 0")
        if not 0 <= self.fixed_rail_tokens <= self.tokens:
            raise ValueError(f"fixed_rail_tokens is {self.fixed_rail_tokens}; it must be 0 to {self.tokens}, the tokens of a "
                             "rank")
        if self.num_ranks > MAX_RANKS:
            raise ValueError(f"{self.nodes} nodes of {self.ranks_per_node} are {self.num_ranks} ranks; a group has at most "
                             f"{MAX_RANKS}")

    @property
    def num_ranks(self):
        return self.nodes * self.ranks_per_node

    @property
    def num_chunks(self):
        return -(-self.tokens // self.chunk_tokens)

    def rows_of_token(self, operation):
        """Returns how many rows of a token cross between its rank and one node at most."""
        top_k = self.routing.top_k
        return {"combine wire": min(self.ranks_per_node, top_k), "combine exact": top_k}.get(operation, 1)

    def row_bytes(self, operation):
        return self.hidden * self.element_bytes + (self.sidecar_bytes if operation == "dispatch" else 0)


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Rows of one operation, of the rank that has the most of each kind."""
    rail: float     # to or from other nodes
    relayed: float  # over NVLink, of tokens that live on other nodes
    own: float      # over NVLink, of tokens that live on the same node
    local: float    # reads and writes of local memory, own and relayed, beside those of the links


def most(outgoing, incoming):
    return max(max(outgoing), max(incoming))


def padded_rows(trials, probability, alignment):
    """Returns the expected demand of one expert, rounded up to the alignment: `trials` tokens choose it with `probability`."""
    mean = trials * probability
    if alignment == 1:
        return mean
    if probability == 1:
        return -(-trials // alignment) * alignment
    spread = 12 * math.sqrt(mean * (1 - probability)) + 12
    expected = 0.0
    for demand in range(max(0, int(mean - spread)), min(trials, int(mean + spread)) + 1):
        log = (math.lgamma(trials + 1) - math.lgamma(demand + 1) - math.lgamma(trials - demand + 1)
               + demand * math.log(probability) + (trials - demand) * math.log1p(-probability))
        expected += math.exp(log) * (-(-demand // alignment) * alignment)
    return expected


def nvlink_rows(by_rank, ranks_per_node, sources):
    """Returns the rows over NVLink, of the rank that has the most, of `sources` tokens for each index of the node.

    by_rank [P]: rows of a token that concern the rank. Rank j meets those of all indices but its own. That is at least as much
    as a token of index i, or the relay of index i, has at its end, which is the sum over all j but i."""
    return sources * (ranks_per_node - 1) * max(by_rank)


def traffic(shape, operation, placement=None):
    placement = placement or Placement(shape.routing, shape.nodes, shape.ranks_per_node)
    ranks, others, tokens, size = shape.num_ranks, shape.nodes - 1, shape.tokens, shape.ranks_per_node
    by_rank = placement.rank_routes if operation == "combine exact" else placement.rank_hit
    if operation in ("combine wire", "combine exact"):  # a row for each rank, or for each route, of a node
        by_node = [sum(by_rank[first:first + size]) for first in range(0, ranks, size)]
    else:
        by_node = placement.node_hit
    # A rank of node n has the rows of its own tokens for other nodes, and of other nodes' tokens for n, in opposite directions.
    rail = tokens * most([sum(by_node) - mine for mine in by_node], [others * mine for mine in by_node])
    if shape.fixed_rail_tokens:
        rail = others * shape.fixed_rail_tokens * shape.rows_of_token(operation)
    own = nvlink_rows(by_rank, size, tokens)
    relayed = nvlink_rows(by_rank, size, tokens * others)

    slots = tokens * ranks * max(placement.rank_routes)
    if operation == "dispatch":
        chosen = shape.routing.top_k / shape.routing.num_experts
        slots = padded_rows(tokens * ranks, chosen, shape.alignment) * max(end - first for first, end in placement.experts)
        # The source reads each token once, the receiver those rows again that have several slots. Beside it the rows of the
        # rail are read, packed, sent, received and relayed.
        local = tokens + tokens * (ranks - 1) * max(placement.rank_hit_again) + slots + 5 * rail
    else:
        # Slots are read, what comes back over NVLink is written and read, the sum is written. The rail's rows are written,
        # sent, received and summed.
        local = slots + tokens + 2 * own + 2 * relayed + 4 * rail
    return Traffic(rail=rail, relayed=relayed, own=own, local=local)


def pipeline_us(first, second, second_is_free_at=0.0):
    """Returns when the last of some chunks has left two stages, each of which takes one chunk at a time; first, second: each
    chunk's time there."""
    has_left, is_free_at = 0.0, second_is_free_at
    for first_us, second_us in zip(first, second):
        has_left += first_us
        is_free_at = max(is_free_at, has_left) + second_us
    return is_free_at


def over_nodes_us(shape, operation, rows, rates):
    """Returns the time of the chunks on rails and NVLink, and of what has to come before or behind them."""
    row, chunks = shape.row_bytes(operation), shape.num_chunks
    rail_row = row + (shape.routing.top_k * WEIGHT_BYTES if operation == "dispatch" else 0)
    sizes = [min(shape.chunk_tokens, shape.tokens - first) / shape.tokens
             for first in range(0, shape.tokens, shape.chunk_tokens)]
    rail = [rates.rail_latency_us + rates.rail_us(rows.rail * rail_row * size) for size in sizes]
    legs = [rates.leg_us * (shape.nodes - 1) + rates.nvlink_us(rows.relayed * row * size) for size in sizes]
    own = rates.leg_us * chunks + rates.nvlink_us(rows.own * row)
    copied = rates.local_us(2 * rows.rail * row)  # rows are packed for the rails, or forwarded to them
    # A call begins with an exchange of sizes.
    begin = rates.rail_latency_us + (0.0 if shape.fixed_rail_tokens else rates.host_wait_us)
    if operation == "dispatch":
        return begin + pipeline_us([us + copied * size for us, size in zip(rail, sizes)], legs, own)
    if operation == "combine node":
        chunked = pipeline_us(legs, rail)
    else:
        chunked = sum(legs) + copied + rates.rail_latency_us + rates.rail_us(rows.rail * rail_row)
        own += copied
    # The home rank sums when everything has come.
    return begin + max(chunked, sum(legs) + own) + rates.local_us((rows.rail + rows.own + shape.tokens) * row)


def operation_us(shape, operation, rates, placement=None):
    """Returns the time of one of OPERATIONS, microseconds."""
    rows = traffic(shape, operation, placement)
    if shape.nodes == 1:
        wires = rates.nvlink_us(rows.own * shape.row_bytes(operation))
    else:
        wires = over_nodes_us(shape, operation, rows, rates)
    local = rates.local_us(rows.local * shape.row_bytes(operation))
    longer = max(wires, local)
    norm = longer * sum((part / longer)**rates.overlap_exponent for part in (wires, local))**(1 / rates.overlap_exponent)
    return rates.call_us + norm


def prepare_us(shape, rates):
    """Returns the time of prepare, microseconds. Over nodes a leg for each (node, chunk) delivers the slots, as a call does."""
    if shape.nodes == 1:
        return rates.prepare_us
    tables = (shape.nodes - 1) * table_bytes(shape)
    return (rates.prepare_us + rates.all_gather_us + rates.rail_latency_us + rates.rail_us(tables)
            + rates.call_us * shape.nodes * shape.num_chunks)


def table_bytes(shape):
    """Returns the bytes of the table that a rank sends in prepare to its rail peer on one node."""
    return 4 * (TABLE_WORDS + padded_tokens(shape) * (1 + 2 * shape.routing.top_k))


def padded_tokens(shape):
    """Returns T', the tokens of a rank in whole chunks; fewer than a chunk are one as they are."""
    return shape.tokens if shape.num_chunks == 1 else shape.num_chunks * shape.chunk_tokens


def memory_bytes(shape):
    """Returns the bytes of a rank by the formulas of decision record 0019, by name; tensors of the caller's are not in it."""
    top_k, padded = shape.routing.top_k, padded_tokens(shape)
    chunk = min(shape.tokens, shape.chunk_tokens)
    row = -(-shape.hidden * shape.element_bytes // 16) * 16
    rail_rows = 2 * shape.nodes * padded * shape.hidden * shape.element_bytes
    return {
        "rows beside the rails, `node`: 2 N T' rows": rail_rows,
        "rows beside the rails, `wire`: 2 N T' min(G, K) rows": rail_rows * shape.rows_of_token("combine wire"),
        "rows beside the rails, `exact`: 2 N T' K rows": rail_rows * shape.rows_of_token("combine exact"),
        "their weights, 2 N T' K float32": 2 * shape.nodes * padded * top_k * 4,
        "tables of prepare, 2 N (4 + T' (1 + 2 K)) int32": 2 * shape.nodes * table_bytes(shape),
        "handle memory at most, beside 12 R: 12 (N + 1) T' K + (4 P + 16 N) T' + 8 P E + 64 KiB":
            12 * (shape.nodes + 1) * padded * top_k + (4 * shape.num_ranks + 16 * shape.nodes) * padded
            + 8 * shape.num_ranks * shape.routing.num_experts + 65536,
        "window of the node: staged rows of dispatch, G C": shape.ranks_per_node * chunk * row,
        "window of the node: staged rows of combine, C min(G, K)": chunk * shape.rows_of_token("combine wire") * row,
    }
