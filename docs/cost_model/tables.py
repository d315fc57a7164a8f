# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/scaling.md."""
import dataclasses
import re

import figures
from costs import OPERATIONS, Rates, Shape, memory_bytes, operation_us, prepare_us, traffic
from routing import Placement, Routing

NODES = (1, 2, 4, 8, 16, 32, 64)
UNIFORM = Routing(256, 8)
GROUP_LIMITED = Routing(256, 8, num_groups=8, top_groups=4)  # DeepSeek-V3: n_expert_groups 8, n_limited_groups 4
ROUTINGS = (("uniform", UNIFORM), ("group-limited, 4 of 8", GROUP_LIMITED))


def deepseek_v3(routing, nodes, tokens=4096, ranks_per_node=8):
    return Shape(tokens=tokens, hidden=7168, element_bytes=2, routing=routing, nodes=nodes, ranks_per_node=ranks_per_node)


def table(header, rows):
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def number(value):
    """Returns a figure with three digits or more, but none after the point from 100 on."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def bytes_text(count):
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if count >= size:
            return f"{number(count / size)} {unit}"
    return f"{count} B"


def rates(model_rates):
    rows = []
    for field, what, unit, source in figures.SOURCES:
        value = f"{getattr(model_rates, field):g} {unit}".strip()
        rows.append([what, value, source or "**assumed**", f"`--{field.replace('_', '-')}`"])
    return table(["rate", "value", "source", "option"], rows)


def one_node(model_rates):
    rows = []
    for measured in figures.ONE_NODE:
        us = operation_us(measured.shape(), measured.operation, model_rates)
        rows.append([measured.ranks, f"{measured.tokens}, top-{measured.top_k}", measured.operation.removesuffix(" wire"),
                     f"{measured.us:.1f}", f"{us:.1f}", f"{100 * (us / measured.us - 1):+.1f} %", measured.source])
    return table(["GPUs", "tokens", "operation", "measured, us", "model, us", "deviation", "source"], rows)


def two_hosts(model_rates):
    """The rates of NCCL's socket transport take the place of the rail's."""
    shape, rows = deepseek_v3(UNIFORM, 2, ranks_per_node=2), []
    for name, *rail_gbs in figures.SOCKETS:
        cells = []
        for operation in OPERATIONS:
            times = [operation_us(shape, operation, socket_rates(model_rates, gbs)) / 1e3 for gbs in rail_gbs]
            cells.append(f"{min(times):.1f} to {max(times):.1f}")
        rows.append([f"{name}, {rail_gbs[0]} to {rail_gbs[1]} GB/s", *cells])
    return table(["rails", *(f"{operation}, ms" for operation in OPERATIONS)], rows)


def socket_rates(model_rates, rail_gbs):
    of_sockets = {"rail_gbs": rail_gbs, "rail_efficiency": 1.0, "rail_latency_us": figures.SOCKET_LATENCY_US}
    return Rates(**vars(model_rates) | of_sockets)


def by_nodes(shapes, model_rates):
    """shapes: of one routing, with ascending numbers of nodes."""
    rows = []
    for shape in shapes:
        placement = Placement(shape.routing, shape.nodes, shape.ranks_per_node)
        dispatch = traffic(shape, "dispatch", placement)
        row_bytes = shape.row_bytes("dispatch")
        exact_rows = dispatch.rail
        fixed = f"{(shape.nodes - 1) * shape.tokens / exact_rows:.2f}" if exact_rows else "-"
        rows.append([shape.nodes, shape.num_ranks, f"{placement.distinct_nodes:.2f}", f"{placement.distinct_ranks:.2f}",
                     bytes_text(exact_rows * row_bytes) if exact_rows else "-",
                     bytes_text((dispatch.own + dispatch.relayed) * row_bytes), fixed, number(prepare_us(shape, model_rates)),
                     *(number(operation_us(shape, operation, model_rates, placement)) for operation in OPERATIONS)])
    return table(["nodes", "GPUs", "distinct nodes", "distinct ranks", "rail", "NVLink", "fixed / exact", "prepare, us",
                  *(f"{operation}, us" for operation in OPERATIONS)], rows)


def nodes(model_rates):
    return "\n\n".join(f"**{name}**\n\n{by_nodes([deepseek_v3(routing, count) for count in NODES], model_rates)}"
                       for name, routing in ROUTINGS)


def efficiencies(model_rates):
    rows = []
    for name, routing in ROUTINGS:
        for efficiency in (0.70, 0.85, 0.95):
            with_efficiency = Rates(**vars(model_rates) | {"rail_efficiency": efficiency})
            shape = deepseek_v3(routing, 8)
            rows.append([name, f"{efficiency:.2f}, {with_efficiency.rail_gbs * efficiency:.1f} GB/s",
                         *(number(operation_us(shape, operation, with_efficiency)) for operation in OPERATIONS)])
    return table(["routing, 8 nodes of 8", "efficiency of the rails", *(f"{operation}, us" for operation in OPERATIONS)], rows)


def sizes(model_rates):
    rows = []
    for name, routing in ROUTINGS:
        for count in (2, 4, 8, 16):
            exact = deepseek_v3(routing, count)
            fixed = dataclasses.replace(exact, fixed_rail_tokens=exact.tokens)
            rows.append([name, count, *(number(operation_us(shape, operation, model_rates))
                                        for operation in OPERATIONS[:2] for shape in (exact, fixed))])
    return table(["routing", "nodes", *(f"{operation}, {kind} sizes, us" for operation in OPERATIONS[:2]
                                        for kind in ("exact", "fixed"))], rows)


def logical_gbs(shape, operation, model_rates):
    """Returns the rate as DeepEP counts it: rows of distinct (token, node), the token's own node too, over the time."""
    rows = shape.tokens * Placement(shape.routing, shape.nodes, shape.ranks_per_node).distinct_nodes
    return rows * shape.row_bytes(operation) / (1e3 * operation_us(shape, operation, model_rates))


def in_8_bits(shape):
    """Returns the shape with 8-bit rows, and a scale of 4 bytes for each 128 elements beside them."""
    return dataclasses.replace(shape, element_bytes=1, sidecar_bytes=shape.hidden // 128 * 4)


def throughput(model_rates):
    """DeepEP's shapes: dispatch of 8-bit rows, combine in bfloat16."""
    rows = []
    for published in (*figures.DEEPEP_V1, *figures.DEEPEP_V2):
        count, is_first = published.nodes, published in figures.DEEPEP_V1
        routing = Routing(256, 8, num_groups=count, top_groups=min(count, 4)) if is_first else UNIFORM
        combine = Shape(tokens=4096 if is_first else 8192, hidden=7168, element_bytes=2, routing=routing, nodes=count,
                        ranks_per_node=8)
        remote = (count - 1) / count
        rows.append([published.system, f"{count} x 8", f"{published.dispatch}, {published.combine}",
                     f"{remote * published.dispatch:.1f}, {remote * published.combine:.1f}",
                     f"{logical_gbs(in_8_bits(combine), 'dispatch', model_rates):.1f}, "
                     f"{logical_gbs(combine, 'combine node', model_rates):.1f}"])
    return table(["published by", "nodes", "dispatch, combine, GB/s", "of which between nodes, GB/s",
                  "model: dispatch, combine `node`, GB/s"], rows)


def few_tokens(model_rates):
    """NCCL EP counts one bfloat16 row for each route, whatever network it takes, and moves bfloat16 rows in both directions."""
    rows = []
    for published in (*figures.NCCL_EP_LL, *figures.DEEPEP_V1_LL):
        combine = deepseek_v3(UNIFORM, published.nodes, tokens=128)
        if published in figures.NCCL_EP_LL:
            dispatch, text = combine, f"{published.dispatch}, {published.combine} GB/s"
            counted = combine.tokens * 8 * combine.row_bytes("dispatch") / 1e3  # us at 1 GB/s
            times = counted / published.dispatch, counted / published.combine
        else:
            dispatch, text = in_8_bits(combine), f"{published.dispatch}, {published.combine} us"
            times = published.dispatch, published.combine
        model = operation_us(dispatch, "dispatch", model_rates), operation_us(combine, "combine node", model_rates)
        rows.append([published.system, f"{published.nodes} x 8", text, f"{times[0]:.0f}, {times[1]:.0f}",
                     f"{model[0]:.0f}, {model[1]:.0f}"])
    return table(["published by", "nodes", "dispatch, combine, as published", "dispatch, combine, us",
                  "model: dispatch, combine `node`, us"], rows)


def memory(model_rates):
    del model_rates
    counts = (2, 8, 64)
    by_count = [memory_bytes(deepseek_v3(UNIFORM, count)) for count in counts]
    rows = [[name, *(bytes_text(of_count[name]) for of_count in by_count)] for name in by_count[0]]
    return table(["what, by the formula", *(f"{count} nodes of 8" for count in counts)], rows)


PARTS = {"rates": rates, "one node": one_node, "two hosts": two_hosts, "nodes": nodes, "sizes": sizes,
         "efficiencies": efficiencies, "throughput": throughput, "few tokens": few_tokens, "memory": memory}


def write(page, model_rates):
    """Returns the page with each table between its markers."""
    for name, part in PARTS.items():
        begin, end = f"<!-- cost_model: {name} -->", f"<!-- cost_model: end of {name} -->"
        if page.count(begin) != 1 or page.count(end) != 1:
            raise ValueError(f"the page has not exactly one pair of the markers '{begin}' and '{end}'")
        text = f"{begin}\n{part(model_rates)}\n{end}"
        page = re.sub(f"{re.escape(begin)}.*?{re.escape(end)}", lambda _, text=text: text, page, flags=re.DOTALL)
    return page
