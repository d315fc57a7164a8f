# SPDX-License-Identifier: Apache-2.0
"""What groups are to all kinds of arrays: what they were created for, and how they end. The operations are not here."""

from ._structs import CombinePrecision, DTYPE_NAMES, Transport, known
from ._values import integer, name_of, refuse


class GroupBase:
    """A subclass has `_info`, an object with the fields of epx_group_info, `_max_sidecar_bytes`, and the methods destroy(),
    abort() and is_destroyed."""

    group_id = property(lambda self: self._info.group_id, doc="Random, and the same on all ranks.")
    rank = property(lambda self: self._info.rank, doc="This rank in the group.")
    num_ranks = property(lambda self: self._info.num_ranks, doc="P.")
    num_experts = property(lambda self: self._info.num_experts, doc="E.")
    num_local_experts = property(lambda self: self._info.num_local_experts, doc="E_l.")
    first_local_expert = property(lambda self: self._info.first_local_expert, doc="Global index of this rank's first expert.")
    max_recv_tokens_per_rank = property(lambda self: self._info.max_recv_tokens_per_rank, doc="R, in rows.")
    max_tokens_per_rank = property(lambda self: self._info.max_tokens_per_rank, doc="The largest T.")
    hidden_dim = property(lambda self: self._info.hidden_dim, doc="The largest H.")
    max_top_k = property(lambda self: self._info.max_top_k, doc="The largest K.")
    max_alignment = property(lambda self: self._info.max_alignment, doc="The largest alignment, in rows.")
    ranks_per_node = property(lambda self: self._info.ranks_per_node, doc="Ranks of each node; rank r is on node r // that.")
    max_sidecar_bytes = property(lambda self: self._max_sidecar_bytes, doc="The largest sidecar of a token, in bytes.")
    window_bytes = property(lambda self: self._info.window_bytes, doc="Shared memory that the group holds on this rank.")
    timeout = property(lambda self: self._info.timeout_ms / 1000, doc="Seconds that one wait for a peer lasts.")
    max_token_dtype = property(lambda self: DTYPE_NAMES[self._info.max_token_dtype], doc="Its name.")

    @property
    def transport(self) -> Transport:
        """Transport.HOST or Transport.NCCL."""
        return known(Transport, self._info.transport)

    @property
    def combine_precision(self) -> CombinePrecision:
        """CombinePrecision.WIRE, EXACT or NODE."""
        return known(CombinePrecision, self._info.combine_precision)

    def require_layer(self, top_k, alignment=1) -> None:
        """Refuses the K of a topk_idx, or an alignment, that the group was not created for."""
        if not 1 <= top_k <= self.max_top_k:
            refuse(f"topk_idx has K = {top_k}; it must be 1 to {self.max_top_k}, the group's max_top_k")
        if not 0 <= integer("alignment", alignment) <= self.max_alignment:
            refuse(f"alignment is {alignment}; it must be 0 to {self.max_alignment}, the group's max_alignment")

    def require_host(self) -> None:
        """Refuses a group that moves memory of GPUs."""
        if self._info.transport != Transport.HOST:
            refuse(f"{self!r} moves memory of GPUs: numpy arrays need a group with transport 'host'")

    def __repr__(self):
        state = ", destroyed" if self.is_destroyed else ""
        return (
            f"<{name_of(type(self))} {self.group_id:016x}: rank {self.rank} of {self.num_ranks}, {self.num_experts} experts, "
            f"transport {self.transport.name.lower()}{state}>"
        )

    def __copy__(self):
        return self  # so that a copy of what refers to a group refers to the same one

    def __deepcopy__(self, _memo):
        return self

    def __reduce_ex__(self, _protocol):
        raise TypeError("a group cannot be pickled, since all of its ranks create it together: create another one")

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        if kind is not None and not self.is_destroyed:
            self.abort()  # peers would wait for the calls that this rank does not make any more
        self.destroy()
