# SPDX-License-Identifier: Apache-2.0
"""The exchange of epx.h on numpy arrays, by one process that sees the data of all ranks; in float64 where something is
summed."""

import numpy


def numeric_gradient(function, array):
    """Central differences of function() in each element of the float64 array that it reads."""
    gradient = numpy.zeros_like(array)
    for index in numpy.ndindex(array.shape):
        kept = array[index]
        array[index] = kept + 1e-6
        above = function()
        array[index] = kept - 1e-6
        below = function()
        array[index] = kept
        gradient[index] = (above - below) / 2e-6
    return gradient


class Exchange:
    """The plan of one layer: `topk_idx` has the indices of each rank. Routes beyond a zone_stride have no slot."""

    def __init__(self, topk_idx, num_experts, alignment=1, zone_stride=0):
        self.topk_idx = topk_idx
        self.num_ranks = num_ranks = len(topk_idx)
        self.num_experts = num_experts
        self.bounds = numpy.cumsum([0] + [num_experts // num_ranks + (r < num_experts % num_ranks) for r in range(num_ranks)])
        # A slot is (owner, row); inside a zone slots are ordered by (source rank, token, k).
        self.slots = [numpy.full(idx.shape + (2,), -1) for idx in topk_idx]
        self.counts, self.offsets = [], []
        for owner in range(num_ranks):
            counts, offsets = [], [0]
            for expert in range(self.bounds[owner], self.bounds[owner + 1]):
                routes = [
                    (source, token, k) for source, idx in enumerate(topk_idx) for token, k in numpy.argwhere(idx == expert)
                ]
                if zone_stride:
                    routes = routes[:zone_stride]
                for row, (source, token, k) in enumerate(routes):
                    self.slots[source][token, k] = owner, offsets[-1] + row
                counts.append(len(routes))
                offsets.append(offsets[-1] + (zone_stride or -(-len(routes) // alignment) * alignment))
            self.counts.append(numpy.array(counts, int))
            self.offsets.append(numpy.array(offsets))

    def routes(self, source):
        """(token, k, owner, row) of each route of a rank that is not masked."""
        for token, k in numpy.argwhere(self.slots[source][..., 0] >= 0):
            yield token, k, *self.slots[source][token, k]

    def global_counts(self):
        return numpy.array(
            [[numpy.count_nonzero(idx == expert) for expert in range(self.num_experts)] for idx in self.topk_idx]
        )

    def scatter(self, tokens):
        """Rows of each rank, from [T, ...] of each rank."""
        rows = [numpy.zeros((offsets[-1],) + tokens[0].shape[1:], tokens[0].dtype) for offsets in self.offsets]
        for source in range(self.num_ranks):
            for token, _, owner, row in self.routes(source):
                rows[owner][row] = tokens[source][token]
        return rows

    def scatter_weights(self, weights):
        rows = [numpy.zeros(offsets[-1], weights[0].dtype) for offsets in self.offsets]
        for source in range(self.num_ranks):
            for token, k, owner, row in self.routes(source):
                rows[owner][row] = weights[source][token, k]
        return rows

    def gather(self, rows, weights=None):
        """[T, H] of each rank: the sum over a token's routes, in float64."""
        sums = [numpy.zeros((len(idx),) + rows[0].shape[1:]) for idx in self.topk_idx]
        for source in range(self.num_ranks):
            for token, _, owner, row in self.routes(source):
                sums[source][token] += rows[owner][row].astype(float) * (1 if weights is None else weights[owner][row])
        return sums

    def partial_sums(self, rows, weights=None):
        """[P, T, H] float32 of each rank: for each owner the sum over a token's routes to it, by fma in k order."""
        sums = [numpy.zeros((self.num_ranks, len(idx)) + rows[0].shape[1:], numpy.float32) for idx in self.topk_idx]
        for source in range(self.num_ranks):
            for token, _, owner, row in self.routes(source):
                product = rows[owner][row].astype(float) * (1 if weights is None else weights[owner][row])
                sums[source][owner, token] = sums[source][owner, token] + product  # in float64, rounded once
        return sums

    def gather_weights(self, rows):
        weights = [numpy.zeros(idx.shape) for idx in self.topk_idx]
        for source in range(self.num_ranks):
            for token, k, owner, row in self.routes(source):
                weights[source][token, k] = rows[owner][row]
        return weights

    def row_products(self, grad_out, expert_out):
        """<grad_out[token], expert_out[row]> of each row, in float64."""
        products = [numpy.zeros(offsets[-1]) for offsets in self.offsets]
        for source in range(self.num_ranks):
            for token, _, owner, row in self.routes(source):
                products[owner][row] = grad_out[source][token].astype(float) @ expert_out[owner][row].astype(float)
        return products


class RankMajorExchange:
    """What the rank-major calls do with `max_rows` rows from each rank; data and results are lists by rank, sums are
    float64. compact: the rows of the ranks follow each other."""

    def __init__(self, topk_idx, num_experts, max_rows, compact=False):
        self.topk_idx = topk_idx
        self.num_ranks = num_ranks = len(topk_idx)
        self.max_rows = max_rows
        bounds = numpy.cumsum([0] + [num_experts // num_ranks + (r < num_experts % num_ranks) for r in range(num_ranks)])
        top_k = topk_idx[0].shape[1]
        self.counts = numpy.zeros((num_ranks, num_ranks), int)  # [owner, source]
        self.recv_topk_idx = [numpy.full((num_ranks, max_rows, top_k), -1) for _ in range(num_ranks)]
        self.rows = []  # (owner, source, place, token) of each kept row, whose place is that of a row [P, M]
        self.drops = [False] * num_ranks  # whether an owner drops rows
        for owner in range(num_ranks):
            for source, idx in enumerate(topk_idx):
                mine = (idx >= bounds[owner]) & (idx < bounds[owner + 1])
                sent = numpy.flatnonzero(mine.any(axis=1))
                kept = sent[:max_rows]
                self.drops[owner] |= len(kept) < len(sent)
                self.counts[owner, source] = len(kept)
                first = self.counts[owner, :source].sum() if compact else source * max_rows
                for row, token in enumerate(kept, first):
                    place = divmod(int(row), max_rows)
                    self.rows.append((owner, source, place, token))
                    self.recv_topk_idx[owner][place] = numpy.where(mine[token], idx[token] - bounds[owner], -1)

    def scatter(self, tokens):
        rows = [numpy.zeros((self.num_ranks, self.max_rows) + tokens[0].shape[1:], tokens[0].dtype) for _ in tokens]
        for owner, source, place, token in self.rows:
            rows[owner][place] = tokens[source][token]
        return rows

    def scatter_weights(self, weights):
        return [
            numpy.where(idx >= 0, rows, numpy.zeros((), rows.dtype))
            for idx, rows in zip(self.recv_topk_idx, self.scatter(weights))
        ]

    def gather(self, rows):
        sums = [numpy.zeros((len(idx),) + rows[0].shape[2:]) for idx in self.topk_idx]
        for owner, source, place, token in self.rows:
            sums[source][token] += rows[owner][place]
        return sums

    def partial_sums(self, rows):
        """[P, T, H] float32 of each rank: each owner's row of a token."""
        sums = [numpy.zeros((self.num_ranks, len(idx)) + rows[0].shape[2:], numpy.float32) for idx in self.topk_idx]
        for owner, source, place, token in self.rows:
            sums[source][owner, token] = rows[owner][place]
        return sums

    def gather_weights(self, weights):
        return self.gather([numpy.where(idx >= 0, each, 0) for idx, each in zip(self.recv_topk_idx, weights)])


class Slices:
    """Random slices of ragged_all_to_all, `per_pair` of them from each rank to each; data and results are lists by rank.
    Neither in operands nor in outputs do they overlap, and rows lie between them. num_rows: of the operands, and of the
    outputs."""

    def __init__(self, num_ranks, per_pair, seed, most_rows=3, dtype=numpy.int32):
        generator = numpy.random.default_rng(seed)
        # Of slice j from a source rank to another: its rows, and its first one in the operand and in the output.
        self.sizes = generator.integers(0, most_rows + 1, (num_ranks, num_ranks, per_pair))
        first_in, in_rows = zip(*[self._lay_out(generator, sizes) for sizes in self.sizes])
        first_out, out_rows = zip(*[self._lay_out(generator, sizes) for sizes in self.sizes.swapaxes(0, 1)])
        self.num_rows = in_rows, out_rows
        by_source = numpy.stack(first_in), numpy.stack(first_out).swapaxes(0, 1)
        self.rows = []  # (source rank, its row, destination rank, its row)
        for source, destination, j in numpy.ndindex(self.sizes.shape):
            starts = [firsts[source, destination, j] for firsts in by_source]
            for n in range(self.sizes[source, destination, j]):
                self.rows.append((source, starts[0] + n, destination, starts[1] + n))
        received = self.sizes.swapaxes(0, 1)
        # Of each rank: input_offsets, send_sizes, output_offsets, recv_sizes.
        arrays = by_source[0], self.sizes, by_source[1], received
        self.arguments = [tuple(array[rank].reshape(-1).astype(dtype) for array in arrays) for rank in range(num_ranks)]

    @staticmethod
    def _lay_out(generator, sizes):
        """The first row of each slice, in any order and with gaps, and the rows of all."""
        firsts, end = numpy.zeros(sizes.shape, int), 1
        for place in generator.permutation(sizes.size):
            firsts.flat[place] = end
            end += sizes.flat[place] + generator.integers(0, 2)
        return firsts, end

    def move(self, operands, outputs):
        moved = [output.copy() for output in outputs]
        for source, row, destination, place in self.rows:
            moved[destination][place] = operands[source][row]
        return moved

    def move_back(self, operands, outputs):
        """The other direction: operands have the rows of outputs."""
        moved = [output.copy() for output in outputs]
        for source, row, destination, place in self.rows:
            moved[source][row] = operands[destination][place]
        return moved
