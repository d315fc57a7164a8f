# SPDX-License-Identifier: Apache-2.0
"""What a group is created for, as the struct of the C API."""

from . import _structs
from ._structs import CombinePrecision, Overflow, Transport
from ._tensors import dtype_code
from ._values import member, milliseconds, set_fields
from .errors import raise_if_failed


def make_config(
    *,
    num_experts,
    max_tokens_per_rank,
    hidden_dim,
    max_top_k,
    max_token_dtype,
    max_alignment=None,
    max_recv_tokens_per_rank=0,
    max_sidecar_bytes=0,
    combine_precision="wire",
    overflow="error",
    transport="auto",
    num_comm_sms=0,
    ranks_per_node=0,
    fixed_rail_tokens=0,
    color=0,
    key=0,
    timeout=None,
):
    config = _structs.GroupConfig()
    raise_if_failed(_structs.epx_group_config_init(config))
    set_fields(
        config,
        num_experts=num_experts,
        max_tokens_per_rank=max_tokens_per_rank,
        hidden_dim=hidden_dim,
        max_top_k=max_top_k,
        max_token_dtype=dtype_code(max_token_dtype),
        max_recv_tokens_per_rank=max_recv_tokens_per_rank,
        max_sidecar_bytes=max_sidecar_bytes,
        combine_precision=member(CombinePrecision, combine_precision, "combine_precision"),
        overflow=member(Overflow, overflow, "overflow"),
        transport=member(Transport, transport, "transport"),
        num_comm_sms=num_comm_sms,
        ranks_per_node=ranks_per_node,
        fixed_rail_tokens=fixed_rail_tokens,
        color=color,
        key=key,
    )
    if max_alignment is not None:
        set_fields(config, max_alignment=max_alignment)
    if timeout is not None:
        config.timeout_ms = milliseconds("timeout", timeout)
    return config
