# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of docs/moe.md from results.json, between markers."""
import re

LAYER_NAMES = {"block": "epx", "native": "C++ sendrecv", "torch": "PyTorch", "jax-usual": "JAX, usual", "jax-best": "JAX, best"}
# The pieces of a block in the order in which they run, and where ep_bench reports them.
FORWARD_PIECES = (("router", "block"), ("prepare", "operations"), ("dispatch", "operations"), ("ffn", "block"),
                  ("combine", "operations"))
BACKWARD_PIECES = (("combine_bwd", "operations"), ("ffn_bwd", "block"), ("dispatch_bwd", "operations"),
                   ("router_bwd", "block"))


def table(header, rows):
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in [header, ["---"] * len(header), *rows])


def lines_of(case):
    """Returns {layer: {"fwd": line, "fwd+bwd": line}} of a case's programs; epx's graph replays are a layer of their own."""
    layers = {}
    for program, result in case["programs"].items():
        if "failed" in result:
            continue
        if program != "ep_bench":
            layers[program] = result["lines"]
            continue
        lines = result["block"]["lines"]
        for layer in ("block", "native"):
            if f"{layer} fwd" in lines:
                layers[layer] = {name: lines[f"{layer} {name}"] for name in ("fwd", "fwd+bwd")}
        if "block fwd graph" in lines:
            layers["block graph"] = {name: lines[f"block {name} graph"] for name in ("fwd", "fwd+bwd")}
    return layers


def microseconds(value):
    return "-" if value is None else f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"


def ratio(value):
    return "-" if value is None else f"{value:.2f}"


def environment(results):
    versions = ", ".join(f"{name} {version}" for name, version in sorted(results["versions"].items()))
    where = results["machine"]
    driver = f", driver {where['driver']}" if where["driver"] else ""
    return (f"Measured on {results['ranks']} x {where['device']}{driver}, {results['date']}: {versions}; medians of "
            f"{results['iters']} calls, pauses of {results['pause_ms']} ms.")


def correctness(results):
    check = results["check"]
    layers = [layer for layer in LAYER_NAMES if any(layer in entry["layers"] for entry in check["tensors"].values())]
    rows = []
    for tensor, entry in check["tensors"].items():
        row = [f"`{tensor}`"]
        for layer in layers:
            of_layer = entry["layers"].get(layer)
            row.append("-" if of_layer is None else f"{of_layer['from_reference'] / entry['largest']:.1e}")
        row += ["-" if layer not in entry["layers"] or entry["layers"][layer]["from_block"] is None
                else f"{entry['layers'][layer]['from_block'] / entry['largest']:.1e}" for layer in layers if layer != "block"]
        rows.append(row)
    header = ["tensor", *(f"{LAYER_NAMES[layer]}" for layer in layers),
              *(f"{LAYER_NAMES[layer]} - epx" for layer in layers if layer != "block")]
    return f"{table(header, rows)}{failures(check['failed'])}"


def failures(failed):
    return "".join(f"\n\nNot in the table: {program}, since {sentence}." for program, sentence in failed.items())


def times(results):
    parts = []
    for case in results["cases"].values():
        layers = lines_of(case)
        block = layers.get("block")
        rows = []
        for layer, lines in layers.items():
            name = "epx, graph replay" if layer == "block graph" else LAYER_NAMES[layer]
            row = [name]
            for direction in ("fwd", "fwd+bwd"):
                line = lines[direction]
                faster = line["median_us"] / block[direction]["median_us"] if block else None
                row += [microseconds(line["median_us"]), microseconds(line.get("paused_us")), f"{line['tflops']:.0f}",
                        ratio(faster), ratio(line.get("ratio")), ratio(line.get("max_ratio"))]
            rows.append(row)
        header = ["layer"] + [f"{direction} {column}" for direction in ("forward", "both") for column in (
            "us", "us, paused", "TFLOP/s", "x epx", "/ sum of bounds", "/ larger bound")]
        failed = {program: result["failed"] for program, result in case["programs"].items() if "failed" in result}
        parts.append(f"**{title(case)}**\n\n{table(header, rows)}{failures(failed)}")
    return "\n\n".join(parts)


def title(case):
    shape = case["shape"]
    return (f"{shape['model']}, {shape['tokens']} tokens per rank, {shape['routing']} (H {shape['hidden']}, F {shape['ffn']}, "
            f"E {shape['experts']}, K {shape['top_k']}{', biases' if shape['biases'] else ''})")


def pieces_of(case):
    """Returns [(piece, microseconds)] forward and backward of a case that ep_bench has measured on GPUs, or nothing."""
    result = case["programs"].get("ep_bench", {"failed": ""})
    if "failed" in result or "ffn" not in result["block"]["lines"]:
        return None
    def median(piece, where):
        return (result["block"]["lines"] if where == "block" else result["operations"])[piece]["median_us"]
    return tuple([(piece, median(piece, where)) for piece, where in pieces] for pieces in (FORWARD_PIECES, BACKWARD_PIECES))


def pieces(results):
    rows = []
    for case in results["cases"].values():
        of_case = pieces_of(case)
        if of_case is None:
            continue
        forward, backward = of_case
        rows.append([title(case), *(microseconds(us) for _, us in forward + backward)])
    text = table(["layer", *(name for name, _ in FORWARD_PIECES + BACKWARD_PIECES)], rows)
    return f"{text}\n\n![The pieces of each block as parts of a bar](moe-pieces.svg)" if rows else text


PARTS = {"environment": environment, "correctness": correctness, "times": times, "pieces": pieces}


def write(page, results):
    """Returns the page with each part between its markers."""
    for name, part in PARTS.items():
        begin, end = f"<!-- moe_tutorial: {name} -->", f"<!-- moe_tutorial: end of {name} -->"
        if page.count(begin) != 1 or page.count(end) != 1:
            raise ValueError(f"the page has not exactly one pair of the markers '{begin}' and '{end}'")
        text = f"{begin}\n{part(results)}\n{end}"
        page = re.sub(f"{re.escape(begin)}.*?{re.escape(end)}", lambda _, text=text: text, page, flags=re.DOTALL)
    return page
