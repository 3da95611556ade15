# SPDX-License-Identifier: Apache-2.0
"""Tests the GPU benchmarks' reports and arguments with made-up measurements."""
import contextlib
import io
import json
import pathlib
import subprocess
import sys
import tempfile
import unittest
from unittest import mock
from xml.etree import ElementTree

BENCH = pathlib.Path(__file__).resolve().parents[2] / "bench"
sys.path.insert(0, str(BENCH))
import gpu_alternate  # noqa: E402
import gpu_chart  # noqa: E402
import gpu_floors  # noqa: E402
import gpu_report  # noqa: E402
import gpu_shapes  # noqa: E402


def both(cool, hot):
    return {"cool": cool, "hot": hot}


def cells(text, *names):
    """Returns the cells of the one line that has these."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    found = [line for line in lines if all(name in line for name in names)]
    assert len(found) == 1, (names, text)
    return found[0]


class Shapes(unittest.TestCase):
    def test_are_those_of_the_command_line(self):
        self.assertEqual(gpu_shapes.SHAPES["qwen3-30b"], (16384, 2048, 768, 128, 8))
        self.assertEqual(list(gpu_shapes.SHAPES),
                         ["qwen3-30b", "olmoe", "mixtral", "dsv3-slice", "gpt-oss", "dsv2-lite",
                          "granite", "kimi-slice", "qwen3-235b-half", "scout", "odd",
                          "qwen3-next-like"])

    def test_may_be_given_by_sizes(self):
        self.assertEqual(gpu_shapes.shape_of("64x32x16x4x2"), (64, 32, 16, 4, 2))
        for wrong in ("64x32x16x4", "64x32x16x4x0", "tiny", "64x32x16x4x5"):
            with self.assertRaises(ValueError, msg=wrong):
                gpu_shapes.shape_of(wrong)

    def test_come_in_groups(self):
        self.assertEqual(gpu_shapes.parse_groups("olmoe,mixtral/odd"),
                         [["olmoe", "mixtral"], ["odd"]])
        self.assertEqual(gpu_shapes.parse_names("olmoe,odd"), ["olmoe", "odd"])
        with self.assertRaisesRegex(Exception, "tiny is neither TxHxIxExK nor one of qwen3-30b"):
            gpu_shapes.parse_groups("olmoe/tiny")


class Arithmetic(unittest.TestCase):
    SHAPE = (1000, 100, 10, 4, 2)

    def test_flops_are_those_of_three_products_forward_and_six_backward(self):
        self.assertEqual(gpu_floors.forward_flops(self.SHAPE), 6 * 1000 * 2 * 100 * 10)
        self.assertEqual(gpu_floors.step_flops(self.SHAPE), 18 * 1000 * 2 * 100 * 10)
        self.assertEqual(gpu_report.tflops(2e12, both(1000, 500)), both(2, 4))

    def test_saved_bytes_are_2h_and_4ki(self):
        self.assertEqual(gpu_floors.saved_bytes_wanted(gpu_shapes.SHAPES["qwen3-30b"]),
                         2 * 2048 + 4 * 8 * 768)

    def test_floor_of_a_forward_is_memory_or_compute_whichever_is_longer(self):
        moved = 2 * (3 * 3 * 100 * 10 + 2 * 1000 * 100)  # three experts have rows
        floor, bound = gpu_floors.forward_floor(self.SHAPE, 3, bytes_per_s=1e6, flops_per_s=1e12)
        self.assertAlmostEqual(floor, moved / 1e6 * 1e3)
        self.assertEqual(bound, "memory")
        floor, bound = gpu_floors.forward_floor(self.SHAPE, 3, bytes_per_s=1e12, flops_per_s=1e6)
        self.assertAlmostEqual(floor, 12e6 / 1e6 * 1e3)
        self.assertEqual(bound, "compute")


class Floors(unittest.TestCase):
    # 2000 rows over 4 experts, one of which has none: x 1e5 numbers, rows 2e5, activated 2e4, and
    # 4000 in the down matrices, 3000 of them read.
    SHAPE = (1000, 100, 10, 4, 2)
    NUMBERS = {"plan": 0,
               "up + activation": 1e5 + 6000 + 4e4 + 2e4,
               "down": 2e4 + 3000 + 2e5,
               "combine": 2e5 + 1e5,
               "down backward + activation": 1e5 + 3000 + 4e4 + 4e4 + 2e4,
               "down gradient": 1e5 + 2e4 + 4000,
               "up gradient": 1e5 + 4e4 + 8000,
               "up backward": 4e4 + 6000 + 2e5,
               "dispatch_backward": 2e5 + 1e5}
    # Up projects twice as much as down.
    PARTS = {"up + activation": 2, "down": 1, "down backward + activation": 1, "down gradient": 1,
             "up gradient": 2, "up backward": 2}
    DENSE = {"up": both(1, 0.5), "down": both(2, 1), "up backward": both(4, 2),
             "gradient": both(8, 4)}

    def stages(self):
        return gpu_floors.step_stages(self.SHAPE, busy_experts=3)

    def test_stages_do_all_products_and_move_everything_once(self):
        self.assertEqual([stage.name for stage in self.stages()], list(self.NUMBERS))
        for stage in self.stages():
            self.assertEqual(stage.bytes, 2 * self.NUMBERS[stage.name], stage)
            self.assertEqual(stage.flops, self.PARTS.get(stage.name, 0) * 2 * 2000 * 100 * 10)
        self.assertEqual(sum(stage.flops for stage in self.stages()),
                         gpu_floors.step_flops(self.SHAPE))

    def test_dense_products_have_the_reductions_of_the_stages(self):
        sizes = gpu_floors.dense_sizes(self.SHAPE)
        self.assertEqual({name: size[2] for name, size in sizes.items()},
                         {"up": 100, "down": 10, "up backward": 20, "gradient": 496})
        self.assertEqual({stage.dense for stage in self.stages()} - {None}, set(sizes))
        # The gradient's reduction of 500 rows was rounded.
        for name, parts in (("up", 2), ("down", 1), ("up backward", 2), ("gradient", 1.984)):
            m, n, k = sizes[name]
            self.assertEqual(2 * m * n * k, parts * 2 * 2000 * 100 * 10, name)
        self.assertEqual(gpu_floors.dense_sizes((1, 8, 8, 64, 2))["gradient"][2], 8)

    def test_stage_is_as_slow_as_its_products(self):
        fast_memory = {"dense": self.DENSE, "copy": both(1e9, 1e9)}
        by_name = {stage.name: stage for stage in self.stages()}
        floor, bound = gpu_floors.stage_floor(by_name["down gradient"], fast_memory)
        self.assertAlmostEqual(floor["cool"], 4e6 / 8e12 * 1e3)
        self.assertAlmostEqual(floor["hot"], 4e6 / 4e12 * 1e3)
        self.assertEqual(bound, "compute")

    def test_stage_is_as_slow_as_its_bytes(self):
        slow_memory = {"dense": self.DENSE, "copy": both(1, 0.5)}
        by_name = {stage.name: stage for stage in self.stages()}
        for name in ("down gradient", "combine"):
            floor, bound = gpu_floors.stage_floor(by_name[name], slow_memory)
            self.assertAlmostEqual(floor["cool"], 2 * self.NUMBERS[name] / 1e9 * 1e3)
            self.assertAlmostEqual(floor["hot"], 2 * self.NUMBERS[name] / 0.5e9 * 1e3)
            self.assertEqual(bound, "memory")

    def test_floor_of_a_step_is_the_sum(self):
        # A PB/s, so that only combine and dispatch_backward wait for memory.
        ceilings = {"dense": self.DENSE, "copy": both(1e6, 1e6)}
        products = 4e6 * (2 / 1 + 1 / 2 + 1 / 1 + 1 / 8 + 2 / 8 + 2 / 4) / 1e12
        moved = 2 * 2 * 3e5 / 1e15
        floor = gpu_floors.step_floor(self.SHAPE, 3, ceilings)
        self.assertAlmostEqual(floor["cool"], (products + moved) * 1e3)
        self.assertAlmostEqual(floor["hot"], (2 * products + moved) * 1e3)


def compared(labels, run="r0101-1200-1", shape="made-up", **more):
    # 18 flops · 1e9 a step, so that 1 ms is 18 TF. Memory is so fast that only products count.
    times = {"torch": (3, 4), "torch.compile": (1.5, 1.8), "torch, best": (1.2, 1.65),
             "switchyard": (1, 1.5)}
    layers = {label: {"forward": both(0.5, 0.6), "step": both(*times[label]),
                      "peak_bytes": 3 << 20} for label in labels}
    dense = {name: both(36, 24) for name in ("up", "down", "up backward", "gradient")}
    return {"shape": shape, "run": run, "sizes": (1000, 1000, 1000, 4, 1), "layers": layers,
            "busy_experts": 4, "ceilings": {"dense": dense, "copy": both(1e9, 1e9)},
            "saved_activations": 6000.0, "saved_integers": 20.4, "host_syncs": 0, **more}


def made_run(name, results, **more):
    return {"run": name, "date": "2026-01-01", "gpu": "A & B", "torch": "2.0",
            "options": {"kernels": "best"}, "compare": results, **more}


class Tables(unittest.TestCase):
    ROW = "made-up 1000,1000,1000,4,1"

    def assert_aligned(self, text):
        tables = [part.splitlines() for part in text.split("\n\n") if part.startswith("|")]
        self.assertTrue(tables)
        for lines in tables:
            self.assertEqual(len({len(line) for line in lines}), 1, text)
            self.assertEqual(len({line.count("|") for line in lines}), 1, text)

    def test_compare_has_ratios_and_shares_cool_and_hot(self):
        results = [compared(["torch", "torch.compile", "torch, best", "switchyard"])]
        text = gpu_report.compare_tables(results)
        self.assert_aligned(text)
        # Half as fast as a dense product, which is the floor where memory costs nothing.
        self.assertEqual(cells(text, "switchyard", self.ROW)[1:],
                         ["r0101-1200-1", "switchyard", "36 / 24", "0.50 / 0.60", "1.00 / 1.50",
                          "18 / 12", "50% / 50%", "0.50 / 0.75", "50% / 50%", "1.50x / 1.20x",
                          "1.20x / 1.10x"])
        self.assertEqual(cells(text, "torch", self.ROW)[-2], "0.50x / 0.45x")
        self.assertEqual(cells(gpu_report.memory_table(results), "made-up")[1:],
                         ["r0101-1200-1", "3", "3", "3", "3", "6000 + 20", "6000", "0"])
        self.assertEqual(cells(gpu_report.ceiling_table(results), "made-up")[2:],
                         ["36 / 24"] * 4 + ["1000000000 / 1000000000"])

    def test_compare_without_torch_compile_has_no_ratios(self):
        text = gpu_report.compare_tables([compared(["torch", "switchyard"])])
        self.assert_aligned(text)
        self.assertEqual(cells(text, "switchyard", self.ROW)[-2:], ["-", "-"])

    def test_floors_are_shown_by_stage_and_say_what_memory_limits(self):
        text = gpu_report.floor_table([compared(["switchyard"])])
        row = dict(zip(cells(text, "shape"), cells(text, "made-up"), strict=True))
        self.assertEqual(row["up + activation"], "0.111 / 0.167")
        self.assertEqual(row["down"], "0.056 / 0.083")
        self.assertEqual(row["combine"], "0.000 / 0.000 *")
        self.assertEqual(row["together"], "0.50 / 0.75")

    def test_form_is_named_unless_it_is_the_usual_one(self):
        self.assertEqual(gpu_report.label_of({"shape": "a", "form": "swiglu"}), "a")
        self.assertEqual(gpu_report.label_of({"shape": "a", "form": "gpt-oss"}), "a (gpt-oss form)")

    def test_skew_has_losses_against_balanced_and_against_the_half_alone(self):
        def routing(cool, hot, **more):
            return {"step": both(cool, hot), "fullest": 1.25, "empty": 0, **more}
        text = gpu_report.skew_table([{"shape": "made-up", "sizes": (1000, 1000, 1000, 4, 1),
                                       "run": "r1", "ceiling": both(700, 600),
                                       "routings": {"balanced": routing(10, 20),
                                                    "zipf 1.0": routing(11, 21),
                                                    "2 of 4 empty": routing(9, 20, beside="alone"),
                                                    "alone": routing(8, 16)}}])
        self.assert_aligned(text)
        self.assertEqual(cells(text, "balanced", "made-up")[-3:], ["700 / 600", "", ""])
        self.assertEqual(cells(text, "zipf 1.0")[-2:], ["+10.0% / +5.0%", ""])
        self.assertEqual(cells(text, "2 of 4 empty")[-2:], ["-10.0% / +0.0%", "+12.5% / +25.0%"])

    def test_small_has_the_excess_over_the_floor(self):
        def batch(tokens, **layers):
            return {"tokens": tokens, "busy_experts": 7.75, "bound": "memory",
                    "floor": both(30, 33), "layers": layers}
        text = gpu_report.small_table([
            {"shape": "made-up", "run": "r1", "bandwidth": both(4000, 3900),
             "ceiling": both(790, 680),
             "batches": [batch(1, **{"switchyard": both(40, 44.5), "torch, graph": both(80, 90),
                                     "torch, gathered": both(70, 73)}),
                         batch(64, **{"switchyard": both(50, 55)})]}])
        self.assert_aligned(text)
        self.assertIn("made-up; r1: reads at 4000 / 3900 GB/s, dense GEMM 790 / 680 TF", text)
        self.assertEqual(cells(text, "1"),
                         ["made-up", "r1", "1", "7.75", "30.0 / 33.0", "memory", "40.0 / 44.5",
                          "10.0 / 11.5", "80.0 / 90.0", "50.0 / 57.0", "70.0 / 73.0",
                          "40.0 / 40.0"])
        self.assertEqual(cells(text, "64")[-4:], ["-"] * 4)


class Merging(unittest.TestCase):
    def runs(self):
        return [made_run("r0101-1200", [compared(["switchyard"], shape="one")]),
                made_run("r0102-1300", [compared(["torch.compile", "switchyard"], shape="two",
                                                 run="r0102-1300-2")])]

    def test_rows_name_their_runs_and_runs_are_described(self):
        with tempfile.TemporaryDirectory() as folder:
            paths = [pathlib.Path(folder, f"{run['run']}.json") for run in self.runs()]
            for path, run in zip(paths, self.runs(), strict=True):
                path.write_text(json.dumps(run), encoding="utf-8")
            done = subprocess.run([sys.executable, "-B", BENCH / "gpu_report.py", *paths],
                                  stdout=subprocess.PIPE, check=True, text=True)
            svg = pathlib.Path(folder, "chart.svg")
            subprocess.run([sys.executable, "-B", BENCH / "gpu_chart.py", *paths, svg], check=True)
            self.assertIn("two", svg.read_text(encoding="utf-8"))
        text = done.stdout
        self.assertTrue(text.startswith("r0101-1200: 2026-01-01, A & B, torch 2.0; "), text)
        self.assertIn("\nr0102-1300: ", text)
        self.assertEqual(cells(text, "one 1000,1000,1000,4,1")[1], "r0101-1200-1")
        self.assertEqual(cells(text, "two 1000,1000,1000,4,1", "switchyard")[1], "r0102-1300-2")
        memory = gpu_report.memory_table(gpu_report.merged(self.runs())["compare"])
        self.assertEqual(cells(memory, "shape")[2:4], ["switchyard", "torch.compile"])
        self.assertEqual(cells(memory, "one")[2:4], ["3", "-"])

    def test_bits_are_counted_by_routing(self):
        text = gpu_report.bits_table([{"shape": "odd", "run": "r1-1", "sizes": (9, 8, 8, 4, 2),
                                       "routings": {"balanced": {"steps": 22, "numbers": 123456},
                                                    "zipf 1.0": {"steps": 21, "numbers": 9}}}])
        self.assertEqual(cells(text, "balanced")[:5],
                         ["odd 9,8,8,4,2", "r1-1", "balanced", "22", "1.23e+05"])
        self.assertEqual(cells(text, "zipf 1.0")[3], "21")

    def test_parts_that_were_not_run_are_left_out(self):
        text = gpu_report.report(self.runs())
        self.assertNotIn("Forward in graphs", text)
        self.assertNotIn("routing |", text)

    def test_without_files_usage_is_printed(self):
        done = subprocess.run([sys.executable, "-B", BENCH / "gpu_report.py"],
                              stderr=subprocess.PIPE, check=False, text=True)
        self.assertEqual(done.returncode, 1)
        self.assertIn("gpu_report.py RESULTS.json", done.stderr)


class Chart(unittest.TestCase):
    def test_bars_are_as_long_as_rates_and_lines_are_the_limits(self):
        run = made_run("r1", [compared(["torch", "switchyard"])])
        svg = ElementTree.fromstring(gpu_chart.chart([run]))
        within = "{http://www.w3.org/2000/svg}"
        widths = [float(rect.get("width")) for rect in svg.findall(within + "rect")]
        lines = {line.get("class"): float(line.get("x1")) - gpu_chart.LEFT
                 for line in svg.findall(within + "line")}
        rates = [6, 4.5, 18, 12]  # 18 GFLOP in those times
        for width, rate in zip(widths, rates, strict=True):
            self.assertAlmostEqual(width / lines["dense"], rate / 36, places=3)
        self.assertAlmostEqual(lines["floor"] / lines["dense"], 1, places=3)
        words = [text.text for text in svg.findall(within + "text")]
        self.assertIn("switchyard 18 / 12", words)
        self.assertIn("A & B, bf16, torch 2.0, 2026-01-01", words)

    def test_every_shape_has_its_place(self):
        results = [compared(["torch.compile", "switchyard"], shape=name)
                   for name in gpu_shapes.SHAPES]
        svg = ElementTree.fromstring(gpu_chart.chart([made_run("r1", results)]))
        texts = svg.findall("{http://www.w3.org/2000/svg}text")
        places = [float(text.get("y")) for text in texts if text.text in gpu_shapes.SHAPES]
        self.assertEqual(len(places), len(gpu_shapes.SHAPES))
        self.assertEqual(places, sorted(set(places)))
        self.assertLess(places[-1], float(svg.get("height")))


class FakeBuild:
    """Answers like a child of gpu_alternate.py, and notes when it was asked."""

    def __init__(self, name, answers, log):
        self.name, self.answers, self.log = name, iter(["ready", *answers]), log

    def ask(self):
        self.log.append(self.name)

    def answer(self):
        return next(self.answers)


class Alternation(unittest.TestCase):
    def test_builds_take_turns_and_medians_are_compared(self):
        log = []
        builds = {"old": FakeBuild("old", [both(2, 4), both(9, 9), both(1, 3)], log),
                  "new": FakeBuild("new", [both(1, 3), both(1, 3), both(1, 3)], log)}
        medians = gpu_alternate.alternate(builds, turns=3)
        self.assertEqual(log, ["old", "new"] * 4)
        self.assertEqual(medians, {"old": both(2, 4), "new": both(1, 3)})
        self.assertEqual(cells(gpu_alternate.ratio_table({"odd": medians}), "odd"),
                         ["odd", "2.0000 / 4.0000", "1.0000 / 3.0000", "0.5000 / 0.7500"])

    def test_all_shapes_are_timed_unless_some_are_named(self):
        options = gpu_alternate.parse_options(["a.so", "b.so"])
        self.assertEqual(options.shapes, list(gpu_shapes.SHAPES))
        options = gpu_alternate.parse_options(["a.so", "b.so", "--shapes", "odd,8x8x8x2x1"])
        self.assertEqual(options.shapes, ["odd", "8x8x8x2x1"])
        with contextlib.redirect_stderr(io.StringIO()) as said, self.assertRaises(SystemExit):
            gpu_alternate.parse_options(["a.so", "b.so", "--forward"])
        self.assertIn("--shapes must name such shapes", said.getvalue())

    def test_a_child_gets_the_options_of_its_parent(self):
        arguments = ["a.so", "b.so", "--forward", "--shapes", "odd,8x8x8x2x1", "--turns", "5"]
        options = gpu_alternate.parse_options(arguments)
        with mock.patch("subprocess.Popen") as started:
            gpu_alternate.Build("a.so", options)
        child = gpu_alternate.parse_options(started.call_args.args[0][2:])
        self.assertTrue(child.child)
        self.assertEqual((child.forward, child.shapes, child.turns),
                         (True, ["odd", "8x8x8x2x1"], 5))

    def test_a_child_times_what_its_parent_asks_for(self):
        """With stand-ins for torch and the layers, which need a GPU."""
        for arguments, wanted in [([], "steps_of"), (["--forward"], "forwards_of")]:
            with self.subTest(wanted), contextlib.ExitStack() as stack:
                asked = []

                @contextlib.contextmanager
                def timed_work(name, library, _options):
                    asked.append((name, library))
                    yield lambda: both(1, 2)

                stack.enter_context(mock.patch.dict(sys.modules, {
                    "torch": mock.Mock(), "gpu_layers": mock.Mock(load_library=str.upper)}))
                stack.enter_context(mock.patch.object(gpu_alternate, "require_own_library"))
                stack.enter_context(mock.patch.object(gpu_alternate, wanted, timed_work))
                stack.enter_context(mock.patch.object(sys, "stdin", io.StringIO("\n" * 6)))
                out = stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
                gpu_alternate.serve("a/b.so", gpu_alternate.parse_options(
                    ["", "", "--shapes", "odd,olmoe", "--turns", "2", *arguments]))
                self.assertEqual(asked, [("odd", "A/B.SO"), ("olmoe", "A/B.SO")])
                answers = [json.loads(line) for line in out.getvalue().splitlines()]
                self.assertEqual(answers, ["ready", both(1, 2), both(1, 2)] * 2)


class Sources(unittest.TestCase):
    def test_every_script_compiles(self):
        scripts = sorted(BENCH.glob("*.py"))
        self.assertTrue(scripts)
        for script in scripts:
            compile(script.read_text(encoding="utf-8"), str(script), "exec")


if __name__ == "__main__":
    unittest.main()
