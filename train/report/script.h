// The report's script: values where the pointer is. The page is whole without it.
#pragma once

namespace switchyard::train {

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

}  // namespace switchyard::train
