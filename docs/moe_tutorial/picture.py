# SPDX-License-Identifier: Apache-2.0
"""Draws where a block's time goes, as an SVG: one bar for each case and direction, one colour for each piece."""
from xml.sax.saxutils import escape

import tables

COLOURS = {"router": "#8d99ae", "prepare": "#577590", "dispatch": "#277da1", "ffn": "#f9c74f", "combine": "#43aa8b",
           "combine_bwd": "#43aa8b", "ffn_bwd": "#f9c74f", "dispatch_bwd": "#277da1", "router_bwd": "#8d99ae"}
LENGTH, BAR, GAP, TOP = 440, 18, 8, 46  # of a whole bar; px
CHAR = 6.6  # no usual sans-serif font is wider on average, at font-size 11


def bars_of(results):
    bars = []
    for case in tables.ordered(results):
        pieces = tables.pieces_of(case)
        if pieces is None:
            continue
        shape = case["shape"]
        name = f"{shape['model']}, {shape['tokens']} tokens, {shape['routing']}"
        bars += [(f"{name}: {direction}", of_direction) for direction, of_direction in zip(("forward", "backward"), pieces)]
    return bars


def draw(results):
    """Returns the picture; each bar is drawn to the scale of its own total, which stands at its end."""
    bars = bars_of(results)
    left = 16 + CHAR * max((len(name) for name, _ in bars), default=0)
    width = max(left + LENGTH + 90, 860)  # beside the bars, or below the legend
    height = TOP + len(bars) * (BAR + GAP) + GAP
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height}" font-family="sans-serif" '
             'font-size="11">',
             f'<rect width="{width:.0f}" height="{height}" fill="white"/>']
    x = 10.0
    for name in ("router", "prepare", "dispatch", "ffn", "combine"):
        label = f"{name} and its backward" if name != "prepare" else name
        parts.append(f'<rect x="{x:.1f}" y="12" width="12" height="12" fill="{COLOURS[name]}"/>'
                     f'<text x="{x + 16:.1f}" y="22">{escape(label)}</text>')
        x += 30 + CHAR * len(label)
    for i, (name, pieces) in enumerate(bars):
        y, total, x = TOP + i * (BAR + GAP), sum(us for _, us in pieces), left
        parts.append(f'<text x="{left - 8:.1f}" y="{y + 13}" text-anchor="end">{escape(name)}</text>')
        for piece, us in pieces:
            part = LENGTH * us / total
            parts.append(f'<rect x="{x:.2f}" y="{y}" width="{part:.2f}" height="{BAR}" fill="{COLOURS[piece]}">'
                         f"<title>{escape(piece)}: {us:.1f} us</title></rect>")
            label = f"{us:.0f}"
            if part > CHAR * len(label) + 4:
                parts.append(f'<text x="{x + part / 2:.2f}" y="{y + 13}" text-anchor="middle">{label}</text>')
            x += part
        parts.append(f'<text x="{x + 6:.1f}" y="{y + 13}">{total:,.0f} us</text>')
    return "\n".join([*parts, "</svg>", ""])
