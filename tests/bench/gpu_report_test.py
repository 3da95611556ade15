"""Tests the report of gpu_compare.py with made-up measurements."""
import pathlib
import sys
import unittest
from xml.etree import ElementTree

BENCH = pathlib.Path(__file__).resolve().parents[2] / "bench"
sys.path.insert(0, str(BENCH))
import gpu_chart  # noqa: E402
import gpu_report  # noqa: E402


def both(cool, hot):
    return {"cool": cool, "hot": hot}


def cells(text, *names):
    """Returns the cells of the one line that has these."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    found = [line for line in lines if all(name in line for name in names)]
    assert len(found) == 1, (names, text)
    return found[0]


class Arithmetic(unittest.TestCase):
    SHAPE = (1000, 100, 10, 4, 2)

    def test_flops_are_those_of_three_products_forward_and_six_backward(self):
        self.assertEqual(gpu_report.forward_flops(self.SHAPE), 6 * 1000 * 2 * 100 * 10)
        self.assertEqual(gpu_report.step_flops(self.SHAPE), 18 * 1000 * 2 * 100 * 10)
        self.assertEqual(gpu_report.tflops(2e12, both(1000, 500)), both(2, 4))

    def test_saved_bytes_are_2h_and_4ki(self):
        self.assertEqual(gpu_report.saved_bytes_wanted(gpu_report.SHAPES["qwen3-30b"]),
                         2 * 2048 + 4 * 8 * 768)

    def test_floor_is_memory_or_compute_whichever_is_longer(self):
        moved = 2 * (3 * 3 * 100 * 10 + 2 * 1000 * 100)  # three experts have rows
        floor, bound = gpu_report.forward_floor(self.SHAPE, 3, bytes_per_s=1e6, flops_per_s=1e12)
        self.assertAlmostEqual(floor, moved / 1e6 * 1e3)
        self.assertEqual(bound, "memory")
        floor, bound = gpu_report.forward_floor(self.SHAPE, 3, bytes_per_s=1e12, flops_per_s=1e6)
        self.assertAlmostEqual(floor, 12e6 / 1e6 * 1e3)
        self.assertEqual(bound, "compute")


class Tables(unittest.TestCase):
    def assert_aligned(self, text):
        tables = [part.splitlines() for part in text.split("\n\n") if part.startswith("|")]
        self.assertTrue(tables)
        for lines in tables:
            self.assertEqual(len({len(line) for line in lines}), 1, text)
            self.assertEqual(len({line.count("|") for line in lines}), 1, text)

    def compared(self, labels):
        # 18 flops · 1e9 a step, so that 1 ms is 18 TF.
        times = {"torch": (3, 4), "torch.compile": (1.5, 1.8), "torch, best": (1.2, 1.65),
                 "switchyard": (1, 1.5)}
        layers = {label: {"ceiling": both(36, 24), "forward": both(0.5, 0.6),
                          "step": both(*times[label]), "peak_bytes": 3 << 20} for label in labels}
        return [{"shape": "made-up", "sizes": (1000, 1000, 1000, 4, 1), "layers": layers,
                 "saved_activations": 6000.0, "saved_integers": 20.4, "host_syncs": 0}]

    def test_compare_has_ratios_and_shares_cool_and_hot(self):
        text = gpu_report.compare_tables(
            self.compared(["torch", "torch.compile", "torch, best", "switchyard"]))
        self.assert_aligned(text)
        self.assertEqual(cells(text, "switchyard", "made-up 1000,1000,1000,4,1")[2:],
                         ["36 / 24", "0.50 / 0.60", "1.00 / 1.50", "18 / 12", "50% / 50%",
                          "1.50x / 1.20x", "1.20x / 1.10x"])
        self.assertEqual(cells(text, "torch", "made-up 1000,1000,1000,4,1")[-2], "0.50x / 0.45x")
        self.assertEqual(cells(text, "made-up")[1:], ["3", "3", "3", "3", "6000 + 20", "6000", "0"])

    def test_compare_without_torch_compile_has_no_ratios(self):
        text = gpu_report.compare_tables(self.compared(["torch", "switchyard"]))
        self.assert_aligned(text)
        self.assertEqual(cells(text, "switchyard", "made-up 1000,1000,1000,4,1")[-2:],
                         ["-", "-"])

    def test_skew_has_losses_against_balanced_and_against_the_half_alone(self):
        def routing(cool, hot, **more):
            return {"step": both(cool, hot), "ceiling": both(700, 600), "fullest": 1.25,
                    "empty": 0, **more}
        text = gpu_report.skew_table([{"shape": "made-up", "sizes": (1000, 1000, 1000, 4, 1),
                                       "routings": {"balanced": routing(10, 20),
                                                    "zipf 1.0": routing(11, 21),
                                                    "2 of 4 empty": routing(9, 20, beside="alone"),
                                                    "alone": routing(8, 16)}}])
        self.assert_aligned(text)
        self.assertEqual(cells(text, "balanced", "made-up")[-2:], ["", ""])
        self.assertEqual(cells(text, "zipf 1.0")[-2:], ["+10.0% / +5.0%", ""])
        self.assertEqual(cells(text, "2 of 4 empty")[-2:], ["-10.0% / +0.0%", "+12.5% / +25.0%"])

    def test_small_has_shares_of_the_floor(self):
        batch = {"sizes": (64, 2048, 768, 128, 8), "busy_experts": 126, "bound": "memory",
                 "floor": both(0.3, 0.33), "eager": both(0.6, 0.66), "graph": both(0.4, 0.44),
                 "torch, graph": both(0.8, 0.9)}
        text = gpu_report.small_table({"bandwidth": both(4000, 3900), "ceiling": both(790, 680),
                                       "batches": [batch]})
        self.assert_aligned(text)
        self.assertIn("4000 / 3900 GB/s", text)
        self.assertEqual(cells(text, "64"),
                         ["64", "126", "0.300 / 0.330", "memory", "0.600 / 0.660", "50% / 50%",
                          "0.400 / 0.440", "75% / 75%", "-", "0.800 / 0.900"])


class Chart(unittest.TestCase):
    def test_bars_are_as_long_as_rates_and_the_line_is_the_dense_product(self):
        layers = {label: {"ceiling": both(900, 800), "step": both(*step)}
                  for label, step in (("torch", (90, 100)), ("switchyard", (30, 45)))}
        everything = {"gpu": "A & B", "torch": "2.0", "date": "2026-01-01",
                      "compare": [{"shape": "made-up", "sizes": (1000000, 1000, 1000, 4, 1),
                                   "layers": layers}]}
        svg = ElementTree.fromstring(gpu_chart.chart(everything))
        within = "{http://www.w3.org/2000/svg}"
        widths = [float(rect.get("width")) for rect in svg.findall(within + "rect")]
        [dense] = [line for line in svg.findall(within + "line") if line.get("class") == "dense"]
        ceiling = float(dense.get("x1")) - gpu_chart.LEFT
        rates = [200, 180, 600, 400]  # 18 TFLOP in those times
        for width, rate in zip(widths, rates, strict=True):
            self.assertAlmostEqual(width / ceiling, rate / 900, places=3)
        words = [text.text for text in svg.findall(within + "text")]
        self.assertIn("switchyard 600 / 400", words)
        self.assertIn("A & B, bf16, torch 2.0, 2026-01-01", words)


class Sources(unittest.TestCase):
    def test_every_script_compiles(self):
        scripts = sorted(BENCH.glob("*.py"))
        self.assertTrue(scripts)
        for script in scripts:
            compile(script.read_text(encoding="utf-8"), str(script), "exec")


if __name__ == "__main__":
    unittest.main()
