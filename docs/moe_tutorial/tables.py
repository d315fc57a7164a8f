# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of docs/moe.md from results.json, between markers."""
import re

import cases

LAYER_NAMES = {"block": "epx", "native": "C++ sendrecv", "torch-usual": "PyTorch, usual", "torch-best": "PyTorch, best",
               "jax-usual": "JAX, usual", "jax-best": "JAX, best", "block-fp8": "epx, FP8", "torch-fp8": "PyTorch, FP8"}
FP8_LAYERS = ("block-fp8", "torch-fp8")
GRAPH = " graph"  # after the name of a layer: its replays
PROGRAM_NAMES = {"ep_bench": "epx and C++ sendrecv", "torch": "PyTorch", "jax-usual": "JAX, usual", "jax-best": "JAX, best"}
DIRECTIONS = ("fwd", "fwd+bwd")
# A layer whose outputs differ from epx's by more, relative to the largest element, has no times; ep_bench --block allows the
# native layer as much.
LIMIT = 4e-2
FP8_LIMIT = 0.2  # for layers in FP8, which differ by 0.05 to 0.1
FEW_TOKENS = 256  # per rank; with so few the time is that of reading weights
# The pieces of a block in the order in which they run, and where ep_bench reports them.
FORWARD_PIECES = (("router", "block"), ("prepare", "operations"), ("dispatch", "operations"), ("ffn", "block"),
                  ("combine", "operations"))
BACKWARD_PIECES = (("combine_bwd", "operations"), ("ffn_bwd", "block"), ("dispatch_bwd", "operations"),
                   ("router_bwd", "block"))


def table(header, rows):
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in [header, ["---"] * len(header), *rows])


def differs(case, layer):
    """Returns by how much a layer's outputs at the case's shape differ from epx's; None where they were not compared."""
    of_layer = case["differences"].get(layer)
    return max(of_layer.values()) if of_layer else None


def limit_of(layer):
    return FP8_LIMIT if layer in FP8_LAYERS else LIMIT


def is_wrong(case, layer):
    difference = differs(case, layer)
    return difference is not None and not difference <= limit_of(layer)


def lines_of(case):
    """Returns {layer: {"fwd": line, "fwd+bwd": line}} of a case's programs, layers in FP8 last; epx's graph replays are
    layers of their own."""
    layers = {}
    for program, result in case["programs"].items():
        if "failed" in result:
            continue
        if program != "ep_bench":
            layers |= result["layers"]
            continue
        lines = result["block"]["lines"]
        for graph in ("", GRAPH):
            for layer in ("block", "native", "block-fp8"):
                if f"{layer} fwd{graph}" in lines:
                    layers[layer + graph] = {name: lines[f"{layer} {name}{graph}"] for name in DIRECTIONS}
    right = [layer for layer in layers if not is_wrong(case, layer.removesuffix(GRAPH))]
    return {layer: layers[layer] for layer in sorted(right, key=lambda layer: layer.removesuffix(GRAPH) in FP8_LAYERS)}


def name_of(layer):
    return f"{LAYER_NAMES[layer.removesuffix(GRAPH)]}{', graph replay' if layer.endswith(GRAPH) else ''}"


def ordered(results):
    """Returns the measured cases in the order of the list of all of them."""
    measured = results["cases"]
    names = [case.name for case in cases.all_cases(results["ranks"]) if case.name in measured]
    return [measured[name] for name in names + [name for name in measured if name not in names]]


def microseconds(value):
    return "-" if value is None else f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"


def with_spread(value, quartiles):
    """Returns a median with half the distance between the quartiles."""
    if value is None:
        return "-"
    half = (quartiles[1] - quartiles[0]) / 2
    return f"{microseconds(value)} ± {half:,.0f}" if value >= 1000 else f"{value:.1f} ± {half:.1f}"


def ratio(value):
    return "-" if value is None else f"{value:.2f}"


def counted(number, noun):
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def environment(results):
    where = results["machine"]
    more = "".join(f", {name} {where[key]}" for name, key in (("driver", "driver"), ("power limit", "power_limit"))
                   if where[key])
    parts = [f"Measured on {results['ranks']} x {where['device']}{more}."]
    for program, versions in results["versions"].items():
        parts.append(f"{PROGRAM_NAMES[program]}: {', '.join(f'{name} {version}' for name, version in versions.items())}.")
    settings = {}  # how many cases were measured alike
    for run in results["runs"]:
        commit = f"commit {run['commit']}" if run["commit"] else "of a commit that was not recorded"
        key = run["date"][:10], commit, run["iters"], counted(run["rounds"], "round"), run["pause_ms"]
        settings[key] = settings.get(key, 0) + len(run["cases"])
    parts += [f"{date}, {commit}: {counted(number, 'case')}, {iters} calls in {rounds}, pauses of {pause_ms} ms."
              for (date, commit, iters, rounds, pause_ms), number in settings.items() if number]
    drift = drift_between_rounds(results)
    if drift is not None:
        parts.append(f"The slowest round of a line took {100 * drift[0]:.1f} % longer than its fastest one in the median over "
                     f"all lines, and {100 * drift[1]:.1f} % at most.")
    return "\n".join(parts)


def drift_between_rounds(results):
    """Returns the median and the largest of (slowest round / fastest round - 1) over all lines of the layers."""
    found = sorted(max(line["rounds_us"]) / min(line["rounds_us"]) - 1 for case in results["cases"].values()
                   for lines in lines_of(case).values() for line in lines.values() if len(line["rounds_us"]) > 1)
    return (found[len(found) // 2], found[-1]) if found else None


def correctness(results):
    return "\n\n".join(correctness_of(check) for check in results["checks"])


def correctness_of(check):
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
    return f"{sizes_of(check['shape'])}:\n\n{table(header, rows)}{missing_rows(check['programs'])}"


def missing_rows(results):
    """Returns a sentence for each program, and each of its layers, that has no results."""
    why = {PROGRAM_NAMES[program]: result["failed"] for program, result in results.items() if "failed" in result}
    why |= {PROGRAM_NAMES[program]: "the run left it out" for program in PROGRAM_NAMES if program not in results}
    for result in results.values():
        why |= {LAYER_NAMES[layer]: sentence for layer, sentence in result.get("left_out", {}).items()}
    return "".join(f"\n\nNot in the table: {name}, since {sentence}." for name, sentence in why.items())


def remarks(case):
    """Returns a sentence for each program that is not in a case's table, or of which the reader should know something."""
    text = missing_rows(case["programs"])
    for layer in filter(lambda layer: is_wrong(case, layer), case["differences"]):
        text += (f"\n\nNot in the table: {LAYER_NAMES[layer]}, since its outputs differ from epx's by "
                 f"{differs(case, layer):.1e} of the largest element, and {limit_of(layer)} is allowed.")
    for program, result in case["programs"].items():
        if result.get("alone") and "failed" not in result:
            text += (f"\n\n{PROGRAM_NAMES[program]} was measured alone, after the others, since there was not memory enough "
                     "for all programs at a time.")
        for layer, times_us in result.get("candidates_us", {}).items():
            tried = ", ".join(f"{name} {microseconds(us)} us" for name, us in times_us.items())
            text += f"\n\n{LAYER_NAMES[layer]}: forward and backward {tried}, before the rounds; the faster was taken."
    if case["shape"]["tokens"] <= FEW_TOKENS and pieces_of(case):
        text += f"\n\n{weights_read(case)}"
    return text


def weights_read(case):
    """Returns how fast the forward products read the weights of a rank's experts, in bfloat16."""
    shape, ranks = case["shape"], case["programs"]["ep_bench"]["ranks"]
    bytes_read = 2 * 3 * shape["hidden"] * shape["ffn"] * shape["experts"] / ranks
    us = dict(pieces_of(case)[0])["ffn"]
    return (f"epx's forward products took {microseconds(us)} us; the weights of a rank's experts are {bytes_read / 1e9:.1f} "
            f"GB, which is {bytes_read / us / 1e6:.1f} TB/s where each is read once.")


def times(results):
    parts = []
    for case in ordered(results):
        layers = lines_of(case)
        block = layers.get("block")
        rows = []
        for layer, lines in layers.items():
            row = [name_of(layer)]
            for direction in DIRECTIONS:
                line = lines[direction]
                slower = line["median_us"] / block[direction]["median_us"] if block else None
                row += [with_spread(line["median_us"], line["quartiles_us"]),
                        with_spread(line["paused_us"], line["paused_quartiles_us"]), f"{line['tflops']:.0f}", ratio(slower),
                        ratio(line.get("ratio")), ratio(line.get("max_ratio"))]
            difference = differs(case, layer)
            rows.append(row + ["-" if difference is None else f"{difference:.1e}"])
        header = ["layer"] + [f"{direction} {column}" for direction in ("forward", "both") for column in (
            "us", "us, paused", "TFLOP/s", "x epx", "/ sum of bounds", "/ larger bound")] + ["differs from epx"]
        parts.append(f"**{title(case['shape'])}**\n\n{table(header, rows)}{remarks(case)}")
    parts += [f"Not measured: {title(vars(case))}; the run left it out." for case in cases.all_cases(results["ranks"])
              if case.name not in results["cases"]]
    return "\n\n".join(parts)


def title(shape):
    return f"{shape['model']}, {sizes_of(shape)}"


def sizes_of(shape):
    return (f"{shape['tokens']} tokens per rank, {shape['routing']} (H {shape['hidden']}, F {shape['ffn']}, "
            f"E {shape['experts']}, K {shape['top_k']}{', biases' if shape['biases'] else ''})")


def fastest_framework(layers, direction):
    """Returns the least time of any variant of PyTorch and JAX in bfloat16, or None."""
    return min((lines[direction]["median_us"] for layer, lines in layers.items()
                if layer.startswith(("torch", "jax")) and layer not in FP8_LAYERS), default=None)


def proxy(results):
    """Returns the table of the cases that stand for DeepSeek-V3 on cases.PROXY_RANKS GPUs."""
    rows, remark = [], ""
    for case in cases.proxies(results["ranks"]):
        measured = results["cases"].get(case.name)
        if measured is None:
            continue
        layers, pieces = lines_of(measured), pieces_of(measured)
        if "block" not in layers or pieces is None:
            continue
        block, native, graph = layers["block"], layers.get("native"), layers.get(f"block{GRAPH}")
        block_fp8, torch_fp8 = (layers.get(layer) for layer in FP8_LAYERS)
        framework = {direction: fastest_framework(layers, direction) for direction in DIRECTIONS}
        ffn = sum(us for of_direction in pieces for name, us in of_direction if name.startswith("ffn"))
        if graph:
            remark += (f"\n\nWith {case.tokens} tokens the grouped products, each of which reads all its weights, take "
                       f"{microseconds(dict(pieces[0])['ffn'])} of the {microseconds(graph['fwd']['median_us'])} us of epx's "
                       "forward replay; the other layers read the same weights.")
        rows.append([
            f"{case.tokens} tokens, {case.routing}", microseconds(block["fwd"]["median_us"]),
            ratio(framework["fwd+bwd"] and framework["fwd+bwd"] / block["fwd+bwd"]["median_us"]),
            ratio(native and (native["fwd+bwd"]["median_us"] - ffn) / (block["fwd+bwd"]["median_us"] - ffn)),
            ratio(framework["fwd"] and graph and framework["fwd"] / graph["fwd"]["median_us"]),
            ratio(framework["fwd+bwd"] and block_fp8 and framework["fwd+bwd"] / block_fp8["fwd+bwd"]["median_us"]),
            ratio(torch_fp8 and block_fp8 and torch_fp8["fwd+bwd"]["median_us"] / block_fp8["fwd+bwd"]["median_us"])])
    header = ["case", "forward us", "both: faster of PyTorch and JAX / epx", "both: (C++ sendrecv - ffn) / (epx - ffn)",
              "forward: faster of PyTorch and JAX / epx, graph replay",
              "both: faster of PyTorch and JAX in bfloat16 / epx in FP8", "both: PyTorch in FP8 / epx in FP8"]
    return table(header, rows) + remark


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
    for case in ordered(results):
        of_case = pieces_of(case)
        if of_case is None:
            continue
        forward, backward = of_case
        rows.append([title(case["shape"]), *(microseconds(us) for _, us in forward + backward)])
    text = table(["layer", *(name for name, _ in FORWARD_PIECES + BACKWARD_PIECES)], rows)
    return f"{text}\n\n![The pieces of each block as parts of a bar](moe-pieces.svg)" if rows else text


PARTS = {"environment": environment, "correctness": correctness, "proxy": proxy, "times": times, "pieces": pieces}


def write(page, results):
    """Returns the page with each part between its markers."""
    for name, part in PARTS.items():
        begin, end = f"<!-- moe_tutorial: {name} -->", f"<!-- moe_tutorial: end of {name} -->"
        if page.count(begin) != 1 or page.count(end) != 1:
            raise ValueError(f"the page has not exactly one pair of the markers '{begin}' and '{end}'")
        text = f"{begin}\n{part(results)}\n{end}"
        page = re.sub(f"{re.escape(begin)}.*?{re.escape(end)}", lambda _, text=text: text, page, flags=re.DOTALL)
    return page
