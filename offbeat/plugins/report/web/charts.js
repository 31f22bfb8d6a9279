/* Line charts on uPlot: shared cursor and zoom, a legend that names the value under the cursor. */

const SYNC_KEY = 'run';
const HEIGHT = 168;
let charts = [];

/*
 * series: [{ label, color, values, x?, dash?, points?, smooth?, quiet?, format? }]; values have null
 * for gaps, and a quiet series is not in the legend.
 * x: { step, time, samples } columns shared by all series that name none of their own.
 */
function chart(parent, { title, note = '', x, series, range, format = figure, marks = [] }) {
  const shown = series.filter(each => each && each.values.some(value => value != null));
  const box = el('figure', { class: 'panel' });
  const legend = el('ul', { class: 'legend' });
  const host = el('div', { class: 'chart', role: 'img' });
  box.append(el('figcaption', {}, el('b', {}, title), el('span', { class: 'dim' }, note)));
  parent.append(box);
  if (!shown.length) {
    box.append(el('p', { class: 'dim none' }, 'nothing recorded'));
    return;
  }
  box.append(host, legend);
  const values = shown.map(each => legendEntry(legend, each));
  host.setAttribute('aria-label', `${title}. ${note}. `
    + shown.map(each => `${each.label}: last ${(each.format || format)(lastOf(each.values))}`).join(', '));
  const known = { host, box, plot: null };
  known.draw = () => {
    known.plot?.destroy();
    known.plot = plotted(host, { x, shown, range, format, marks, values });
  };
  charts.push(known);
}

function legendEntry(legend, { label, color, dash, points, quiet }) {
  if (quiet) return null;
  const value = el('b', {});
  const swatch = el('span', { class: `swatch ${points ? 'dot' : dash ? 'dashed' : 'line'}` });
  swatch.style.setProperty('--swatch', `var(${color})`);
  legend.append(el('li', {}, swatch, `${label} `, value));
  return value;
}

function plotted(host, { x, shown, range, format, marks, values }) {
  const axis = AXES[view.axis];
  const lines = [];      // what uPlot draws
  const tables = [];
  for (const each of shown) {
    const xs = Array.from((each.x || x)[view.axis]);
    if (each.smooth) {
      lines.push({ color: each.color, alpha: 0.28, width: 1 });
      tables.push([xs, each.values]);
    }
    lines.push({ ...each, alpha: each.quiet ? 0.7 : 1, width: each.width || 1.75 });
    tables.push([xs, each.smooth ? smoothed(each.values, view.smoothing) : each.values]);
  }
  const data = aligned(tables);
  const grid = { stroke: cssValue('--grid'), width: 1 };
  const ax = { stroke: cssValue('--dim'), grid, ticks: { ...grid, size: 4 }, font: '11px system-ui, sans-serif' };
  const short = (_, ticks) => ticks.map(tick => format(tick).replace(/ (?=%)/, ''));
  const tell = plot => tellValues(plot, shown, values, format);
  return new uPlot({
    width: host.clientWidth || 360, height: HEIGHT, legend: { show: false },
    cursor: { sync: { key: SYNC_KEY, scales: ['x', null] }, drag: { x: true, y: false, uni: 20 }, points: { size: 5 } },
    scales: { x: { time: false }, y: { range: range || undefined } },
    axes: [
      { ...ax, space: 70, size: 30, values: (_, ticks) => ticks.map(tick => view.axis === 'time' ? seconds(tick) : compact(tick)) },
      { ...ax, size: 58, values: short },
    ],
    series: [{ label: axis.label }, ...lines.map(line => ({
      stroke: withAlpha(cssValue(line.color), line.alpha), width: line.width, dash: line.dash, spanGaps: true,
      paths: line.points ? () => null : undefined,
      points: { show: Boolean(line.points) || undefined, size: 6, fill: cssValue(line.color) },
    }))],
    hooks: { draw: [plot => drawMarks(plot, marks)], setCursor: [tell], ready: [tell] },
  }, data, host);
}

/* Series of different runs have different x: one table with a row per x, gaps where a series has none. */
function aligned(tables) {
  const [first] = tables;
  if (tables.every(([xs]) => xs === first[0] || same(xs, first[0]))) {
    return [first[0], ...tables.map(([, ys]) => ys)];
  }
  return uPlot.join(tables.map(([xs, ys]) => [xs, ys]));
}
const same = (a, b) => a.length === b.length && a.every((value, i) => value === b[i]);

function compact(value) {
  if (Math.abs(value) >= 1e6) return `${figure(value / 1e6)} M`;
  return Math.abs(value) >= 1e4 ? `${figure(value / 1e3)} k` : figure(value);
}

/* Under the cursor, or else the last: the legend always names a value. */
function tellValues(plot, shown, values, format) {
  const at = plot.cursor.idx;
  let line = 0;
  shown.forEach((each, i) => {
    line += each.smooth ? 2 : 1;
    const ys = plot.data[line];
    const found = at == null ? lastOf(ys) : nearest(ys, at);
    const isMean = each.smooth && view.smoothing > 0;
    if (values[i]) values[i].textContent = (each.format || format)(found) + (isMean ? ' smoothed' : '');
  });
}

function nearest(values, at) {
  for (let i = at; i >= 0; i -= 1) if (values[i] != null) return values[i];
  return null;
}

function drawMarks(plot, marks) {
  if (!marks.length) return;
  const { ctx, bbox } = plot;
  ctx.save();
  ctx.strokeStyle = cssValue('--bad');
  ctx.globalAlpha = 0.5;
  ctx.setLineDash([3, 4]);
  for (const mark of marks) {
    const at = mark[view.axis];
    if (at == null) continue;
    const x = Math.round(plot.valToPos(at, 'x', true)) + 0.5;
    if (x < bbox.left || x > bbox.left + bbox.width) continue;
    ctx.beginPath(); ctx.moveTo(x, bbox.top); ctx.lineTo(x, bbox.top + bbox.height); ctx.stroke();
  }
  ctx.restore();
}

function withAlpha(color, alpha) {
  if (alpha === 1 || !color.startsWith('#')) return color;
  return color + Math.round(alpha * 255).toString(16).padStart(2, '0');
}

redraws.add(() => {
  charts = charts.filter(each => each.box.isConnected);
  for (const each of charts) if (each.host.clientWidth) each.draw();
});
