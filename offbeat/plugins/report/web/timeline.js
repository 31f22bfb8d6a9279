/* Lanes and attributed time share one time axis: what was up when, and what the time went to. */

const GUTTER = 96, RIGHT = 10, LANE = 16, LANE_GAP = 8, AXIS = 22, STACK = 120;
const TIME_COLORS = {
  compute: '--c0', calls: '--c5', controller: '--c3', waiting_groups: '--c4', waiting_gate: '--c8',
  waiting_weights: '--c9', sync: '--c1', checkpoint: '--c2', episodes: '--c2', evaluation: '--c3',
  starting: '--c6', incident: '--bad', other: '--c7',
};
const TIME_LABELS = {
  compute: 'computes', calls: 'calls in transit', controller: 'controller', waiting_groups: 'waits for groups',
  waiting_gate: 'nothing may be admitted', waiting_weights: 'waits for weights', sync: 'weight sync',
  checkpoint: 'checkpoint', episodes: 'environment and reward', evaluation: 'evaluation', starting: 'starting',
  incident: 'incident', other: 'unattributed',
};

/* A canvas as wide as its parent, drawn again when that changes; `draw(context, width)` paints it. */
function canvas(parent, height, label, draw) {
  const node = el('canvas', { role: 'img', 'aria-label': label });
  parent.append(node);
  const paint = () => {
    const width = parent.clientWidth, ratio = devicePixelRatio || 1;
    if (!node.isConnected) redraws.delete(paint);   // it was replaced by a later draw
    if (!width || !node.isConnected) return;
    node.width = width * ratio; node.height = height * ratio;
    node.style.width = `${width}px`; node.style.height = `${height}px`;
    const context = node.getContext('2d');
    context.scale(ratio, ratio);
    context.font = '11px system-ui, sans-serif';
    context.textBaseline = 'middle';
    draw(context, width);
  };
  redraws.add(paint);
  return { node, paint };
}

const TIME_STEPS = [0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 43200, 86400, 172800, 604800];

function timeAxis(context, width, end, y) {
  context.fillStyle = cssValue('--dim');
  const inner = width - GUTTER - RIGHT, most = Math.max(2, Math.floor(inner / 90));
  const step = TIME_STEPS.find(each => end / each <= most) || end / most || 1;
  context.textAlign = 'center';
  for (let at = 0; at <= end * 1.0001; at += step) {
    const x = GUTTER + (end ? inner * at / end : 0);
    context.textAlign = at === 0 ? 'left' : x > width - RIGHT - 24 ? 'right' : 'center';
    context.fillText(at === 0 ? '0 s' : end < 120 ? `${figure(at)} s` : clock(at), x, y);
  }
  context.textAlign = 'left';
}

function drawLanes(run) {
  const { lanes, incidents, end_s: end } = run, parent = $('lanes');
  parent.replaceChildren();
  const height = lanes.length * (LANE + LANE_GAP) + AXIS;
  const label = `Time line of ${lanes.map(lane => lane.name).join(', ')}. The incidents are in the table below.`;
  canvas(parent, height, label, (context, width) => {
    const inner = width - GUTTER - RIGHT, xOf = t => GUTTER + (end ? inner * t / end : 0);
    lanes.forEach((lane, row) => {
      const y = row * (LANE + LANE_GAP), color = lane.name === 'weight sync' ? '--c1' : lane.name === 'controller' ? '--c2' : '--c0';
      context.fillStyle = cssValue('--dim');
      context.fillText(clipped(context, lane.name, GUTTER - 10), 0, y + LANE / 2);
      context.fillStyle = cssValue('--track');
      context.fillRect(GUTTER, y, inner, LANE);
      shade(context, lane.busy, GUTTER, y, inner, LANE, cssValue(color));
      for (const [from, to] of lane.down) hatched(context, xOf(from), y, Math.max(2, xOf(to) - xOf(from)), LANE);
    });
    context.fillStyle = cssValue('--bad');
    for (const incident of incidents) {
      if (incident.what === 'quiet') continue;
      const x = xOf(incident.at_s);
      context.fillRect(Math.round(x), 0, 1, height - AXIS);
    }
    timeAxis(context, width, end, height - AXIS / 2 + 2);
  });
  parent.append(el('ul', { class: 'legend' },
    key('--c2', 'controller up'), key('--c0', 'trainer in a step, engine with groups'), key('--c1', 'release until the last engine serves it'),
    el('li', {}, el('span', { class: 'swatch gone' }), 'gone, until it was back'), key('--bad', 'incident', 'line'),
    el('li', { class: 'dim' }, 'fainter: a smaller share of the time')));
  drawIncidents(run);
}

const key = (color, text, kind = 'box') => {
  const swatch = el('span', { class: `swatch ${kind}` });
  swatch.style.setProperty('--swatch', `var(${color})`);
  return el('li', {}, swatch, text);
};

function clipped(context, text, width) {
  if (context.measureText(text).width <= width) return text;
  while (text && context.measureText(`${text}…`).width > width) text = text.slice(0, -1);
  return `${text}…`;
}

/* A share of the time in each interval, as opacity. */
function shade(context, shares, left, top, width, height, color) {
  context.save();
  context.fillStyle = color;
  // Pixel by pixel: intervals that share a pixel would show as stripes.
  for (let x = 0; x < width; x += 1) {
    const share = shares[Math.min(shares.length - 1, Math.floor(x / width * shares.length))];
    if (!share) continue;
    context.globalAlpha = 0.15 + 0.85 * share / 255;
    context.fillRect(Math.round(left) + x, top, 1, height);
  }
  context.restore();
}

/* Gone is a pattern as well as a colour. */
function hatched(context, x, y, width, height) {
  context.save();
  context.beginPath(); context.rect(x, y, width, height); context.clip();
  context.fillStyle = cssValue('--panel'); context.fillRect(x, y, width, height);
  context.strokeStyle = cssValue('--bad'); context.lineWidth = 1.5;
  for (let at = x - height; at < x + width; at += 5) {
    context.beginPath(); context.moveTo(at, y + height); context.lineTo(at + height, y); context.stroke();
  }
  context.strokeRect(x + 0.5, y + 0.5, width - 1, height - 1);
  context.restore();
}

function drawIncidents(run) {
  const rows = run.incidents.map(each => el('tr', {},
    el('td', { class: 'number', 'data-label': 'at' }, seconds(each.at_s)),
    el('td', { class: 'number', 'data-label': 'step' }, figure(each.step)),
    el('td', { 'data-label': 'what' }, each.what),
    el('td', { 'data-label': 'who' }, each.who),
    el('td', { class: 'wrap', 'data-label': 'detail' }, each.detail),
    el('td', { class: 'number', 'data-label': 'until it was back' }, backAfter(each))));
  const parent = $('incidents');
  parent.replaceChildren();
  if (!rows.length) {
    parent.append(el('p', { class: 'dim' }, `No incident, and no pause without a record of more than ${seconds(run.quiet_after_s)}.`));
    return;
  }
  const more = run.incidents_left_out ? ` ${figure(run.incidents_left_out)} more are not listed.` : '';
  parent.append(
    el('div', { class: 'scroll tall' }, table(['#at', '#step', 'what', 'who', 'detail', '#until it was back'], rows, { class: 'cardlike' })),
    el('p', { class: 'dim small' }, `quiet: no record of any kind for more than ${seconds(run.quiet_after_s)}.${more}`));
}

function backAfter(incident) {
  if (incident.back_s != null) return seconds(incident.back_s - incident.at_s);
  return incident.is_down ? 'not yet' : '';
}

function drawAttribution(run) {
  const parent = $('attribution');
  parent.replaceChildren();
  stack(parent, 'Trainer', 'share of the time, all ranks as one', run.attribution.trainer, run.end_s);
  stack(parent, 'Engines', 'share of the time, mean over engines', run.attribution.engines, run.end_s);
}

function stack(parent, title, note, parts, end) {
  const box = el('figure', { class: 'panel' });
  parent.append(box);
  box.append(el('figcaption', {}, el('b', {}, title), el('span', { class: 'dim' }, note)));
  if (!parts.length) {
    box.append(el('p', { class: 'dim none' }, 'nothing recorded'));
    return;
  }
  const totals = parts.map(part => part.share.reduce((sum, share) => sum + share, 0) / part.share.length / 255);
  const label = `${title}: ${parts.map((part, i) => `${TIME_LABELS[part.name] || part.name} ${percent(totals[i])}`).join(', ')}`;
  const drawing = el('div', {}), legend = el('ul', { class: 'legend' });
  box.append(drawing, legend);
  const values = parts.map((part, i) => {
    const value = el('b', {}, percent(totals[i]));
    const entry = key(TIME_COLORS[part.name] || '--c7', `${TIME_LABELS[part.name] || part.name} `);
    entry.append(value);
    legend.append(entry);
    return value;
  });
  let width = 0;
  const { node } = canvas(drawing, STACK + AXIS, label, (context, w) => {
    width = w;
    const inner = w - GUTTER - RIGHT, count = parts[0].share.length, step = inner / count;
    context.fillStyle = cssValue('--track');
    context.fillRect(GUTTER, 0, inner, STACK);
    const reached = new Float32Array(count);
    for (const part of parts) {
      context.fillStyle = cssValue(TIME_COLORS[part.name] || '--c7');
      for (let i = 0; i < count; i += 1) {
        const share = Math.min(part.share[i] / 255, 1 - reached[i]);
        if (share <= 0) continue;
        const from = Math.round(i * step), to = Math.round((i + 1) * step);
        context.fillRect(GUTTER + from, STACK * (1 - reached[i] - share), to - from, STACK * share + 0.3);
        reached[i] += share;
      }
    }
    context.fillStyle = cssValue('--dim');
    context.textAlign = 'right';
    for (const share of [0, 0.5, 1]) {
      context.fillText(percent(share), GUTTER - 8, Math.min(STACK - 6, Math.max(6, STACK * (1 - share))));
    }
    context.textAlign = 'left';
    timeAxis(context, w, end, STACK + AXIS / 2 + 2);
  });
  node.addEventListener('pointermove', event => {
    const inside = (event.offsetX - GUTTER) / (width - GUTTER - RIGHT);
    if (inside < 0 || inside >= 1) return;
    const at = Math.floor(inside * parts[0].share.length);
    parts.forEach((part, i) => { values[i].textContent = percent(part.share[at] / 255); });
  });
  node.addEventListener('pointerleave', () => {
    parts.forEach((_, i) => { values[i].textContent = percent(totals[i]); });
  });
}
