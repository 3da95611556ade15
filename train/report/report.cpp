// SPDX-License-Identifier: Apache-2.0
#include "report/report.h"

#include <fmt/format.h>

#include "report/sections.h"
#include "report/text.h"

namespace switchyard::train {
namespace {

// Makes the browser block the page from loading anything external.
constexpr const char* kPolicy =
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:";

constexpr const char* kStyle = R"css(
:root { color-scheme: light dark;
  --page: #f4f5f7; --card: #ffffff; --ink: #1a2230; --soft: #566273; --line: #e2e6eb;
  --faint: #eef0f3; --blue: #2468b8; --pale: #a9c6e8; --orange: #cf5a12; --green: #1b7a4b;
  --red: #b3372b; --mark: #fff3d6; --bar: #4079b8; }
@media (prefers-color-scheme: dark) { :root {
  --page: #0e1217; --card: #161b22; --ink: #e4e9f0; --soft: #98a4b3; --line: #2a323c;
  --faint: #1f262f; --blue: #6cb2ff; --pale: #35557a; --orange: #ff9a52; --green: #5fcf95;
  --red: #ff8577; --mark: #3a3018; --bar: #4b87c9; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); line-height: 1.5;
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif;
  font-variant-numeric: tabular-nums; -webkit-text-size-adjust: 100%; }
main { max-width: 1080px; margin: 0 auto; padding: 40px 24px 32px; }
h1 { font-size: 28px; line-height: 1.2; letter-spacing: -0.015em; margin: 0; font-weight: 650; }
header p.bad { color: var(--red); font-weight: 600; }
header p { margin: 6px 0 0; color: var(--soft); font-size: 16px; overflow-wrap: anywhere; }
h2 { font-size: 17px; line-height: 1.3; margin: 0 0 4px; font-weight: 650; }
h3 { font-size: 14px; margin: 0 0 10px; font-weight: 600; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 22px 24px 24px; margin-top: 18px; }
.note { color: var(--soft); margin: 0 0 14px; font-size: 14px; max-width: 76ch; }
.note:last-child { margin: 14px 0 0; }
.note b { color: var(--ink); font-weight: 600; }
.tiles { display: grid; grid-template-columns: repeat(3, 1fr); gap: 1px; margin-top: 24px;
  background: var(--line); border: 1px solid var(--line); border-radius: 10px; overflow: hidden; }
.tile { background: var(--card); padding: 16px 20px 15px; min-width: 0; }
.tile dt { color: var(--soft); font-size: 13px; }
.tile dd { margin: 0; }
.tile .value { font-size: 27px; line-height: 1.3; font-weight: 600; letter-spacing: -0.01em;
  white-space: nowrap; }
.tile .about { color: var(--soft); font-size: 13px; }
.good { color: var(--green); } .bad, .note .bad { color: var(--red); }

.legend { display: flex; flex-wrap: wrap; gap: 4px 20px; margin: 0 0 14px; font-size: 13px;
  color: var(--soft); }
.legend i { display: inline-block; width: 20px; height: 0; border-top: 3px solid; margin-right: 7px;
  vertical-align: middle; border-radius: 2px; }
.legend i.raw { border-color: var(--pale); } .legend i.mean { border-color: var(--blue); }
.legend i.held { border: 0; width: 9px; height: 9px; border-radius: 50%;
  background: var(--orange); }
.chart { padding: 4px 8px 24px 46px; font-size: 12px; color: var(--soft); }
.plot { position: relative; height: 320px; }
.small .plot { height: 130px; }
.plot svg { position: absolute; inset: 0; width: 100%; height: 100%; overflow: visible; }
.plot path { fill: none; vector-effect: non-scaling-stroke; stroke-linejoin: round;
  stroke-linecap: round; }
.grid { stroke: var(--line); stroke-width: 1; shape-rendering: crispEdges; }
.level { stroke: var(--soft); stroke-width: 1.5; stroke-dasharray: 6 5; }
path.raw { stroke: var(--pale); stroke-width: 1.2; }
path.mean { stroke: var(--blue); stroke-width: 2.2; }
path.held { stroke: var(--orange); stroke-width: 1.6; }
.plot path.dots { stroke-width: 7.5; }
.plot > span { position: absolute; line-height: 1; white-space: nowrap; }
.plot .y { right: 100%; transform: translateY(-50%); padding-right: 9px; }
.plot .x { top: 100%; transform: translateX(-50%); padding-top: 9px; }
.plot .level-label { right: 0; transform: translateY(-100%); padding: 0 2px 5px; color: var(--ink);
  text-shadow: 0 0 3px var(--card), 0 0 3px var(--card), 0 0 5px var(--card); }
.cursor { position: absolute; top: 0; bottom: 0; width: 1px; background: var(--soft);
  opacity: 0.55; pointer-events: none; }
.tip { position: fixed; z-index: 2; pointer-events: none; background: var(--ink);
  color: var(--card); font-size: 12px; line-height: 1.45; padding: 6px 10px; border-radius: 6px;
  white-space: pre; max-width: 90vw; }
.trio { display: grid; grid-template-columns: repeat(3, 1fr); gap: 12px 24px; margin-top: 12px; }
.trio > div { min-width: 0; }

.key { display: flex; align-items: flex-start; gap: 12px; margin: 0 0 18px; font-size: 12px;
  color: var(--soft); }
.ramp { display: block; width: 240px; }
.ramp i { display: block; height: 12px; border-radius: 3px; border: 1px solid var(--line);
  background: linear-gradient(to right, rgb(46 124 214), rgb(46 124 214 / 0) 50%,
    rgb(226 96 24 / 0) 50%, rgb(226 96 24)); }
.ramp > span { display: flex; justify-content: space-between; margin-top: 3px; line-height: 1.3; }
.ramp > span > span { flex: 1; } .ramp > span > span:nth-child(2) { text-align: center; }
.ramp > span > span:last-child { text-align: right; }
.key .of { line-height: 14px; }
.strips { display: grid; grid-template-columns: repeat(2, 1fr); gap: 20px 28px; }
.strips.many { grid-template-columns: repeat(4, 1fr); gap: 16px 20px; }
.strip { margin: 0; min-width: 0; display: grid; grid-template-columns: auto 1fr; gap: 5px 7px; }
.strip figcaption { grid-column: 2; display: flex; justify-content: space-between; gap: 8px;
  align-items: baseline; font-size: 13px; line-height: 1.3; }
.strip figcaption b { font-weight: 600; white-space: nowrap; }
.strip figcaption span { color: var(--soft); font-size: 12px; text-align: right; }
.experts { display: flex; flex-direction: column; justify-content: space-between; font-size: 10px;
  line-height: 1; color: var(--soft); text-align: right; min-width: 1.9em; padding: 2px 0; }
.cells { border: 1px solid var(--line); border-radius: 3px; overflow: hidden; }
.cells img { display: block; width: 100%; image-rendering: pixelated; }

.bars { width: 100%; border-collapse: collapse; font-size: 14px; margin-top: 8px; }
.bars th, .bars td { padding: 6px 0; font-weight: 400; text-align: left; line-height: 1.35; }
.bars thead th { color: var(--soft); font-size: 12px; padding-bottom: 4px; }
.bars tbody tr { border-top: 1px solid var(--faint); }
.bars tbody th { padding-right: 20px; min-width: 180px; overflow-wrap: anywhere; }
.bars td:nth-child(2) { width: 100%; }
.bars i { display: block; height: 12px; min-width: 2px; border-radius: 2px;
  background: var(--bar); }
.bars th:nth-child(n+3), .bars td:nth-child(n+3) { text-align: right; white-space: nowrap;
  padding-left: 26px; min-width: 92px; }
pre { margin: 12px 0 0; padding: 16px 18px; background: var(--faint); border-radius: 8px;
  white-space: pre-wrap; overflow-wrap: anywhere; tab-size: 4; unicode-bidi: isolate;
  font: 13px/1.55 ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
pre b { background: var(--mark); font-weight: 600; border-radius: 3px; padding: 1px 0; }
.settings { columns: 3; column-gap: 36px; margin: 10px 0 0; font-size: 14px; }
.settings div { display: flex; justify-content: space-between; gap: 14px; padding: 5px 0;
  border-top: 1px solid var(--faint); break-inside: avoid; }
.settings dt { color: var(--soft); }
.settings dd { margin: 0; text-align: right; overflow-wrap: anywhere; min-width: 0; }
.origin { display: grid; grid-template-columns: max-content 1fr; gap: 5px 20px; margin: 10px 0 0;
  font-size: 14px; }
.origin dt { color: var(--soft); }
.origin dd { margin: 0; overflow-wrap: anywhere; min-width: 0; }
footer { color: var(--soft); font-size: 13px; margin: 18px 2px 0; }
@media (max-width: 860px) {
  .strips.many { grid-template-columns: repeat(2, 1fr); } .settings { columns: 2; }
  .trio { grid-template-columns: 1fr; } }
@media (max-width: 560px) {
  main { padding: 24px 12px; } section { padding: 18px 16px 20px; }
  h1 { font-size: 24px; } .tiles { grid-template-columns: repeat(2, 1fr); }
  .tile { padding: 12px 14px; } .tile .value { font-size: 22px; } .plot { height: 250px; }
  .chart { padding-left: 40px; } .strips { grid-template-columns: 1fr; }
  .settings { columns: 1; } .strips.many { gap: 14px 12px; } .ramp { width: 190px; }
  .bars th:nth-child(n+3), .bars td:nth-child(n+3) { padding-left: 12px;
    min-width: 0; }
  .bars tbody th { padding-right: 10px; min-width: 96px; }
  .bars td:nth-child(2) { width: 40%; } .bars td:nth-child(4) { white-space: normal; } }
@media print { body { background: none; } section { break-inside: avoid; } }
)css";

// Shows values under the pointer. The page is complete without it.
constexpr const char* kScript = R"js(
'use strict';
const tip = document.body.appendChild(document.createElement('div'));
tip.className = 'tip';
tip.hidden = true;
function show(event, text) {
  tip.textContent = text;
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = event.clientX + 14 + box.width > innerWidth ? event.clientX - 14 - box.width
                                                           : event.clientX + 14;
  tip.style.left = Math.max(4, left) + 'px';
  tip.style.top = Math.max(4, event.clientY - box.height - 10) + 'px';
}
function numbers(text) { return text ? text.split(' ').map(Number) : []; }
function follow(element, move, leave) {
  element.addEventListener('pointermove', move);
  element.addEventListener('pointerdown', move);
  element.addEventListener('pointerleave', () => { tip.hidden = true; leave(); });
}

for (const plot of document.querySelectorAll('.plot')) {
  const from = +plot.dataset.from, to = +plot.dataset.to;
  const lines = [...plot.querySelectorAll('path[data-name]')].map(path => ({
    name: path.dataset.name, steps: numbers(path.dataset.x), values: numbers(path.dataset.y) }))
    .filter(line => line.steps.length > 0);
  if (lines.length === 0) continue;
  const cursor = plot.appendChild(document.createElement('div'));
  cursor.className = 'cursor';
  cursor.hidden = true;
  function nearest(steps, step) {
    let low = 0, high = steps.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (steps[middle] <= step) low = middle; else high = middle;
    }
    return Math.abs(steps[high] - step) < Math.abs(steps[low] - step) ? high : low;
  }
  follow(plot, event => {
    const box = plot.getBoundingClientRect();
    const wanted = from + (event.clientX - box.left) / box.width * (to - from);
    const step = lines[0].steps[nearest(lines[0].steps, wanted)];
    const rows = lines.map(line => {
      const i = nearest(line.steps, step);
      const where = line.steps[i] === step ? '' : ' (step ' + line.steps[i] + ')';
      return line.name + '  ' + +line.values[i].toPrecision(4) + where;
    });
    cursor.hidden = false;
    cursor.style.left = (step - from) / (to - from) * 100 + '%';
    show(event, ['step ' + step, ...rows].join('\n'));
  }, () => { cursor.hidden = true; });
}

// The pictures are not compressed: after six bytes, each of a row's is a pixel.
for (const strips of document.querySelectorAll('.strips')) {
  const last = numbers(strips.dataset.last), strongest = +strips.dataset.strongest;
  for (const cells of strips.querySelectorAll('.cells')) {
    const image = cells.querySelector('img');
    const file = atob(image.src.slice(image.src.indexOf(',') + 1));
    const first = file.indexOf('IDAT') + 6, width = last.length;
    const rows = +cells.dataset.rows, each = +cells.dataset.each;
    follow(cells, event => {
      const box = image.getBoundingClientRect();
      const place = (at, size, count) =>
        Math.min(count - 1, Math.max(0, Math.floor(at / size * count)));
      const column = place(event.clientX - box.left, box.width, width);
      const row = place(event.clientY - box.top, box.height, rows);
      const pixel = file.charCodeAt(first + row * (width + 6) + 6 + column);
      const begin = column === 0 ? +strips.dataset.first : last[column - 1] + 1;
      const end = Math.min(+cells.dataset.experts, (row + 1) * each) - 1;
      const experts = row * each === end ? 'expert ' + end : 'experts ' + row * each + '–' + end;
      const share = pixel > 128 ? 'no picks' :
        (pixel === 0 ? '≤ ' : pixel === 128 ? '≥ ' : '') +
        Math.pow(strongest, (pixel - 64) / 64).toFixed(2) + '× of an even share';
      const steps = begin === last[column] ? 'step ' + begin : 'steps ' + begin + '–' + last[column];
      show(event, 'layer ' + cells.dataset.layer + ', ' + experts + '\n' + steps + '\n' + share);
    }, () => {});
  }
}
)js";

std::string section(const char* id, const char* title, const std::string& html) {
  if (html.empty()) return "";
  return fmt::format("<section id=\"{}\"><h2>{}</h2>\n{}</section>\n", id, title, html);
}

}  // namespace

std::string report_html(const RunSummary& run) {
  return fmt::format(
             "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n"
             "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n"
             "<meta http-equiv=\"Content-Security-Policy\" content=\"{}\">\n"
             "<link rel=\"icon\" href=\"data:,\">\n"
             "<title>Switchyard training run: {}</title>\n<style>{}</style></head>\n<body><main>\n",
             kPolicy, escaped(run.title), kStyle) +
         header_html(run) + section("loss", "Loss", loss_html(run)) +
         section("load", "Load of the experts", load_map_html(run)) +
         section("ranks", "Load and waiting by rank", ranks_html(run)) +
         section("stages", "Time by stage", stages_html(run)) +
         section("bytes", "Bytes moved", bytes_html(run)) +
         section("progress", "Over the steps", progress_html(run)) +
         section("sample", "Sample", sample_html(run)) +
         section("configuration", "Configuration", configuration_html(run)) +
         section("origin", "Origin", origin_html(run)) +
         fmt::format(
             "<footer>Written by switchyard train. This file needs nothing else.</footer>\n"
             "</main><script>{}</script></body></html>\n",
             kScript);
}

}  // namespace switchyard::train
