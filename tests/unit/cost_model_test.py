#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The cost model: its formulas against simulations, its pipeline against closed forms, the tables and the picture of
docs/scaling.md."""
import dataclasses
import math
import pathlib
import random
import subprocess
import sys
import unittest
import xml.etree.ElementTree
from fractions import Fraction

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "cost_model"
sys.path.insert(0, str(FOLDER))
import cost_model  # noqa: E402
import costs  # noqa: E402
import figures  # noqa: E402
import picture  # noqa: E402
import tables  # noqa: E402
from routing import Placement, Routing, experts_of_rank  # noqa: E402

SEED = 20261123
SVG = "{http://www.w3.org/2000/svg}"
RATES = costs.Rates()


def drawn(routing, generator):
    """Returns the experts of one token."""
    groups = generator.sample(range(routing.num_groups), routing.top_groups)
    size = routing.num_experts // routing.num_groups
    return generator.sample([group * size + expert for group in groups for expert in range(size)], routing.top_k)


def owners(routing, num_ranks):
    owner = {}
    for rank in range(num_ranks):
        owner |= dict.fromkeys(range(*experts_of_rank(routing.num_experts, num_ranks, rank)), rank)
    return owner


def small_shape(routing, nodes, ranks_per_node, **more):
    return costs.Shape(**{"tokens": 100, "hidden": 8, "element_bytes": 2, "routing": routing, "nodes": nodes,
                          "ranks_per_node": ranks_per_node} | more)


class Expectations(unittest.TestCase):
    def test_blocks_of_experts(self):
        self.assertEqual([experts_of_rank(7, 3, rank) for rank in range(3)], [(0, 3), (3, 5), (5, 7)])
        self.assertEqual([experts_of_rank(2, 3, rank) for rank in range(3)], [(0, 1), (1, 2), (2, 2)])

    def test_the_design_page(self):
        self.assertAlmostEqual(Placement(Routing(256, 8), 1, 4).distinct_ranks, 3.61, places=2)

    def test_closed_forms(self):
        one = Placement(Routing(64, 1), 4, 4)
        self.assertAlmostEqual(one.distinct_ranks, 1)
        self.assertAlmostEqual(one.distinct_nodes, 1)
        self.assertAlmostEqual(sum(one.rank_hit_again), 0)
        every = Placement(Routing(32, 32), 2, 4)
        self.assertEqual((every.distinct_ranks, every.distinct_nodes), (8, 2))
        alone = Placement(Routing(16, 3), 4, 4)  # one expert a rank
        self.assertAlmostEqual(alone.distinct_ranks, 3)
        self.assertEqual(Routing(4, 2).probability(0, 2, 1), Fraction(4, 6))

    def test_group_limit(self):
        # All of a token's experts are in one group of 4 experts, two of which are on each rank.
        routing = Routing(16, 4, num_groups=4, top_groups=1)
        placement = Placement(routing, 4, 2)
        self.assertAlmostEqual(placement.distinct_nodes, 1)
        self.assertAlmostEqual(placement.distinct_ranks, 2)
        # All groups taken, the groups do not matter.
        self.assertEqual(Placement(Routing(16, 4, 4, 4), 4, 2).rank_hit, Placement(Routing(16, 4), 4, 2).rank_hit)

    def test_probabilities_add_up(self):
        routing = Routing(24, 5, num_groups=4, top_groups=2)
        for first, end in ((0, 24), (2, 9), (5, 6), (11, 11)):
            self.assertEqual(sum(routing.probability(first, end, count) for count in range(routing.top_k + 1)), 1)

    def test_against_a_simulation(self):
        tokens = 3000
        for routing, nodes, ranks_per_node in ((Routing(256, 8), 8, 8), (Routing(256, 8, 8, 4), 8, 8), (Routing(23, 4), 3, 4),
                                               (Routing(48, 6, 8, 3), 2, 4), (Routing(16, 4, 4, 2), 8, 4)):
            with self.subTest(routing=routing, nodes=nodes):
                generator = random.Random(SEED)
                placement, owner = Placement(routing, nodes, ranks_per_node), owners(routing, nodes * ranks_per_node)
                num_ranks = num_nodes = num_again = 0
                for _ in range(tokens):
                    ranks = [owner[expert] for expert in drawn(routing, generator)]
                    num_ranks += len(set(ranks))
                    num_nodes += len({rank // ranks_per_node for rank in ranks})
                    num_again += sum(ranks.count(rank) > 1 for rank in set(ranks))
                # A token's numbers differ by 1 or so from the mean, and 3000 of them by 0.02.
                self.assertAlmostEqual(num_ranks / tokens, placement.distinct_ranks, delta=0.06)
                self.assertAlmostEqual(num_nodes / tokens, placement.distinct_nodes, delta=0.06)
                self.assertAlmostEqual(num_again / tokens, sum(placement.rank_hit_again), delta=0.06)

    def test_the_gate_of_deepseek_v3(self):
        generator, tokens, nodes = random.Random(SEED), 1500, 0
        for _ in range(tokens):
            scores = [[generator.random() for _ in range(32)] for _ in range(8)]
            best = sorted(range(8), key=lambda group: -sum(sorted(scores[group])[-2:]))[:4]
            nodes += len({group for _, group in sorted(((score, group) for group in best for score in scores[group]))[-8:]})
        self.assertAlmostEqual(nodes / tokens, figures.GATE_DISTINCT_NODES, delta=0.03)
        self.assertLess(Placement(tables.GROUP_LIMITED, 8, 8).distinct_nodes, figures.GATE_DISTINCT_NODES)

    def test_refusals(self):
        for arguments, words in (((256, 8, 7, 4), "256 experts cannot be split into 7 groups"),
                                 ((256, 8, 8, 9), "takes 9 of 8 groups"),
                                 ((256, 0), "top-k is 0; it must be 1 to 256"),
                                 ((256, 33, 8, 1), "top-k is 33; it must be 1 to 32")):
            with self.subTest(arguments=arguments), self.assertRaisesRegex(ValueError, words):
                Routing(*arguments)


class Rows(unittest.TestCase):
    def drawn_routes(self, routing, num_ranks, tokens):
        """Returns, of each rank, the routes of each token to each rank."""
        generator, owner = random.Random(SEED), owners(routing, num_ranks)
        routes = [[[0] * num_ranks for _ in range(tokens)] for _ in range(num_ranks)]
        for of_token in (of_token for of_rank in routes for of_token in of_rank):
            for expert in drawn(routing, generator):
                of_token[owner[expert]] += 1
        return routes

    def count(self, routes, size, by_rail, by_rank):
        """Returns the most rows of any rank by rail, relayed and own, for each token; a row's way is that of dispatch.
        `by_rail` turns the routes to the ranks of a node into rows by rail, `by_rank` those to a rank into rows over NVLink."""
        rail, relayed, own = ([[0, 0] for _ in routes] for _ in range(3))  # [out, in]
        for rank, of_rank in enumerate(routes):
            node, index = divmod(rank, size)
            for of_token in of_rank:
                for other in range(len(routes) // size):
                    of_node = of_token[other * size:(other + 1) * size]
                    relay = other * size + index
                    if other != node:
                        rail[rank][0] += by_rail(of_node)
                        rail[relay][1] += by_rail(of_node)
                    link = own if other == node else relayed
                    for j, number in enumerate(of_node):
                        if j != index:
                            link[relay][0] += by_rank(number)
                            link[other * size + j][1] += by_rank(number)
        return [max(max(pair) for pair in of_ranks) / len(routes[0]) for of_ranks in (rail, relayed, own)]

    def test_against_a_simulation(self):
        ways = {"dispatch": (lambda of_node: int(any(of_node)), lambda routes: int(routes > 0)),
                "combine node": (lambda of_node: int(any(of_node)), lambda routes: int(routes > 0)),
                "combine wire": (lambda of_node: sum(routes > 0 for routes in of_node), lambda routes: int(routes > 0)),
                "combine exact": (sum, lambda routes: routes)}
        self.assertEqual(set(ways), set(costs.OPERATIONS))
        for routing, nodes, size in ((Routing(32, 4), 2, 4), (Routing(32, 4, 4, 2), 4, 2), (Routing(10, 3), 3, 2)):
            routes = self.drawn_routes(routing, nodes * size, 2000)
            for operation, way in ways.items():
                with self.subTest(routing=routing, operation=operation):
                    counted = self.count(routes, size, *way)
                    rows = costs.traffic(small_shape(routing, nodes, size, tokens=1), operation)
                    for name, number in zip(("rail", "relayed", "own"), counted):
                        self.assertAlmostEqual(getattr(rows, name), number, delta=0.05 * number, msg=name)

    def test_experts_on_half_of_the_ranks(self):
        # 4 ranks own one expert each, and 4 none: those who have one receive from all nodes, and send to half of them.
        rows = costs.traffic(small_shape(Routing(4, 1), 4, 2), "dispatch")
        self.assertAlmostEqual(rows.rail, 100 * 3 * 0.5)
        self.assertAlmostEqual(costs.traffic(small_shape(Routing(8, 1), 4, 2), "dispatch").rail, 100 * 3 * 0.25)

    def test_local_rows_of_one_rank(self):
        # As tools/ep_bench/floor/floor_plan.h counts them.
        shape = small_shape(Routing(8, 2), 1, 1)
        self.assertEqual(costs.traffic(shape, "dispatch").local, 100 + 200)
        self.assertEqual(costs.traffic(shape, "combine wire").local, 200 + 100)
        # Half of the tokens are sent to the other rank of the node, and as many come back.
        self.assertEqual(costs.traffic(small_shape(Routing(2, 1), 1, 2), "combine wire").local, 100 + 100 + 2 * 50)

    def test_local_rows_over_nodes(self):
        shape = small_shape(Routing(2, 1), 2, 1)
        self.assertEqual(costs.traffic(shape, "dispatch").local, 100 + 100 + 5 * 50)
        self.assertEqual(costs.traffic(shape, "combine node").local, 100 + 100 + 4 * 50)
        # 2 x 2: a quarter of the tokens of each index of each node goes to the other rank of a node.
        self.assertEqual(costs.traffic(small_shape(Routing(4, 1), 2, 2), "combine node").local,
                         100 + 100 + 2 * 25 + 2 * 25 + 4 * 50)

    def test_pads(self):
        trials, probability, alignment = 40, 0.3, 8
        expected = sum(math.comb(trials, demand) * probability**demand * (1 - probability)**(trials - demand)
                       * math.ceil(demand / alignment) * alignment for demand in range(trials + 1))
        self.assertAlmostEqual(costs.padded_rows(trials, probability, alignment), expected)
        self.assertEqual(costs.padded_rows(trials, probability, 1), 12)
        self.assertEqual(costs.padded_rows(10, 1.0, 4), 12)
        self.assertAlmostEqual(costs.traffic(small_shape(Routing(8, 8), 1, 1, alignment=64), "dispatch").local, 100 + 8 * 128)

    def test_fixed_sizes(self):
        for operation, rows in (("dispatch", 1), ("combine node", 1), ("combine wire", 2), ("combine exact", 3)):
            shape = small_shape(Routing(12, 3), 3, 2, fixed_rail_tokens=80)
            self.assertEqual(costs.traffic(shape, operation).rail, 2 * 80 * rows)

    def test_memory(self):
        shape = small_shape(Routing(16, 4), 3, 2, tokens=1000, hidden=9, chunk_tokens=300)
        of_node = 2 * 3 * 1200 * 18
        self.assertEqual(list(costs.memory_bytes(shape).values()),
                         [of_node, 2 * of_node, 4 * of_node, 2 * 3 * 1200 * 4 * 4, 2 * 3 * 4 * (4 + 1200 * 9),
                          12 * 4 * 1200 * 4 + (4 * 6 + 16 * 3) * 1200 + 8 * 6 * 16 + 65536, 2 * 300 * 32, 300 * 2 * 32])
        self.assertEqual(costs.padded_tokens(small_shape(Routing(16, 4), 3, 2, tokens=70, chunk_tokens=300)), 70)
        # As record 0019 prints it: 4096 tokens, 2 nodes.
        of_two_nodes = list(costs.memory_bytes(tables.deepseek_v3(tables.UNIFORM, 2)).values())
        self.assertEqual(tables.bytes_text(of_two_nodes[0]), "235 MB")


class Times(unittest.TestCase):
    def test_pipeline(self):
        pipeline = costs.pipeline_us
        self.assertEqual(pipeline([5], [3]), 8)
        self.assertEqual(pipeline([5] * 4, [3] * 4), 4 * 5 + 3)
        self.assertEqual(pipeline([3] * 4, [5] * 4), 3 + 4 * 5)
        self.assertEqual(pipeline([1, 9, 1], [4, 2, 2]), 1 + 9 + 2 + 2)
        # The second stage has other work before.
        self.assertEqual(pipeline([5] * 4, [3] * 4, 14), 14 + 4 * 3)
        self.assertEqual(pipeline([5] * 4, [3] * 4, 11), 4 * 5 + 3)

    def test_one_node_is_within_ten_percent(self):
        for measured in figures.ONE_NODE:
            with self.subTest(measured=measured):
                us = costs.operation_us(measured.shape(), measured.operation, RATES)
                self.assertAlmostEqual(us / measured.us, 1, delta=0.1)

    def test_local_rate_is_that_of_its_source(self):
        shape = next(measured.shape() for measured in figures.ONE_NODE if measured.ranks == 1)
        rows = costs.traffic(shape, "dispatch").local
        self.assertIn(f"{rows:,.0f} rows", next(source for name, _, _, source in figures.SOURCES if name == "local_gbs"))
        self.assertAlmostEqual(rows * shape.row_bytes("dispatch") / 186e3 / RATES.local_gbs, 1, delta=0.005)

    def test_two_nodes_by_hand(self):
        # One rank a node, one expert a rank, top-1: half of the rows cross, and nothing goes over NVLink.
        rates = costs.Rates(rail_gbs=1.0, rail_efficiency=0.5, rail_latency_us=7.0, host_wait_us=4.0, call_us=3.0, leg_us=1.0,
                            local_gbs=1e9)
        shape = small_shape(Routing(2, 1), 2, 1, chunk_tokens=50)
        self.assertEqual(shape.row_bytes("combine wire"), 16)
        fixed = dataclasses.replace(shape, fixed_rail_tokens=100)
        rails = 50 * 16 / 500
        # A call, an exchange of sizes, a wait; two chunks of 25 rows by rail, or all of them at once; a leg before or behind.
        for case, operation, us in ((shape, "dispatch", 3 + 7 + 4 + 2 * 7 + rails * 20 / 16 + 1),
                                    (shape, "combine node", 3 + 7 + 4 + 1 + 2 * 7 + rails),
                                    (shape, "combine wire", 3 + 7 + 4 + 2 * 1 + 7 + rails),
                                    (fixed, "combine node", 3 + 7 + 1 + 2 * 7 + 2 * rails)):
            with self.subTest(operation=operation, fixed=case.fixed_rail_tokens):
                self.assertAlmostEqual(costs.operation_us(case, operation, rates), us, places=5)

    def test_copies_and_sums_over_nodes(self):
        # Local memory is as slow as its rate says in packing, forwarding and the sums at home, and does not matter otherwise.
        one, two = (small_shape(Routing(2 * size, 1), 2, size, chunk_tokens=50) for size in (1, 2))
        # Legs that take no time leave the rails; long ones leave those of the own node, which come last in combine.
        for shape, operation, leg_us, rows in ((one, "dispatch", 0.0, 2 * 50),
                                               (one, "combine node", 0.0, 50 + 100),
                                               (two, "combine node", 0.0, 50 + 25 + 100),
                                               (one, "combine wire", 0.0, 2 * 50 + 50 + 100),
                                               (one, "combine wire", 100.0, 2 * 50 + 50 + 100)):
            fast, slow = (costs.Rates(rail_gbs=0.5, rail_efficiency=1.0, local_gbs=gbs, overlap_exponent=1e3, leg_us=leg_us)
                          for gbs in (1e9, 1.0))
            self.assertAlmostEqual(costs.operation_us(shape, operation, slow) - costs.operation_us(shape, operation, fast),
                                   rows * 16 / 1e3, places=4, msg=(operation, leg_us))

    def test_the_own_node_beside_the_rails(self):
        # On 2 nodes of 8 a slow NVLink makes the own node's rows end last in combine, and delays the relays in dispatch.
        rates = costs.Rates(nvlink_gbs=1.0, rail_gbs=1e9, rail_latency_us=0.0, host_wait_us=0.0, local_gbs=1e9, call_us=0.0,
                            leg_us=2.0)
        shape = tables.deepseek_v3(tables.UNIFORM, 2)
        for operation in costs.OPERATIONS:
            rows = costs.traffic(shape, operation)
            us = rates.nvlink_us((rows.own + rows.relayed) * shape.row_bytes(operation)) + 2 * 4 * 2
            self.assertAlmostEqual(costs.operation_us(shape, operation, rates), us, delta=1, msg=operation)
        # On slow rails it takes no time of its own.
        rates = costs.Rates(nvlink_gbs=1e9, rail_gbs=1.0, local_gbs=1e9, leg_us=0.0)
        slower = dataclasses.replace(rates, nvlink_gbs=100.0)
        for operation in costs.OPERATIONS:
            relayed = slower.nvlink_us(costs.traffic(shape, operation).relayed * shape.row_bytes(operation))
            self.assertAlmostEqual(costs.operation_us(shape, operation, slower) - costs.operation_us(shape, operation, rates),
                                   relayed / (4 if operation in ("dispatch", "combine node") else 1), delta=1, msg=operation)

    def test_precisions(self):
        for _, routing in tables.ROUTINGS:
            shapes = [tables.deepseek_v3(routing, count) for count in tables.NODES]
            node, wire, exact = ([costs.operation_us(shape, operation, RATES) for shape in shapes]
                                 for operation in costs.OPERATIONS[1:])
            self.assertEqual(node[0], wire[0])
            for count in range(1, len(tables.NODES)):
                self.assertLess(node[count], wire[count])
                self.assertLessEqual(wire[count], exact[count])

    def test_prepare(self):
        self.assertEqual(costs.prepare_us(tables.deepseek_v3(tables.UNIFORM, 1), RATES), RATES.prepare_us)
        rail_us = RATES.rail_latency_us + RATES.rail_us(2 * 4 * (4 + 4096 * 17))
        self.assertAlmostEqual(costs.prepare_us(tables.deepseek_v3(tables.UNIFORM, 3), RATES),
                               RATES.prepare_us + RATES.all_gather_us + rail_us + 3 * 4 * RATES.call_us)

    def test_refusals(self):
        for fields, words in (({"nvlink_gbs": 0.0}, "nvlink_gbs is 0.0; it must be above 0"),
                              ({"call_us": -1.0}, "call_us is -1.0; it must be at least 0"),
                              ({"rail_gbs": math.nan}, "rail_gbs is nan"),
                              ({"rail_efficiency": 1.5}, "rail_efficiency is 1.5; it must be at most 1"),
                              ({"overlap_exponent": 0.5}, "overlap_exponent is 0.5; it must be at least 1")):
            with self.subTest(fields=fields), self.assertRaisesRegex(ValueError, words):
                costs.Rates(**fields)
        for fields, words in (({"tokens": 0}, "tokens is 0; it must be at least 1"),
                              ({"sidecar_bytes": -1}, "sidecar_bytes is -1; it must be at least 0"),
                              ({"fixed_rail_tokens": 101}, "fixed_rail_tokens is 101; it must be 0 to 100"),
                              ({"nodes": 129, "ranks_per_node": 8}, "129 nodes of 8 are 1032 ranks; a group has at most 1024")):
            with self.subTest(fields=fields), self.assertRaisesRegex(ValueError, words):
                small_shape(Routing(8, 1), **{"nodes": 1, "ranks_per_node": 1} | fields)


def cells(text, *begin):
    found = [line for line in text.splitlines() if line.startswith("| " + " | ".join(begin) + " |")]
    return [cell.strip() for cell in found[0].strip("|").split("|")][len(begin):]


class Page(unittest.TestCase):
    def test_every_rate_has_a_source(self):
        self.assertEqual(sorted(name for name, *_ in figures.SOURCES), sorted(vars(RATES)))
        text = tables.rates(RATES)
        self.assertEqual(cells(text, "a rail on paper, 400 Gb/s"), ["50 GB/s", "**assumed**", "`--rail-gbs`"])
        self.assertIn("record 0001", cells(text, "payload over NVLink, each GPU in one direction")[1])

    def test_published_figures(self):
        text = tables.throughput(RATES)
        self.assertEqual(cells(text, "DeepEP V1", "4 x 8")[:2], ["58, 57", "43.5, 42.8"])
        # 3.614 distinct nodes of a token, in the time of its row.
        shape = costs.Shape(tokens=4096, hidden=7168, element_bytes=2, routing=Routing(256, 8, 4, 4), nodes=4, ranks_per_node=8)
        us = costs.operation_us(shape, "combine node", RATES)
        self.assertEqual(cells(text, "DeepEP V1", "4 x 8")[2].split(", ")[1], f"{4096 * 3.614214 * 14336 / us / 1e3:.1f}")
        self.assertEqual(tables.in_8_bits(shape).row_bytes("dispatch"), 7168 + 224)
        text = tables.few_tokens(RATES)
        # 128 tokens of 8 routes of 14336 bytes
        self.assertEqual(cells(text, "NCCL EP, low latency", "2 x 8")[:2],
                         ["76.7, 73.0 GB/s", f"{128 * 8 * 14336 / 76.7e3:.0f}, {128 * 8 * 14336 / 73.0e3:.0f}"])
        self.assertEqual(cells(text, "DeepEP V1, low latency", "4 x 8")[:2], ["155, 273 us", "155, 273"])

    def test_sockets(self):
        ratios = []
        for gbs in (2.0, 4.4):
            shape = tables.deepseek_v3(tables.UNIFORM, 2, ranks_per_node=2)
            us = costs.operation_us(shape, "combine node", tables.socket_rates(RATES, gbs))
            ratios.append(us / (4096 * shape.row_bytes("combine node") / (1e3 * gbs)))
        for ratio in ratios:  # one row crosses for nearly each token, and takes nearly all of the time
            self.assertTrue(1 < ratio < 1.1, ratio)

    def test_the_page_is_up_to_date(self):
        page = cost_model.PAGE.read_text(encoding="utf-8")
        self.assertEqual(tables.write(page, RATES), page, "docs/cost_model/cost_model.py --write has to be run")
        self.assertEqual(picture.draw(RATES), cost_model.PICTURE.read_text(encoding="utf-8"))
        self.assertIn(f"{figures.GATE_DISTINCT_NODES} distinct nodes", " ".join(page.split()))

    def test_markers(self):
        page = cost_model.PAGE.read_text(encoding="utf-8")
        with self.assertRaisesRegex(ValueError, "markers '<!-- cost_model: nodes -->'"):
            tables.write(page.replace("<!-- cost_model: nodes -->", ""), RATES)

    def test_picture(self):
        svg = xml.etree.ElementTree.fromstring(picture.draw(RATES))
        self.assertEqual(len(list(svg.iter(f"{SVG}polyline"))), 2 * len(costs.OPERATIONS))
        for line in svg.iter(f"{SVG}polyline"):
            for x, y in (map(float, point.split(",")) for point in line.get("points").split()):
                self.assertTrue(0 < x < picture.WIDTH and picture.TOP <= y <= picture.HEIGHT - picture.BOTTOM, (x, y))
        self.assertIn("A model, not a measurement", "".join(element.text for element in svg.iter(f"{SVG}text")))


class CommandLine(unittest.TestCase):
    def run_model(self, *arguments):
        return subprocess.run([sys.executable, "-B", FOLDER / "cost_model.py", *arguments], capture_output=True, text=True,
                              timeout=60, check=False)

    def test_table(self):
        run = self.run_model("--nodes", "1,2", "--ranks-per-node", "2", "--tokens", "512", "--rail-gbs", "25")
        self.assertEqual(run.returncode, 0, run.stderr)
        self.assertEqual(cells(run.stdout, "2", "4")[0], "1.99")
        self.assertEqual(cells(run.stdout, "a rail on paper, 400 Gb/s")[0], "25 GB/s")
        self.assertNotIn("\n| 4 | 8 |", run.stdout)

    def test_errors(self):
        for arguments, words in ((("--routing", "groups:4"), "--routing is 'groups:4'; it must be uniform or groups:M/G"),
                                 (("--routing", "groups:1/0"), "--routing is 'groups:1/0'"),
                                 (("--nodes", "2,x"), "--nodes is '2,x'; it must be numbers"),
                                 (("--nodes", "0"), "nodes is 0; it must be at least 1"),
                                 (("--rail-efficiency", "2"), "rail_efficiency is 2.0"),
                                 (("--write", "--tokens", "1"), "--write takes no other option")):
            with self.subTest(arguments=arguments):
                run = self.run_model(*arguments)
                self.assertEqual(run.returncode, 1)
                self.assertIn(words, run.stderr)
                self.assertEqual(len(run.stderr.splitlines()), 1)


if __name__ == "__main__":
    unittest.main()
