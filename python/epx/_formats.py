# SPDX-License-Identifier: Apache-2.0
"""The format in which the rows of a call travel, for all kinds of arrays."""

import ctypes
import dataclasses
import math
import typing

import numpy

from . import _structs
from ._structs import DTYPES, DTYPE_NAMES, CombinePrecision, Scaling, ScaleLayout
from ._values import member, name_of, number, refuse, refuse_choice, refuse_kind, require_kind
from .errors import raise_if_failed

_FLOAT32, _E8M0, _E4M3, _E5M2, _E2M1 = "float32", "float8_e8m0fnu", "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"
ELEMENTS = _E4M3, _E5M2, _E2M1
_SCALES = _FLOAT32, _E8M0, _E4M3


class _Rules(typing.NamedTuple):
    """What fits a scaling: the elements of a block, the dtypes of elements and of scales, and whether amax has a floor. The first
    dtypes are the defaults. tests/python/formats_test.py compares them with what the library takes."""

    block: int
    elements: tuple[str, ...]
    scales: tuple[str, ...]
    has_floor: bool


_RULES = {
    Scaling.BLOCK128: _Rules(128, (_E4M3,), (_FLOAT32,), True),
    Scaling.BLOCK128_POW2: _Rules(128, (_E4M3,), (_FLOAT32, _E8M0), True),
    Scaling.MX: _Rules(32, (_E4M3, _E5M2), (_E8M0,), False),
    Scaling.NV: _Rules(16, (_E2M1,), (_E4M3,), False),
}
# The dtypes of scales that a layout takes, where these are not all.
_LAYOUT_SCALES = {ScaleLayout.PACKED: (_E8M0,), ScaleLayout.TILES: (_E8M0, _E4M3)}
_SUMS = Scaling.BLOCK128, Scaling.MX  # in which sums travel
_WIDE_BYTES = {_FLOAT32: 4, "float16": 2, "bfloat16": 2}
ZEROS_DTYPE = "float16"  # of the column that stands for rows without a gradient, in the backward of a dispatch


def dtype_name(dtype):
    """The name of a dtype of numpy, JAX or PyTorch, which has float4_e2m1fn_x2."""
    text = numpy.dtype(dtype).name if isinstance(dtype, (type, numpy.dtype)) else str(dtype)
    return text.removeprefix("torch.").removesuffix("_x2")


def _takes(layout, scale_dtype):
    """Whether scales of this dtype can lie in a layout."""
    return scale_dtype in _LAYOUT_SCALES.get(layout, _SCALES)


def _one_of(names, name, dtype):
    text = dtype_name(dtype)
    if text not in names:
        refuse_choice(name, text, names)
    return text


@dataclasses.dataclass(frozen=True, eq=False)
class RowFormat:
    """How rows of 8 or 4 bits are scaled, and where their scales lie: epx_row_format, whose page in epx.h has the definitions.

    scaling: a Scaling, or "block128", "block128_pow2", "mx" or "nv".  dtype: of the elements that travel, "float8_e4m3fn",
    "float8_e5m2" (MX alone) or "float4_e2m1fn" (NV), or such a dtype; default: the scaling's.  amax_floor: of the two BLOCK128;
    default 1e-4, with which values below 2e-10 become 0. Gradients and sums need 0.  scale_dtype: of scales, "float32",
    "float8_e8m0fnu" or "float8_e4m3fn"; only with BLOCK128_POW2 there is a choice, of the first two; default: the first that
    scale_layout takes.  scale_layout: a ScaleLayout, or "rows", "columns", "packed" (of float8_e8m0fnu) or "tiles" (of one byte),
    of the scales that arrive.  wire_only: wide rows are quantised for the wire alone, and arrive in their own dtype.
    encode_scale: of NV, an array [1] float32 in the place of the scale that each row gets; it is positive. Equal formats, which
    are one static argument of jax.jit, have the same array object.

    All ranks of a call have the same scaling, dtype, amax_floor, scale_dtype and wire_only. A call takes
    - quantised rows with their scales, which arrive as they are: tokens is a tuple (rows, scales), with NV (rows, scales,
      row_scales), and so is recv_tokens;
    - wide rows, float32, float16 or bfloat16, which are quantised on their rank: recv_tokens is such a tuple;
    - wide rows with wire_only: recv_tokens is an array of their dtype.

    Calls that add rows up, and grad_format, take the third alone; numpy's combine_bwd takes all three. Fields that do not fit
    each other are refused here, and what does not fit the call by the call. Scales are [T, S] where they are sent, and S is
    num_scales(H).
    """

    scaling: Scaling
    _: dataclasses.KW_ONLY
    dtype: str | None = None
    amax_floor: float | None = None
    scale_dtype: str | None = None
    scale_layout: ScaleLayout = ScaleLayout.ROWS
    wire_only: bool = False
    encode_scale: typing.Any = None

    def __post_init__(self):
        scaling = member(Scaling, self.scaling, "scaling")
        defaults = _structs.RowFormat()
        raise_if_failed(_structs.epx_row_format_init(defaults, scaling))
        layout = member(ScaleLayout, self.scale_layout, "scale_layout")
        require_kind("wire_only", self.wire_only, bool)
        rules, dtype, floor, scale_dtype = _RULES[scaling], self.dtype, self.amax_floor, self.scale_dtype
        if scale_dtype is None:
            scale_dtype = next((each for each in rules.scales if _takes(layout, each)), rules.scales[0])
        fields = {
            "scaling": scaling,
            "dtype": DTYPE_NAMES[defaults.dtype] if dtype is None else _one_of(ELEMENTS, "dtype", dtype),
            "amax_floor": defaults.amax_floor if floor is None else ctypes.c_float(number("amax_floor", floor)).value,
            "scale_dtype": _one_of(_SCALES, "scale_dtype", scale_dtype),
            "scale_layout": layout,
        }
        for name, value in fields.items():
            object.__setattr__(self, name, value)
        self._require_fit(rules)

        codes = scaling, DTYPES[fields["dtype"]], DTYPES[fields["scale_dtype"]], layout, self.wire_only
        object.__setattr__(self, "codes", tuple(map(int, codes)))  # what operators of JAX and PyTorch take

    def _require_fit(self, rules):
        """Refuses fields that do not fit each other."""
        by_scaling = f"with scaling {self.scaling.name.lower()} it must be"
        for name, value, choices in (("dtype", self.dtype, rules.elements), ("scale_dtype", self.scale_dtype, rules.scales)):
            if value not in choices:
                refuse(f"{name} is {value}; {by_scaling} {' or '.join(choices)}")
        if not (0 <= self.amax_floor < math.inf if rules.has_floor else self.amax_floor == 0):
            refuse(f"amax_floor is {self.amax_floor}; {by_scaling} {'finite and not negative' if rules.has_floor else '0'}")
        if self.encode_scale is not None and self.scaling != Scaling.NV:
            refuse(f"encode_scale is given; {by_scaling} None, since NV alone has one")
        if not _takes(self.scale_layout, self.scale_dtype):
            layouts = " or ".join(each.name.lower() for each in ScaleLayout if _takes(each, self.scale_dtype))
            refuse(f"scale_layout is {self.scale_layout.name.lower()}; with scale_dtype {self.scale_dtype} it must be {layouts}")
        if self.wire_only and self.scale_layout != ScaleLayout.ROWS:
            refuse(f"scale_layout is {self.scale_layout.name.lower()}; with wire_only it must be rows, since no scales arrive")

    def to_c(self) -> _structs.RowFormat:
        """The format of the C API, without tensors."""
        made = _structs.RowFormat(struct_size=ctypes.sizeof(_structs.RowFormat))
        made.scaling, made.dtype = self.scaling, DTYPES[self.dtype]
        made.amax_floor, made.scale_layout = self.amax_floor, self.scale_layout
        return made

    def _key(self):
        """All fields. An array is what it is, since its elements may change, and on a device nobody compares them."""
        return self.codes, self.amax_floor, id(self.encode_scale)

    def __eq__(self, other):
        return self._key() == other._key() if isinstance(other, RowFormat) else NotImplemented

    def __hash__(self):
        return hash(self._key())

    @property
    def has_row_scales(self) -> bool:
        """Whether each row has a float32 scale of its own."""
        return self.scaling == Scaling.NV

    @property
    def num_parts(self) -> int:
        """How many arrays quantised rows are: rows, scales, and row_scales where there are some."""
        return 3 if self.has_row_scales else 2

    @property
    def num_recv_parts(self) -> int:
        """How many arrays the rows that arrive are."""
        return 1 if self.wire_only else self.num_parts

    @property
    def elements_per_byte(self) -> int:
        """2 of float4_e2m1fn, else 1."""
        return 2 if self.dtype == _E2M1 else 1

    @property
    def recv_scales_dtype(self) -> str:
        """The dtype of the scales that arrive: int32 of four E8M0 in ScaleLayout.PACKED."""
        return "int32" if self.scale_layout == ScaleLayout.PACKED else self.scale_dtype

    def num_scales(self, hidden: int) -> int:
        """S, the scales of a row of `hidden` elements."""
        return -(-hidden // _RULES[self.scaling].block)

    def recv_scales_shape(self, rows: int, hidden: int) -> tuple[int, ...]:
        """The shape of the scales of `rows` received rows, in scale_layout."""
        per_row, leading_dimension = self.num_scales(hidden), -(-rows // 4) * 4
        words = -(-per_row // 4)
        if self.scale_layout == ScaleLayout.COLUMNS:
            return per_row, leading_dimension
        if self.scale_layout == ScaleLayout.PACKED:
            return words, leading_dimension
        if self.scale_layout == ScaleLayout.TILES:
            return -(-rows // 128), words, 512
        return rows, per_row

    def require_whole_bytes(self, hidden: int) -> None:
        """Refuses an H that leaves half of a byte."""
        if hidden % self.elements_per_byte:
            refuse(f"rows have H = {hidden}; it must be even, since a byte has two elements of {self.dtype}")

    def recv_shapes(self, lead: tuple[int, ...], hidden: int) -> list[tuple[int, ...]]:
        """The shapes of the rows that arrive, whose rows of 4 bits are bytes, and of their scales unless wire_only.

        lead: (N,) or (P, M).  hidden: H.  Refuses an H that leaves half of a byte.
        """
        self.require_whole_bytes(hidden)
        if self.wire_only:
            return [(*lead, hidden)]
        rows = lead[0] if len(lead) == 1 else lead[0] * lead[1]
        by_row = self.scale_layout == ScaleLayout.ROWS
        scales = (*lead, self.num_scales(hidden)) if by_row else self.recv_scales_shape(rows, hidden)
        return [(*lead, hidden // self.elements_per_byte), scales, lead][: self.num_parts]


def format_of(codes):
    """The format that has these codes, without amax_floor and encode_scale."""
    scaling, dtype, scale_dtype, layout, wire_only = codes
    options = dict(dtype=DTYPE_NAMES[dtype], scale_dtype=DTYPE_NAMES[scale_dtype], scale_layout=layout, wire_only=bool(wire_only))
    return RowFormat(scaling, **options)


def parts_of(name, value, row_format, quantised):
    """The arrays that `value` is: one, or where rows are quantised those of (rows, scales), with NV (rows, scales, row_scales)."""
    if not quantised:
        if isinstance(value, tuple):
            reason = "with wire_only rows are wide" if row_format else "it has no format, which says how rows are scaled"
            refuse(f"{name} is a tuple; this call takes an array, since {reason}")
        return [value]
    parts = "(rows, scales, row_scales)" if row_format.has_row_scales else "(rows, scales)"
    if not isinstance(value, tuple) or len(value) != row_format.num_parts:
        what = f"a tuple of {len(value)}" if isinstance(value, tuple) else name_of(type(value))
        refuse(f"{name} is {what}; with scaling {row_format.scaling.name.lower()} it must be a tuple {parts}")
    return list(value)


def parts_of_tokens(tokens, row_format, name="tokens", with_wide=False):
    """The arrays that the rows of a call are: one of wide rows, or those of rows that come quantised. Checks the format and
    with_wide."""
    require_kind("with_wide", with_wide, bool)
    if row_format is not None:
        require_kind("format", row_format, RowFormat)
    quantised = row_format is not None and isinstance(tokens, tuple) and not row_format.wire_only
    parts = parts_of(name, tokens, row_format, quantised)
    if with_wide and (quantised or row_format is None or row_format.wire_only):
        refuse("with_wide is True; it is for a format that quantises wide rows, which arrive quantised")
    if row_format is None:
        return parts
    if len(parts) == 1 and (dtype := dtype_name(getattr(tokens, "dtype", None))) in ELEMENTS:
        refuse(f"{name} is {dtype} without scales; with a format quantised rows are a tuple (rows, scales)")
    return parts


def require_room_for_gradients(max_token_dtype, dtype, name="tokens", gradient="its gradient"):
    """Refuses a call whose backward, which has no format, sends rows that are wider than the group's. dtype: that of the argument
    `name`, in which it sends `gradient`; None where tokens have none, so that a column of zeros travels with those of the
    weights."""
    sent = ZEROS_DTYPE if dtype is None else dtype_name(dtype)
    if _WIDE_BYTES.get(sent, 0) <= _WIDE_BYTES.get(max_token_dtype, 1):
        return
    if dtype is None:
        reason = f"the backward sends the gradient of topk_weights with a column of {sent}"
    else:
        reason = f"{name} is {sent}, in which the backward sends {gradient}"
    cast = f"cast {name} to {max_token_dtype}, " if max_token_dtype in _WIDE_BYTES else ""
    remedies = f"create it with {sent}, {cast}or give grad_format"
    refuse(f"{reason}, and the group's max_token_dtype {max_token_dtype} is narrower: {remedies}")


def require_wire_only(name, row_format):
    """Refuses what is no format of a call that quantises the wire alone, and takes no tensors of a format."""
    if not isinstance(row_format, RowFormat):
        refuse_kind(name, row_format, RowFormat)
    if not row_format.wire_only:
        refuse(f"{name} has wire_only False; it must be True, since what arrives has the dtype of what is sent")
    if row_format.encode_scale is not None:
        refuse(f"{name} has an encode_scale; it must be None, since here each row gets its own")


def require_room_for_combine_bwd(row_format, grad_format, group, dtype):
    """Refuses a combine that autograd or JAX records, of rows of this dtype, whose backward the group has no room for. Without
    row_format the forward's rows are no narrower, so its call refuses them."""
    if row_format is not None and grad_format is None:
        require_room_for_gradients(group.max_token_dtype, dtype, "expert_out", "the gradient of out")


def on_wire(name, row_format, group, shape=(), *, sums):
    """What a call takes of a format for its wire: codes and amax_floor; nothing for None. Refuses what the call would, since that
    may be a backward, which is too late. shape: that of the rows, which sums need not tell.  sums: whether the call adds rows
    up."""
    if row_format is None:
        return ()
    require_wire_only(name, row_format)
    scaling, precision, max_dtype = row_format.scaling, group.combine_precision, group.max_token_dtype
    if sums and scaling not in _SUMS:
        refuse(f"{name} has scaling {scaling.name.lower()}; it must be block128 or mx, in which sums travel")
    if sums and precision != CombinePrecision.WIRE:
        precision = precision.name.lower()
        refuse(f"{name} is given, and the group's combine_precision is {precision}; it must be wire for quantised sums")
    if max_dtype == _E2M1 and row_format.dtype != _E2M1:  # all others have room for all formats
        refuse(f"{name} has dtype {row_format.dtype}, and the group's max_token_dtype {max_dtype} has no room for it")
    if shape:
        row_format.require_whole_bytes(shape[-1])
    return list(row_format.codes), row_format.amax_floor
