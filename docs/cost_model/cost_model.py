#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Predicts the times of a group of several nodes: rows by NVLink and by rail, and each operation's time.

cost_model.py                                   DeepSeek-V3 on 1 to 64 nodes of 8
cost_model.py --routing groups:4/8 --nodes 8    with group-limited routing: top-k among the experts of 4 of 8 groups
cost_model.py --write                           writes the tables of docs/scaling.md and docs/scaling.svg

Times are microseconds, and all ranks have the same number of tokens. The first table says which rates are measured and which
are assumed; docs/scaling.md explains them.
"""
import argparse
import pathlib
import re
import sys

import picture
import tables
from costs import Rates, Shape
from routing import Routing

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE, PICTURE = ROOT / "docs" / "scaling.md", ROOT / "docs" / "scaling.svg"
ELEMENT_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}


def parse_nodes(text):
    if not re.fullmatch(r"\d+(,\d+)*", text, flags=re.ASCII):
        raise ValueError(f"--nodes is '{text}'; it must be numbers with commas between them, for instance 1,2,4")
    return sorted({int(number) for number in text.split(",")})


def parse_routing(text, num_experts, top_k):
    if text == "uniform":
        return Routing(num_experts, top_k)
    match = re.fullmatch(r"groups:(\d+)/(\d+)", text, flags=re.ASCII)
    if not match or int(match[2]) == 0:
        raise ValueError(f"--routing is '{text}'; it must be uniform or groups:M/G, the best M of G groups")
    return Routing(num_experts, top_k, num_groups=int(match[2]), top_groups=int(match[1]))


def parser():
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("--write", action="store_true",
                        help="write the tables of docs/scaling.md and docs/scaling.svg; takes no other option")
    result.add_argument("--tokens", type=int, default=4096, help="of each rank")
    result.add_argument("--hidden", type=int, default=7168)
    result.add_argument("--dtype", choices=ELEMENT_BYTES, default="bf16")
    result.add_argument("--sidecar-bytes", type=int, default=0, help="of each row of dispatch")
    result.add_argument("--experts", type=int, default=256)
    result.add_argument("--top-k", type=int, default=8)
    result.add_argument("--routing", default="uniform", help="uniform or groups:M/G")
    result.add_argument("--alignment", type=int, default=1, help="rows")
    result.add_argument("--nodes", default=",".join(str(count) for count in tables.NODES))
    result.add_argument("--ranks-per-node", type=int, default=8)
    result.add_argument("--chunk-tokens", type=int, default=1024, help="tokens of a rank that cross to a node at a time")
    result.add_argument("--fixed-rail-tokens", type=int, default=0,
                        help="tokens of a rank that cross to each node in every call; 0: as many as the routing needs")
    for name, value in vars(Rates()).items():
        result.add_argument(f"--{name.replace('_', '-')}", type=float, default=value)
    return result


def write(arguments):
    if vars(arguments) != vars(parser().parse_args(["--write"])):
        raise ValueError("--write takes no other option: the page has the default rates and shapes")
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(tables.write(page, Rates()), encoding="utf-8")
    PICTURE.write_text(picture.draw(Rates()), encoding="utf-8")


def show(arguments):
    rates = Rates(**{name: getattr(arguments, name) for name in vars(Rates())})
    routing = parse_routing(arguments.routing, arguments.experts, arguments.top_k)
    shapes = [Shape(tokens=arguments.tokens, hidden=arguments.hidden, element_bytes=ELEMENT_BYTES[arguments.dtype],
                    routing=routing, nodes=count, ranks_per_node=arguments.ranks_per_node,
                    sidecar_bytes=arguments.sidecar_bytes, alignment=arguments.alignment, chunk_tokens=arguments.chunk_tokens,
                    fixed_rail_tokens=arguments.fixed_rail_tokens)
              for count in parse_nodes(arguments.nodes)]
    print("Rates\n", tables.rates(rates), "", "One node: measured, and what the model says", "", tables.one_node(rates), "",
          "The model, not a measurement", "", tables.by_nodes(shapes, rates), sep="\n")


def main():
    arguments = parser().parse_args()
    try:
        if arguments.write:
            write(arguments)
        else:
            show(arguments)
    except ValueError as error:
        sys.exit(f"cost_model.py: {error}")


if __name__ == "__main__":
    main()
