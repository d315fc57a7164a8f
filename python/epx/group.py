# SPDX-License-Identifier: Apache-2.0
"""Groups, and the operations on numpy arrays of the host.

Symbols in shapes: P ranks, E experts, E_l of them on this rank, T tokens of this rank in a call, K = top_k, H hidden size, N
rows of the receive arrays, R receive capacity in rows, M rows from each rank in the rank-major layout, S elements of a sidecar.
"""

import ctypes
import dataclasses
import os
import types
import weakref

import numpy

from . import _interrupt, _lifetime, _slices, _structs
from ._config import make_config
from ._formats import on_wire
from ._group_base import GroupBase
from ._plans import Load, Plan, RankMajorPlan, read_only
from ._rows import Rows
from ._structs import EventKind, Operation, Pads, RowSpacing, Status, known
from ._tensors import aligned_bytes, output, tensor
from ._values import boolean, count, integer, member, refuse, refuse_destroyed, refuse_dtype, require_kind, require_one_size
from .bootstrap import reraise
from .errors import Error, EventError, group_error, raise_call_failed, raise_if_failed, read_report

_INDEX_DTYPES = (numpy.dtype(numpy.int32), numpy.dtype(numpy.int64))
_FLOAT32 = numpy.dtype(numpy.float32)
_pointer = ctypes.pointer
_SIZE_OF = {struct: ctypes.sizeof(struct) for struct in _structs.STRUCTS}


def memory_plan(num_ranks, **config) -> dict[str, int]:
    """What a rank of such a group takes, in bytes, as a dict of the fields of epx_memory_plan. `config` is that of Group.
    Neither allocates nor communicates."""
    plan = _structs.MemoryPlan(struct_size=_SIZE_OF[_structs.MemoryPlan])
    raise_if_failed(_structs.epx_group_memory_plan(make_config(**config), integer("num_ranks", num_ranks), plan))
    return {name: getattr(plan, name) for name, _ in plan._fields_ if name != "struct_size"}


def _counts_dtype(dtype):
    dtype = numpy.dtype(dtype)
    if dtype.isnative and dtype not in _INDEX_DTYPES:  # tensor() refuses another byte order
        refuse_dtype("counts_dtype", dtype, _INDEX_DTYPES)
    return dtype


def _received(recv_tokens, recv_weights, recv_sidecar):
    """What a dispatch returns."""
    return (recv_tokens, recv_weights) if recv_sidecar is None else (recv_tokens, recv_weights, recv_sidecar)


class Group(GroupBase):
    """The ranks that share the experts, as one of them sees it.

    Created by all ranks of the bootstrap, with the same configuration but for color, key, num_comm_sms and timeout:

    num_experts               E
    max_tokens_per_rank       the largest T
    hidden_dim                the largest H
    max_top_k                 the largest K
    max_token_dtype           the widest dtype of tokens: "float32", "float16" or "bfloat16", or a dtype; or "float8_e4m3fn",
                              "float8_e5m2" or "float4_e2m1fn", of a group whose rows all travel in 8 or 4 bits
    max_alignment             the largest alignment of zones, in rows; default 128
    max_recv_tokens_per_rank  R; 0: the worst case
    max_sidecar_bytes         the largest sidecar of a token, in bytes; default 0
    combine_precision         "wire", "exact" or "node"
    overflow                  "error" or "drop"
    transport                 "auto", "host" or "nccl"
    num_comm_sms              the most SMs that a call takes on GPUs; 0: all but 48
    ranks_per_node            ranks of each node; 0: as found. The host transport takes any divisor of the number of ranks
    fixed_rail_tokens         tokens of each rank that every call moves to each other node; 0: as many as there are
    color, key                ranks of different colors form different groups, ordered by (key, rank)
    timeout                   seconds that one wait for a peer lasts; default: EPX_TIMEOUT_MS, or 300

    The operations here take numpy arrays and need the host transport. All ranks make the same calls in the same order. A call
    that is refused raises InvalidArgumentError and has not taken part; the group lives on, but its peers wait for the call. A
    failure that has ended the group raises GroupError, here and in each later call. Recoverable errors, as an index that is no
    expert or an overflow, are raised by check() alone.

    A group is of use in the process that created it, and one thread at a time uses it. The end of the interpreter destroys it,
    in whatever order objects die, or aborts it when an exception ends the interpreter.
    """

    def __init__(self, bootstrap, **config):
        self._destroyed = True  # until there is one
        _lifetime.destroy_abandoned()
        _interrupt.listen()
        made = make_config(**config)
        value = _structs.GROUP()
        bootstrap.error = None
        with bootstrap.in_use() as struct:
            status = _structs.epx_group_create(struct, made, value)
        try:
            raise_if_failed(status)
        except Error as error:
            reraise(bootstrap, error)
        self._handle = _lifetime.Handle(value.value)
        self.process = os.getpid()
        self._finalizer = weakref.finalize(self, _lifetime.abandon, self._handle)
        self._finalizer.atexit = False
        self._destroyed = False
        _lifetime.keep(self)
        try:
            _interrupt.reraise()
        except BaseException:  # the others have the group, and would wait for this rank
            self.abort()
            raise
        info = _structs.GroupInfo(struct_size=_SIZE_OF[_structs.GroupInfo])
        raise_if_failed(_structs.epx_group_query(value, info))
        # torch.compile traces reads of a namespace's fields, but not of a ctypes struct's.
        self._info = types.SimpleNamespace(**{name: getattr(info, name) for name, _ in info._fields_})
        self._layers, self._handle_mem_bytes = {}, {}
        self._max_sidecar_bytes = made.max_sidecar_bytes

    @property
    def handle(self) -> int:
        """The epx_group, as an integer."""
        if self._destroyed:
            refuse_destroyed("group")
        return self._handle.value

    def require_process(self) -> None:
        """Refuses a child of fork(). Calls of the C API do so themselves; this is for what happens before such a call."""
        if os.getpid() != self.process:
            refuse(f"{self!r} belongs to process {self.process}, and this is {os.getpid()}, a child of its fork()")

    def add_user(self, end) -> None:
        """Has the group destroyed only when end() returns True. It is called when the group is to be destroyed, and again later
        as long as it returns False, and must not wait."""
        self._handle.users.append(end)

    @property
    def is_destroyed(self) -> bool:
        """Whether destroy() has been called."""
        return self._destroyed

    def destroy(self) -> None:
        """Frees the group, from any thread; a second time it does nothing. Waits for calls that are under way on the GPU, for up
        to timeout. A call on numpy arrays that another thread is in is ended: it raises GroupError, and peers learn of it. A
        call of JAX or PyTorch that a thread is in may end first, and the group is freed when it has; after abort() that is
        soon."""
        if not self._destroyed:
            self._destroyed = True
            self._finalizer.detach()
            _lifetime.abandon(self._handle)
        _lifetime.destroy_abandoned()

    def abort(self) -> None:
        """Ends the group, from any thread: this rank's calls raise GroupError, and peers learn that it aborted. Does not
        wait."""
        raise_if_failed(_structs.epx_group_abort(self.handle))

    def check(self) -> None:
        """Raises GroupError when the group has ended, else EventError when calls have seen recoverable errors since the last
        check. Local; waits for nothing, so on GPUs it tells what has been seen so far."""
        report = read_report(self.handle)
        if report.status != Status.SUCCESS:
            raise group_error(report)
        events = {known(EventKind, kind): count for kind, count in enumerate(report.event_counts) if count}
        if events:
            raise EventError(
                report.message.decode(errors="replace"),
                events,
                known(Operation, report.first_event_operation),
                report.first_event_sequence,
            )

    def handle_mem_size(self, top_k, alignment=1) -> int:
        """Bytes of the handle memory of such a layer."""
        size = self._handle_mem_bytes.get((top_k, alignment))
        if size is None:
            bytes_ = ctypes.c_size_t()
            raise_if_failed(_structs.epx_handle_mem_size(self.handle, self._layer(top_k, alignment), bytes_))
            size = self._handle_mem_bytes[top_k, alignment] = bytes_.value
        return size

    def load_of_counts(self, global_counts, top_k, *, alignment=1, zone_stride=0) -> Load:
        """What a prepare with these arguments drops, on all ranks together, and what it would have needed. All ranks find the
        same without another exchange, so they can agree to run a step again. global_counts: [P, E] of the plan, int32 or
        int64, in memory of the host."""
        counts = tensor("global_counts", numpy.asarray(global_counts))
        report = _structs.LoadReport(struct_size=_SIZE_OF[_structs.LoadReport])
        layer = self._layer(top_k, alignment)
        stride = integer("zone_stride", zone_stride)
        raise_if_failed(_structs.epx_load_of_counts(self.handle, layer, stride, counts, report))
        return Load(*(getattr(report, field.name) for field in dataclasses.fields(Load)))

    def prepare(
        self, topk_idx, *, alignment=1, counts_dtype=numpy.int32, with_slot=False, with_slot_origin=False, zone_stride=0
    ) -> Plan:
        """Turns top-k indices into a plan. Collective.

        topk_idx: [T, K] int32 or int64, the global expert of each route; -1 masks it.
        alignment: rows that zones are padded to.  counts_dtype: int32 or int64, of counts, offsets and global_counts.
        zone_stride: rows from one zone to the next, a multiple of alignment, the same on all ranks; routes to an expert beyond
        it are dropped. Rows of a zone behind its pads are not written, in dispatch() and combine_bwd(). 0: a zone begins where
        the one before it ends.
        Returns a Plan.
        """
        self.require_host()
        indices = tensor("topk_idx", topk_idx, (None, None), _INDEX_DTYPES)
        plan, outputs = self._new_plan(*topk_idx.shape, alignment, counts_dtype, with_slot, with_slot_origin)
        self._call("prepare", plan, indices, *outputs, more=(count("zone_stride", zone_stride),))
        return read_only(plan)

    def dispatch(
        self, plan, tokens, topk_weights=None, *, num_rows=None, recv_tokens=None, pads="zero", sidecar=None, format=None
    ) -> tuple:
        """Brings tokens to the ranks of their experts. Collective.

        tokens: [T, H] float32, float16 or bfloat16, or of 8 bits, which are copied.  topk_weights: [T, K] float32, or None on
        all ranks.  format: a RowFormat, or None on all ranks: with one the rows travel in 8 or 4 bits, and tokens, recv_tokens
        or both are tuples (rows, scales), as it says. Arrays of 8 bits are those of ml_dtypes. Rows of float4_e2m1fn are
        uint8 [..., H / 2]: two elements to a byte, the even index in the low nibble.
        num_rows: N; default: plan.num_rows.  recv_tokens: [N, H] to be written; default: a new array.  pads: "zero", or
        "untouched": pads inside zones are not written.  sidecar: [T, S] of any dtype, block scales for instance, with the same
        bytes of a row on all ranks, at most max_sidecar_bytes; or None on all ranks.
        Returns (recv_tokens [N, H], recv_weights [N] float32 or None); with a sidecar a third array, [N, S] of its dtype. Rows
        behind plan.num_rows, and with a zone_stride those of a zone behind its pads, are not written, and neither are their
        weights, sidecars and scales: in new arrays they hold whatever memory held.
        """
        self.require_host()
        require_kind("plan", plan, Plan)
        if num_rows is None and recv_tokens is None:
            num_rows = plan.num_rows
        views, rows, weights = self._dispatch_tensors(plan, tokens, topk_weights, num_rows, recv_tokens, sidecar, format)
        self._call("dispatch", plan, *views, more=(member(Pads, pads, "pads"), 0, rows.format))
        return _received(rows.recv_tokens, weights, rows.recv_sidecar)

    def prepare_dispatch(
        self,
        tokens,
        topk_idx,
        topk_weights=None,
        *,
        alignment=1,
        counts_dtype=numpy.int32,
        with_slot=False,
        with_slot_origin=False,
        num_rows=None,
        recv_tokens=None,
        pads="zero",
        sidecar=None,
        format=None,
        zone_stride=0,
    ) -> tuple:
        """prepare() and dispatch() in one call, which all ranks make instead of the two. Collective.

        Arguments are those of the two. num_rows: N; default: R while the call is made, of which plan.num_rows are returned.
        Returns (Plan, recv_tokens [N, H], recv_weights [N] float32 or None); with a sidecar a fourth array. Where R rows were
        received, scales in columns or packed are a view of wider ones.
        """
        self.require_host()
        indices = tensor("topk_idx", topk_idx, (None, None), _INDEX_DTYPES)
        plan, outputs = self._new_plan(*topk_idx.shape, alignment, counts_dtype, with_slot, with_slot_origin)
        is_sized = num_rows is not None or recv_tokens is not None
        rows = num_rows if is_sized else self.max_recv_tokens_per_rank
        views, moved, weights = self._dispatch_tensors(plan, tokens, topk_weights, rows, recv_tokens, sidecar, format)
        more = member(Pads, pads, "pads"), 0, moved.format, count("zone_stride", zone_stride)
        self._call("prepare_dispatch", plan, indices, *outputs, *views, more=more)
        if is_sized:
            return read_only(plan), *_received(moved.recv_tokens, weights, moved.recv_sidecar)
        used = [None if array is None else array[: plan.num_rows] for array in (weights, moved.recv_sidecar)]
        return read_only(plan), *_received(moved.first(plan.num_rows), *used)

    def combine(self, plan, expert_out, recv_weights=None, *, out=None, format=None) -> numpy.ndarray:
        """Brings the experts' outputs back. Collective.

        expert_out: [N, H] float32, float16 or bfloat16.  recv_weights: [N] float32 as dispatch returned them, or None: all 1.
        out: [T, H] of the same dtype to be written.  format: a RowFormat of "block128" or "mx" with wire_only, or None on all
        ranks: the one in which the ranks' partial sums travel; it needs combine_precision "wire". With the default amax_floor
        of "block128" small sums vanish: give it amax_floor=0.
        Returns out [T, H]: the sum over a token's routes of weight * row; zero for a token without routes.
        """
        self.require_host()
        require_kind("plan", plan, Plan)
        rows = tensor("expert_out", expert_out, (None, None))
        weights = self._row_weights("recv_weights", recv_weights, len(expert_out))
        if out is None:
            out = numpy.empty((plan.num_tokens, expert_out.shape[1]), expert_out.dtype)
        self._call("combine", plan, rows, weights, output("out", out), more=self._of_sums(format))
        return out

    def combine_bwd(self, plan, grad_out, expert_out=None, recv_weights=None, *, num_rows=None, format=None) -> tuple:
        """The gradients of combine(). Collective.

        grad_out: [T, H] float32, float16 or bfloat16.  recv_weights: [N] float32, as combine had them.  expert_out: [N, H] of
        grad_out's dtype, when the gradient of recv_weights is wanted.  num_rows: N; default: that of expert_out or recv_weights,
        else plan.num_rows.  format: a RowFormat, or None on all ranks: grad_out is then what tokens is in dispatch(),
        grad_expert_out what recv_tokens is, and expert_out float32, float16 or bfloat16. Where rows arrive quantised, scales are
        multiplied by recv_weights, which BLOCK128 alone takes.
        Returns (grad_expert_out [N, H], grad_recv_weights [N] float32 or None). Rows that dispatch() does not write hold
        whatever memory held.
        """
        self.require_host()
        require_kind("plan", plan, Plan)
        if num_rows is None:
            name, given = ("expert_out", expert_out) if expert_out is not None else ("recv_weights", recv_weights)
            num_rows = plan.num_rows if given is None else tensor(name, given).sizes[0]
        num_rows = count("num_rows", num_rows)
        grads = self._rows(grad_out, plan.num_tokens, (num_rows,), format, numpy.empty, name="grad_out")
        grad_weights = rows = None
        if expert_out is not None:
            dtypes = (grad_out.dtype,) if format is None else None  # with one the library tells which it takes
            rows = tensor("expert_out", expert_out, (num_rows, grads.sent.sizes[1]), dtypes)
            grad_weights = numpy.empty(num_rows, _FLOAT32)
        self._call(
            "combine_bwd",
            plan,
            grads.sent,
            rows,
            self._row_weights("recv_weights", recv_weights, num_rows),
            grads.received,
            None if grad_weights is None else tensor("grad_recv_weights", grad_weights),
            more=(grads.format,),
        )
        return grads.recv_tokens, grad_weights

    def dispatch_bwd(self, plan, grad_recv, grad_recv_weights=None, *, format=None) -> tuple:
        """The gradients of dispatch(). Collective.

        grad_recv: [N, H] float32, float16 or bfloat16.  grad_recv_weights: [N] float32, or None on all ranks.  format: as in
        combine().
        Returns (grad_tokens [T, H], grad_topk_weights [T, K] float32 or None).
        """
        self.require_host()
        require_kind("plan", plan, Plan)
        grad = tensor("grad_recv", grad_recv, (None, None))
        weights = self._row_weights("grad_recv_weights", grad_recv_weights, len(grad_recv))
        return self._bring_home("dispatch_bwd", plan, grad_recv, grad, weights, format)

    def dispatch_rank_major(
        self,
        tokens,
        topk_idx,
        topk_weights=None,
        *,
        max_rows=None,
        compact=False,
        counts_dtype=numpy.int32,
        sidecar=None,
        format=None,
    ) -> tuple:
        """Brings each token once to each rank that one of its experts lives on, by source rank and without a prepare.
        Collective.

        tokens: [T, H], as in dispatch().  topk_idx: [T, K] int32 or int64, as in prepare().  topk_weights: [T, K] float32, or
        None on all ranks.  max_rows: M, the same on all ranks; default: max_tokens_per_rank, which loses nothing.
        P * min(M, max_tokens_per_rank) * K must not exceed R.  compact: the same on all ranks; True: rows from all ranks follow
        each other without gaps, and are recv_tokens.reshape(P * M, H)[:plan.num_rows]; the arrays have the same shapes.
        sidecar, format: as in dispatch(), without scales in tiles.
        Returns (RankMajorPlan, recv_tokens [P, M, H], recv_weights [P, M, K] float32 or None); with a sidecar a fourth array,
        [P, M, S] of its dtype. Scales by rows are [P, M, S], and row_scales [P, M]. Rows that hold no token, recv_tokens[r,
        plan.counts[r]:] unless they are compact, are zero, and so are their scales.
        """
        self.require_host()
        spacing = RowSpacing.COMPACT if boolean("compact", compact) else RowSpacing.STRIDED
        indices = tensor("topk_idx", topk_idx, (None, None), _INDEX_DTYPES)
        num_tokens, top_k = topk_idx.shape
        self.require_layer(top_k)
        max_rows = self.max_tokens_per_rank if max_rows is None else count("max_rows", max_rows)
        lead = self.num_ranks, max_rows
        rows = self._rows(tokens, num_tokens, lead, format, numpy.zeros, sidecar=sidecar)
        plan = RankMajorPlan(
            top_k,
            num_tokens,
            max_rows,
            aligned_bytes(self.handle_mem_size(top_k)),
            counts=numpy.empty(self.num_ranks, _counts_dtype(counts_dtype)),
            topk_idx=numpy.full((*lead, top_k), -1, numpy.int32),
            compact=compact,
        )
        weights = recv_weights = None
        if topk_weights is not None:
            weights = self._topk_weights(plan, topk_weights)
            recv_weights = numpy.zeros((*lead, top_k), _FLOAT32)
        self._call(
            "dispatch_rank_major",
            plan,
            rows.sent,
            indices,
            weights,
            rows.received,
            tensor("recv_topk_idx", plan.topk_idx),
            None if recv_weights is None else tensor("recv_weights", recv_weights),
            tensor("counts", plan.counts),
            more=(rows.format, spacing, 0),
        )
        return read_only(plan), *_received(rows.recv_tokens, recv_weights, rows.recv_sidecar)

    def combine_rank_major(self, plan, expert_out, *, out=None, format=None) -> numpy.ndarray:
        """Brings back the sums of the experts' outputs. Collective; not in a group of combine_precision "exact".

        expert_out: [P, M, H], for each row the sum over its routes of weight * the expert's output.  out: [T, H] to be written.
        format: as in combine(), of the rows on their way home.
        Returns out [T, H]: the sum of a token's rows over the ranks; zero for a token without routes.
        """
        self.require_host()
        require_kind("plan", plan, RankMajorPlan)
        rows = tensor("expert_out", expert_out, (self.num_ranks, plan.max_rows, None))
        if out is None:
            out = numpy.empty((plan.num_tokens, expert_out.shape[2]), expert_out.dtype)
        self._call("combine_rank_major", plan, rows, output("out", out), more=self._of_sums(format))
        return out

    def combine_rank_major_bwd(self, plan, grad_out, *, format=None) -> numpy.ndarray | tuple:
        """The gradient of combine_rank_major(). Collective.

        grad_out: [T, H] float32, float16 or bfloat16.  format: as in combine_bwd(), without scales in tiles.
        Returns grad_expert_out [P, M, H]: for each row its token's gradient; zero in rows that hold no token. What arrives
        quantised is a tuple, as in dispatch_rank_major().
        """
        self.require_host()
        require_kind("plan", plan, RankMajorPlan)
        lead = self.num_ranks, plan.max_rows
        grads = self._rows(grad_out, plan.num_tokens, lead, format, numpy.zeros, name="grad_out")
        self._call("combine_rank_major_bwd", plan, grads.sent, grads.received, more=(grads.format,))
        return grads.recv_tokens

    def dispatch_rank_major_bwd(self, plan, grad_recv, grad_recv_weights=None, *, format=None) -> tuple:
        """The gradients of dispatch_rank_major(). Collective; not in a group of combine_precision "exact".

        grad_recv: [P, M, H], for each row the sum over its routes.  grad_recv_weights: [P, M, K] float32, or None on all ranks.
        format: as in combine_rank_major().
        Returns (grad_tokens [T, H], grad_topk_weights [T, K] float32 or None).
        """
        self.require_host()
        require_kind("plan", plan, RankMajorPlan)
        rows = self.num_ranks, plan.max_rows
        grad = tensor("grad_recv", grad_recv, (*rows, None))
        weights = None
        if grad_recv_weights is not None:
            weights = tensor("grad_recv_weights", grad_recv_weights, (*rows, plan.top_k), (_FLOAT32,))
        return self._bring_home("dispatch_rank_major_bwd", plan, grad_recv, grad, weights, format)

    def ragged_all_to_all(
        self, operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, transposed=False
    ) -> numpy.ndarray:
        """Moves slices of rows between the ranks, as jax.lax.ragged_all_to_all does, into `output` itself. Collective; not in a
        group of several nodes. It needs no plan, and its rows may be longer than hidden_dim.

        operand: [N, ...] of any dtype of whole bytes.  output: [M, ...] to be written, of operand's dtype and other dimensions.
        N and M may differ from rank to rank.  input_offsets, send_sizes, output_offsets, recv_sizes: [K], all int32 or all
        int64. K is here the number of slices, a multiple of P up to 2048, the same on all ranks. Slice i goes to rank
        i // (K / P): it is the send_sizes[i] rows of operand from input_offsets[i] on, and begins at row output_offsets[i] of
        that rank's output. recv_sizes[r * (K / P) + j] has the rows of the j-th slice from rank r to this one.  transposed: the
        same on all ranks; True: the rows go back, from where the four arrays would bring them. operand is then the gradient of
        the forward's output, and output that of its operand. Of a row that more than one slice has read, one gradient arrives:
        they are not summed.
        Returns output. Rows that nothing lands on keep what they have; where slices overlap in it, either may be what is left.

        A slice moves whole or not at all. It does not where its size is negative, where send_sizes and recv_sizes disagree on
        it, or where it leaves operand or output; check() then raises EventError with BAD_SLICE on both of its ranks.
        """
        self.require_host()
        views = _slices.tensors(operand, output, (input_offsets, send_sizes, output_offsets, recv_sizes))
        call, pointers = _structs.RAGGED_ALL_TO_ALL, [_pointer(view) for view in views]
        self._run(call, call.struct(call.struct_size, None, *pointers, _slices.direction(transposed), 0))
        return output

    def _bring_home(self, name, plan, grad_recv, grad, weights, row_format):
        """grad_tokens and grad_topk_weights, of grad_recv, a view of it, and one of grad_recv_weights or None."""
        grad_tokens = numpy.empty((plan.num_tokens, grad_recv.shape[-1]), grad_recv.dtype)
        grad_weights = None if weights is None else numpy.empty((plan.num_tokens, plan.top_k), _FLOAT32)
        made = None if weights is None else tensor("grad_topk_weights", grad_weights)
        self._call(name, plan, grad, weights, tensor("grad_tokens", grad_tokens), made, more=self._of_sums(row_format))
        return grad_tokens, grad_weights

    def _new_plan(self, num_tokens, top_k, alignment, counts_dtype, with_slot, with_slot_origin):
        """A plan whose arrays are still to be written, and the outputs of epx_prepare_args that are views of them."""
        self.require_layer(top_k, alignment)
        dtype = _counts_dtype(counts_dtype)
        plan = Plan(
            top_k,
            alignment,
            num_tokens,
            aligned_bytes(self.handle_mem_size(top_k, alignment)),
            counts=numpy.empty(self.num_local_experts, dtype),
            offsets=numpy.empty(self.num_local_experts + 1, dtype),
            global_counts=numpy.empty((self.num_ranks, self.num_experts), dtype),
            info=numpy.empty(5, numpy.int64),
            slot=numpy.empty((num_tokens, top_k), numpy.int32) if with_slot else None,
            slot_origin=numpy.empty((self.max_recv_tokens_per_rank, 3), numpy.int32) if with_slot_origin else None,
        )
        names = "counts", "offsets", "global_counts", "info", "slot", "slot_origin"
        arrays = ((name, getattr(plan, name)) for name in names)
        return plan, [None if array is None else tensor(name, array) for name, array in arrays]

    def _dispatch_tensors(self, plan, tokens, topk_weights, num_rows, recv_tokens, sidecar, row_format):
        """The tensors of epx_dispatch_args, the Rows, and recv_weights. num_rows is for a recv_tokens of None."""
        require_one_size("num_rows", num_rows, recv_tokens, "N")
        if recv_tokens is None:
            num_rows = count("num_rows", num_rows)
        else:
            first = recv_tokens[0] if isinstance(recv_tokens, tuple) and recv_tokens else recv_tokens
            num_rows = tensor("recv_tokens", first).sizes[0]
        rows = self._rows(
            tokens, plan.num_tokens, (num_rows,), row_format, numpy.empty, recv_tokens=recv_tokens, sidecar=sidecar
        )
        weights = recv_weights = None
        if topk_weights is not None:
            weights = self._topk_weights(plan, topk_weights)
            recv_weights = numpy.empty(num_rows, _FLOAT32)
        row_weights = None if weights is None else tensor("recv_weights", recv_weights)
        return (rows.sent, weights, rows.received, row_weights), rows, recv_weights

    def _of_sums(self, row_format):
        """The last field of a call that adds rows up."""
        on_wire("format", row_format, self, sums=True)
        return (None if row_format is None else _pointer(row_format.to_c()),)

    def _rows(self, *args, **options):
        return Rows(*args, max_sidecar_bytes=self.max_sidecar_bytes, **options)

    @staticmethod
    def _topk_weights(plan, topk_weights):
        return tensor("topk_weights", topk_weights, (plan.num_tokens, plan.top_k), (_FLOAT32,))

    @staticmethod
    def _row_weights(name, weights, num_rows):
        return None if weights is None else tensor(name, weights, (num_rows,), (_FLOAT32,))

    def _layer(self, top_k, alignment):
        layer = self._layers.get((top_k, alignment))
        if layer is None:
            layer = _structs.Layer(integer("top_k", top_k), integer("alignment", alignment))
            self._layers[top_k, alignment] = layer
        return layer

    def _call(self, name, plan, *tensors, more=()):
        handle_mem = plan.handle_mem
        call = _structs.CALLS[name]
        args = call.struct(
            call.struct_size,
            self._layer(plan.top_k, plan.alignment),
            handle_mem.ctypes.data,
            handle_mem.nbytes,
            None,
            *[None if view is None else _pointer(view) for view in tensors],
            *more,
        )
        self._run(call, args)

    def _run(self, call, args):
        handle = self.handle
        status = call.function(handle, args)
        if status:
            raise_call_failed(handle, status)
        _interrupt.reraise()
