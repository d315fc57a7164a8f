# SPDX-License-Identifier: Apache-2.0
"""Draws the model's times over the number of nodes, as an SVG: one panel for each routing, one line for each operation."""
import math
from xml.sax.saxutils import escape

import tables
from costs import OPERATIONS, operation_us

COLOURS = {"dispatch": "#277da1", "combine node": "#43aa8b", "combine wire": "#f8961e", "combine exact": "#f94144"}
DASHES = {"dispatch": "7 4"}  # combine under `node` lies beside it
WIDTH, HEIGHT, PANEL, LEFT, TOP, BOTTOM, GAP = 860, 400, 350, 62, 84, 56, 48
LEAST_US, MOST_US = 400.0, 40000.0
TICKS_US = (500, 1000, 2000, 5000, 10000, 20000, 40000)


def x_of(panel, count):
    steps = math.log2(tables.NODES[-1] / tables.NODES[0])
    return LEFT + panel * (PANEL + GAP) + PANEL * math.log2(count / tables.NODES[0]) / steps


def y_of(us):
    return TOP + (HEIGHT - TOP - BOTTOM) * math.log(MOST_US / us) / math.log(MOST_US / LEAST_US)


def axes(panel, title):
    left, right, bottom = x_of(panel, tables.NODES[0]), x_of(panel, tables.NODES[-1]), y_of(LEAST_US)
    parts = [f'<text x="{(left + right) / 2:.1f}" y="{TOP - 10}" text-anchor="middle">{escape(title)}</text>',
             f'<text x="{(left + right) / 2:.1f}" y="{bottom + 34:.1f}" text-anchor="middle">nodes of 8 GPUs</text>']
    for us in TICKS_US:
        y = y_of(us)
        parts.append(f'<line x1="{left:.1f}" y1="{y:.1f}" x2="{right:.1f}" y2="{y:.1f}" stroke="#dddddd"/>'
                     f'<text x="{left - 6:.1f}" y="{y + 4:.1f}" text-anchor="end">{us:,}</text>')
    for count in tables.NODES:
        parts.append(f'<text x="{x_of(panel, count):.1f}" y="{bottom + 16:.1f}" text-anchor="middle">{count}</text>')
    parts.append(f'<rect x="{left:.1f}" y="{TOP}" width="{right - left:.1f}" height="{bottom - TOP:.1f}" fill="none" '
                 'stroke="#888888"/>')
    return parts


def draw(model_rates):
    """Returns the picture; both axes are logarithmic."""
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" '
             'font-size="11">', f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>']
    rail = model_rates.rail_gbs * model_rates.rail_efficiency
    parts.append(f'<text x="{LEFT}" y="18">A model, not a measurement: microseconds of a call, 4096 tokens per GPU, '
                 "H 7168 bfloat16, top-8 of 256 experts,</text>"
                 f'<text x="{LEFT}" y="34">rails at an assumed {rail:.1f} GB/s for each GPU, NVLink at '
                 f"{model_rates.nvlink_gbs:g} GB/s</text>")
    x = float(LEFT)
    for operation in OPERATIONS:
        dash = f' stroke-dasharray="{DASHES[operation]}"' if operation in DASHES else ""
        parts.append(f'<line x1="{x:.1f}" y1="52" x2="{x + 24:.1f}" y2="52" stroke="{COLOURS[operation]}" '
                     f'stroke-width="2"{dash}/>'
                     f'<text x="{x + 30:.1f}" y="56">{escape(operation)}</text>')
        x += 60 + 6.4 * len(operation)
    for panel, (name, routing) in enumerate(tables.ROUTINGS):
        parts += axes(panel, f"routing: {name}")
        for operation in reversed(OPERATIONS):  # so that the dashes of dispatch lie over the line of combine
            points = [(x_of(panel, count), operation_us(tables.deepseek_v3(routing, count), operation, model_rates), count)
                      for count in tables.NODES]
            dash = f' stroke-dasharray="{DASHES[operation]}"' if operation in DASHES else ""
            line = " ".join(f"{x:.1f},{y_of(us):.1f}" for x, us, _ in points)
            parts.append(f'<polyline points="{line}" fill="none" stroke="{COLOURS[operation]}" stroke-width="2"{dash}/>')
            parts += [f'<circle cx="{x:.1f}" cy="{y_of(us):.1f}" r="3" fill="{COLOURS[operation]}">'
                      f"<title>{escape(operation)}, {count} nodes: {us:,.0f} us</title></circle>" for x, us, count in points]
    return "\n".join([*parts, "</svg>", ""])
