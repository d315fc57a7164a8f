# SPDX-License-Identifier: Apache-2.0
"""The structs, enumerations and functions of epx.h for ctypes. tests/python/layout_test.py compares them with the header."""

import ctypes
import enum
import typing
from ctypes import CFUNCTYPE, POINTER, c_char, c_char_p, c_float, c_int32, c_int64, c_size_t, c_uint64, c_void_p

from ._library import libepx


class Status(enum.IntEnum):
    """What a call of the C API returns (epx_status)."""

    SUCCESS = 0
    INVALID_ARGUMENT = 1
    UNSUPPORTED = 2
    MISMATCH = 3
    OUT_OF_MEMORY = 4
    SYSTEM = 5
    TIMEOUT = 6
    ABORTED = 7
    OUT_OF_SEQUENCE = 8
    INTERNAL = 9


class Operation(enum.IntEnum):
    """The calls that have a sequence number (epx_operation)."""

    NONE = 0
    PREPARE = 1
    DISPATCH = 2
    COMBINE = 3
    COMBINE_BWD = 4
    DISPATCH_BWD = 5
    MEM_ALLOC = 6
    MEM_FREE = 7
    DISPATCH_RANK_MAJOR = 8
    COMBINE_RANK_MAJOR = 9
    COMBINE_RANK_MAJOR_BWD = 10
    DISPATCH_RANK_MAJOR_BWD = 11
    PREPARE_DISPATCH = 12
    ALL_GATHER = 13
    RAGGED_ALL_TO_ALL = 14


class Phase(enum.IntEnum):
    """Where in a call a rank waited (epx_phase)."""

    NONE = 0
    ARRIVE = 1
    COMPLETE = 2


class EventKind(enum.IntEnum):
    """Kinds of errors that a group lives on with (epx_event_kind)."""

    BAD_INDEX = 0
    OVERFLOW = 1
    TOO_FEW_ROWS = 2
    HANDLE_MISMATCH = 3
    BAD_SLICE = 4


class Transport(enum.IntEnum):
    """How ranks reach each other's memory (epx_transport)."""

    AUTO = 0
    HOST = 1
    NCCL = 2


class CombinePrecision(enum.IntEnum):
    """How combine and dispatch_bwd sum the rows of a token (epx_combine_precision)."""

    WIRE = 0
    EXACT = 1
    NODE = 2


class Overflow(enum.IntEnum):
    """Whether routes beyond the receive capacity are an event, or only dropped and counted (epx_overflow)."""

    ERROR = 0
    DROP = 1


class RowSpacing(enum.IntEnum):
    """Where the kept rows of a source rank begin in rank-major receive arrays (epx_row_spacing)."""

    STRIDED = 0
    COMPACT = 1


class Pads(enum.IntEnum):
    """What dispatch does to the pad rows of its zones (epx_pads)."""

    ZERO = 0
    UNTOUCHED = 1


class SliceDirection(enum.IntEnum):
    """In which direction the slices of a ragged all-to-all move (epx_slice_direction)."""

    FORWARD = 0
    TRANSPOSED = 1


# epx_dtype, by the names that dtypes have in numpy, JAX and the package ml_dtypes.
DTYPES = {
    "float32": 1,
    "float16": 2,
    "bfloat16": 3,
    "int32": 4,
    "int64": 5,
    "float64": 6,
    "uint8": 7,
    "float8_e4m3fn": 8,
    "float8_e5m2": 9,
    "float4_e2m1fn": 10,
    "float8_e8m0fnu": 11,
}
DTYPE_NAMES = {code: name for name, code in DTYPES.items()}


class Scaling(enum.IntEnum):
    """How the elements of a quantised row are scaled (epx_scaling)."""

    BLOCK128 = 1
    BLOCK128_POW2 = 2
    MX = 3
    NV = 4


class ScaleLayout(enum.IntEnum):
    """Where the scales of received rows lie (epx_scale_layout)."""

    ROWS = 0
    COLUMNS = 1
    PACKED = 2
    TILES = 3


MAX_EVENT_KINDS, MAX_REPORTED_RANKS, MAX_MESSAGE_BYTES, MAX_SLICES = 16, 64, 1024, 2048


def known(enumeration, value):
    """The member with this value, or the number itself where a later library has more members."""
    try:
        return enumeration(value)
    except ValueError:
        return value


class Tensor(ctypes.Structure):
    _c_name_ = "epx_tensor"
    _fields_ = [
        ("data", c_void_p),
        ("dtype", c_int32),
        ("ndim", c_int32),
        ("sizes", c_int64 * 4),
        ("sidecar", c_void_p),
        ("sidecar_row_bytes", c_int64),
        ("reserved", c_int64 * 2),
    ]


ALL_GATHER = ctypes.CFUNCTYPE(c_int32, c_void_p, c_void_p, c_void_p, c_size_t, c_int64, c_void_p, c_size_t)
RELEASE = ctypes.CFUNCTYPE(None, c_void_p)


class Bootstrap(ctypes.Structure):
    _c_name_ = "epx_bootstrap"
    _fields_ = [
        ("struct_size", c_size_t),
        ("rank", c_int32),
        ("num_ranks", c_int32),
        ("all_gather", ALL_GATHER),
        ("release", RELEASE),
        ("context", c_void_p),
        ("reserved", c_void_p * 3),
    ]


class GroupConfig(ctypes.Structure):
    _c_name_ = "epx_group_config"
    _fields_ = [
        ("struct_size", c_size_t),
        ("num_experts", c_int32),
        ("max_tokens_per_rank", c_int32),
        ("hidden_dim", c_int32),
        ("max_top_k", c_int32),
        ("max_alignment", c_int32),
        ("max_token_dtype", c_int32),
        ("max_recv_tokens_per_rank", c_int64),
        ("max_sidecar_bytes", c_int32),
        ("combine_precision", c_int32),
        ("overflow", c_int32),
        ("transport", c_int32),
        ("num_comm_sms", c_int32),
        ("color", c_int32),
        ("key", c_int32),
        ("timeout_ms", c_int64),
        ("reserved", c_int64 * 5),
        ("ranks_per_node", c_int32),
        ("fixed_rail_tokens", c_int32),
    ]


class GroupInfo(ctypes.Structure):
    _c_name_ = "epx_group_info"
    _fields_ = [
        ("struct_size", c_size_t),
        ("group_id", c_uint64),
        ("rank", c_int32),
        ("num_ranks", c_int32),
        ("num_experts", c_int32),
        ("num_local_experts", c_int32),
        ("first_local_expert", c_int32),
        ("transport", c_int32),
        ("max_recv_tokens_per_rank", c_int64),
        ("window_bytes", c_int64),
        ("timeout_ms", c_int64),
        ("max_tokens_per_rank", c_int32),
        ("hidden_dim", c_int32),
        ("max_top_k", c_int32),
        ("max_alignment", c_int32),
        ("max_token_dtype", c_int32),
        ("combine_precision", c_int32),
        ("num_comm_sms", c_int32),
        ("ranks_per_node", c_int32),
    ]


class MemoryPlan(ctypes.Structure):
    _c_name_ = "epx_memory_plan"
    _fields_ = [
        ("struct_size", c_size_t),
        ("max_recv_tokens_per_rank", c_int64),
        ("window_bytes", c_int64),
        ("control_bytes", c_int64),
        ("count_bytes", c_int64),
        ("slot_record_bytes", c_int64),
        ("scatter_row_bytes", c_int64),
        ("scatter_sidecar_bytes", c_int64),
        ("scatter_weight_bytes", c_int64),
        ("gather_row_bytes", c_int64),
        ("gather_weight_bytes", c_int64),
        ("scratch_bytes", c_int64),
        ("handle_mem_bytes", c_int64),
    ]


class LoadReport(ctypes.Structure):
    _c_name_ = "epx_load_report"
    _fields_ = [
        ("struct_size", c_size_t),
        ("routes", c_int64),
        ("dropped", c_int64),
        ("rows_needed", c_int64),
        ("most_routes_of_rank", c_int64),
        ("most_routes_of_expert", c_int64),
    ]


class GroupReport(ctypes.Structure):
    _c_name_ = "epx_group_report"
    _fields_ = [
        ("struct_size", c_size_t),
        ("status", c_int32),
        ("operation", c_int32),
        ("phase", c_int32),
        ("culprit", c_int32),
        ("sequence", c_uint64),
        ("expected", c_uint64),
        ("seen", c_uint64),
        ("num_missing", c_int32),
        ("missing", c_int32 * MAX_REPORTED_RANKS),
        ("event_counts", c_uint64 * MAX_EVENT_KINDS),
        ("first_event", c_int32),
        ("first_event_operation", c_int32),
        ("first_event_sequence", c_uint64),
        ("message", c_char * MAX_MESSAGE_BYTES),
    ]


class Layer(ctypes.Structure):
    _c_name_ = "epx_layer"
    _fields_ = [("top_k", c_int32), ("alignment", c_int32)]


class RowFormat(ctypes.Structure):
    _c_name_ = "epx_row_format"
    _fields_ = [
        ("struct_size", c_size_t),
        ("scaling", c_int32),
        ("dtype", c_int32),
        ("amax_floor", c_float),
        ("scale_layout", c_int32),
        ("scales", POINTER(Tensor)),
        ("row_scales", POINTER(Tensor)),
        ("encode_scale", POINTER(Tensor)),
        ("recv_scales", POINTER(Tensor)),
        ("recv_row_scales", POINTER(Tensor)),
        ("reserved", c_int64 * 4),
    ]


class Call(typing.NamedTuple):
    """An operation's args struct, its size in bytes, and its function."""

    struct: type[ctypes.Structure]
    struct_size: int
    function: typing.Callable


_OF_LAYER = [("layer", Layer), ("handle_mem", c_void_p), ("handle_mem_bytes", c_size_t)]


def _call(name, tensors, more=(), first=_OF_LAYER):
    """The operation epx_<name>: args structs differ in their tensors, and in the fields `more` behind these."""
    c_name = f"epx_{name}_args"
    fields = [
        ("struct_size", c_size_t),
        *first,
        ("stream", c_void_p),
        *[(tensor, POINTER(Tensor)) for tensor in tensors.split()],
        *more,
    ]
    struct = type(c_name, (ctypes.Structure,), {"_c_name_": c_name, "_fields_": fields})
    return Call(struct, ctypes.sizeof(struct), _declare(libepx, f"epx_{name}", c_int32, GROUP, POINTER(struct)))


def _declare(library, name, result, *arguments):
    function = getattr(library, name)
    function.restype, function.argtypes = result, arguments
    return function


GROUP = c_void_p
_FORMAT = [("format", POINTER(RowFormat))]
_PLAN, _ROWS, _MORE = (
    "topk_idx counts offsets global_counts info slot slot_origin",
    "tokens topk_weights recv_tokens recv_weights",
    [("pads", c_int32), ("reserved0", c_int32), *_FORMAT],
)
_ZONES = [("zone_stride", c_int64)]
_SPACING = [("row_spacing", c_int32), ("reserved0", c_int32)]
_GRADS = "grad_recv grad_recv_weights grad_tokens grad_topk_weights"
CALLS = {  # those of a layer
    name: _call(name, *fields)
    for name, *fields in (
        ("prepare", _PLAN, _ZONES),
        ("dispatch", _ROWS, _MORE),
        ("prepare_dispatch", f"{_PLAN} {_ROWS}", _MORE + _ZONES),
        ("combine", "expert_out recv_weights out", _FORMAT),
        ("combine_bwd", "grad_out expert_out recv_weights grad_expert_out grad_recv_weights", _FORMAT),
        ("dispatch_bwd", _GRADS, _FORMAT),
        ("dispatch_rank_major", "tokens topk_idx topk_weights recv_tokens recv_topk_idx recv_weights counts", _FORMAT + _SPACING),
        ("combine_rank_major", "expert_out out", _FORMAT),
        ("combine_rank_major_bwd", "grad_out grad_expert_out", _FORMAT),
        ("dispatch_rank_major_bwd", _GRADS, _FORMAT),
    )
}
RAGGED_ALL_TO_ALL = _call(
    "ragged_all_to_all",
    "operand output input_offsets send_sizes output_offsets recv_sizes",
    [("direction", c_int32), ("reserved0", c_int32)],
    first=(),
)

STRUCTS = [
    Tensor,
    Bootstrap,
    GroupConfig,
    GroupInfo,
    MemoryPlan,
    LoadReport,
    GroupReport,
    Layer,
    RowFormat,
    *[call.struct for call in (*CALLS.values(), RAGGED_ALL_TO_ALL)],
]
ENUMS = [
    ("EPX_OP_", Operation),
    ("EPX_PHASE_", Phase),
    ("EPX_EVENT_", EventKind),
    ("EPX_TRANSPORT_", Transport),
    ("EPX_COMBINE_", CombinePrecision),
    ("EPX_OVERFLOW_", Overflow),
    ("EPX_PADS_", Pads),
    ("EPX_ROWS_", RowSpacing),
    ("EPX_SCALING_", Scaling),
    ("EPX_SCALES_", ScaleLayout),
    ("EPX_SLICES_", SliceDirection),
]

INTERRUPT_CHECK = CFUNCTYPE(c_int32)
epx_last_error = _declare(libepx, "epx_last_error", c_char_p)
epx_bootstrap_file = _declare(
    libepx, "epx_bootstrap_file", c_int32, c_char_p, c_char_p, c_int32, c_int32, c_int64, POINTER(Bootstrap)
)
epx_bootstrap_free = _declare(libepx, "epx_bootstrap_free", None, POINTER(Bootstrap))
epx_group_config_init = _declare(libepx, "epx_group_config_init", c_int32, POINTER(GroupConfig))
epx_row_format_init = _declare(libepx, "epx_row_format_init", c_int32, POINTER(RowFormat), c_int32)
epx_set_interrupt_check = _declare(libepx, "epx_set_interrupt_check", None, INTERRUPT_CHECK)
epx_interrupted = _declare(libepx, "epx_interrupted", c_int32)
epx_group_create = _declare(libepx, "epx_group_create", c_int32, POINTER(Bootstrap), POINTER(GroupConfig), POINTER(GROUP))
epx_group_destroy = _declare(libepx, "epx_group_destroy", None, GROUP)
epx_group_abort = _declare(libepx, "epx_group_abort", c_int32, GROUP)
epx_group_query = _declare(libepx, "epx_group_query", c_int32, GROUP, POINTER(GroupInfo))
epx_group_memory_plan = _declare(libepx, "epx_group_memory_plan", c_int32, POINTER(GroupConfig), c_int32, POINTER(MemoryPlan))
epx_group_status = _declare(libepx, "epx_group_status", c_int32, GROUP, POINTER(GroupReport))
epx_load_of_counts = _declare(
    libepx, "epx_load_of_counts", c_int32, GROUP, POINTER(Layer), c_int64, POINTER(Tensor), POINTER(LoadReport)
)
epx_handle_mem_size = _declare(libepx, "epx_handle_mem_size", c_int32, GROUP, POINTER(Layer), POINTER(c_size_t))
