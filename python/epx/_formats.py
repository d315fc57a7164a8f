# SPDX-License-Identifier: Apache-2.0
"""The format in which the rows of a call travel, for all kinds of arrays."""

import dataclasses
import typing

import numpy

from . import _structs
from ._structs import Scaling, ScaleLayout
from ._values import member, number, refuse_choice, require_kind
from .errors import raise_if_failed

_FLOAT32, _E8M0, _E4M3 = "float32", "float8_e8m0fnu", "float8_e4m3fn"
ELEMENT_CODES = {_E4M3: 8, "float8_e5m2": 9, "float4_e2m1fn": 10}
SCALE_CODES = {_FLOAT32: 1, _E8M0: 11, _E4M3: 8}
_NAMES = {code: name for name, code in (*ELEMENT_CODES.items(), *SCALE_CODES.items())}
_BLOCKS = {Scaling.BLOCK128: 128, Scaling.BLOCK128_POW2: 128, Scaling.MX: 32, Scaling.NV: 16}
_SCALE_DTYPES = {Scaling.BLOCK128: _FLOAT32, Scaling.BLOCK128_POW2: _FLOAT32, Scaling.MX: _E8M0, Scaling.NV: _E4M3}


def _dtype_name(name, dtype, names):
    """One of `names`, from itself or from a dtype of numpy, JAX or PyTorch, which has float4_e2m1fn_x2."""
    text = numpy.dtype(dtype).name if isinstance(dtype, (type, numpy.dtype)) else str(dtype)
    text = text.removeprefix("torch.").removesuffix("_x2")
    if text not in names:
        refuse_choice(name, text, names)
    return text


@dataclasses.dataclass(frozen=True)
class RowFormat:
    """How rows of 8 or 4 bits are scaled, and where their scales lie: epx_row_format, whose page in epx.h has the definitions.

    scaling: a Scaling, or "block128", "block128_pow2", "mx" or "nv".  dtype: of the elements that travel, "float8_e4m3fn",
    "float8_e5m2" (MX alone) or "float4_e2m1fn" (NV), or such a dtype; default: the scaling's.  amax_floor: of the two BLOCK128;
    default 1e-4. Gradients need 0.  scale_dtype: of scales, "float32", "float8_e8m0fnu" or "float8_e4m3fn"; only with
    BLOCK128_POW2 there is a choice, of the first two.  scale_layout: a ScaleLayout, or "rows", "columns", "packed" or "tiles", of
    the scales that arrive.  wire_only: wide rows are quantised for the wire alone, and arrive in their own dtype.  encode_scale:
    of NV, an array [1] float32 in the place of the scale that each row gets; it is positive.

    All ranks of a call have the same scaling, dtype, amax_floor, scale_dtype and wire_only. A call takes
    - quantised rows with their scales, which arrive as they are: tokens is a tuple (rows, scales), with NV (rows, scales,
      row_scales), and so is recv_tokens;
    - wide rows, float32, float16 or bfloat16, which are quantised on their rank: recv_tokens is such a tuple;
    - wide rows with wire_only: recv_tokens is an array of their dtype.

    Fields that do not fit each other are refused by the call. Scales are [T, S] where they are sent, and S is num_scales(H).
    """

    scaling: Scaling
    _: dataclasses.KW_ONLY
    dtype: str | None = None
    amax_floor: float | None = None
    scale_dtype: str | None = None
    scale_layout: ScaleLayout = ScaleLayout.ROWS
    wire_only: bool = False
    encode_scale: typing.Any = dataclasses.field(default=None, compare=False)

    def __post_init__(self):
        scaling = member(Scaling, self.scaling, "scaling")
        defaults = _structs.RowFormat()
        raise_if_failed(_structs.epx_row_format_init(defaults, scaling))
        layout = member(ScaleLayout, self.scale_layout, "scale_layout")
        require_kind("wire_only", self.wire_only, bool)
        dtype, floor, scale_dtype = self.dtype, self.amax_floor, self.scale_dtype
        if scale_dtype is None:
            scale_dtype = _E8M0 if layout == ScaleLayout.PACKED else _SCALE_DTYPES[scaling]
        fields = {
            "scaling": scaling,
            "dtype": _NAMES[defaults.dtype] if dtype is None else _dtype_name("dtype", dtype, ELEMENT_CODES),
            "amax_floor": defaults.amax_floor if floor is None else number("amax_floor", floor),
            "scale_dtype": _dtype_name("scale_dtype", scale_dtype, SCALE_CODES),
            "scale_layout": layout,
        }
        for name, value in fields.items():
            object.__setattr__(self, name, value)

        codes = [scaling, ELEMENT_CODES[fields["dtype"]], SCALE_CODES[fields["scale_dtype"]], layout, self.wire_only]
        object.__setattr__(self, "codes", [int(code) for code in codes])  # what operators of PyTorch take

    @property
    def has_row_scales(self) -> bool:
        """Whether each row has a float32 scale of its own."""
        return self.scaling == Scaling.NV

    @property
    def num_parts(self) -> int:
        """How many arrays a quantised tensor is: rows, scales, and row_scales where there are some."""
        return 3 if self.has_row_scales else 2

    @property
    def elements_per_byte(self) -> int:
        """2 of float4_e2m1fn, else 1."""
        return 2 if self.dtype == "float4_e2m1fn" else 1

    @property
    def recv_scales_dtype(self) -> str:
        """The dtype of the scales that arrive: int32 of four E8M0 in ScaleLayout.PACKED."""
        return "int32" if self.scale_layout == ScaleLayout.PACKED else self.scale_dtype

    def num_scales(self, hidden: int) -> int:
        """S, the scales of a row of `hidden` elements."""
        return -(-hidden // _BLOCKS[self.scaling])

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

    def recv_shapes(self, lead: tuple[int, ...], hidden: int) -> list[tuple[int, ...]]:
        """The shapes of the rows that arrive, and of their scales unless wire_only; `lead` is (N,) or (P, M)."""
        if self.wire_only:
            return [(*lead, hidden)]
        rows = lead[0] if len(lead) == 1 else lead[0] * lead[1]
        by_row = self.scale_layout == ScaleLayout.ROWS
        scales = (*lead, self.num_scales(hidden)) if by_row else self.recv_scales_shape(rows, hidden)
        return [(*lead, hidden // self.elements_per_byte), scales, lead][: self.num_parts]


def format_of(codes):
    """The format that has these codes, without amax_floor and encode_scale."""
    scaling, dtype, scale_dtype, layout, wire_only = codes
    options = dict(dtype=_NAMES[dtype], scale_dtype=_NAMES[scale_dtype], scale_layout=layout, wire_only=bool(wire_only))
    return RowFormat(scaling, **options)
