/* The list of runs, asked for every few seconds; the run that started last is at the top. */

const ticked = new Set();   // names, in the order of the ticks
const OUTCOMES = { finished: 'good', failed: 'bad', stopped: 'warn', running: 'live', lost: 'bad' };
const HEAD = ['', 'run', 'outcome', '#step', '#reward', '', '#evaluation', '#started', '#duration'];

async function listRuns() {
  const answer = await fetch('runs').catch(() => null);
  connected(Boolean(answer?.ok));
  if (answer?.ok) drawRuns(await answer.json());
  document.body.dataset.ready = '1';
}

function drawRuns(runs) {
  const names = new Set(runs.map(run => run.name)), focused = document.activeElement?.dataset?.run;
  for (const name of ticked) if (!names.has(name)) ticked.delete(name);
  $('count').textContent = `${runs.length} in this directory, the newest first`;
  $('list').replaceChildren(el('div', { class: 'scroll' }, table(HEAD, runs.map(runRow), { class: 'runs' })));
  for (const box of document.querySelectorAll('#list input')) if (box.dataset.run === focused) box.focus();
  showTicked();
}

function runRow(run) {
  const cell = (label, attributes, ...children) => el('td', { 'data-label': label, ...attributes }, ...children);
  const steps = run.steps == null ? '–' : `${figure(run.steps)}${run.steps_asked == null ? '' : ` of ${figure(run.steps_asked)}`}`;
  return el('tr', {},
    cell('', { class: 'tick' }, el('input', { type: 'checkbox', 'data-run': run.name, 'aria-label': `Compare ${run.name}`, checked: ticked.has(run.name), onchange: tick })),
    cell('run', { class: 'wrap' }, el('a', { href: `run/${encodeURIComponent(run.name)}` }, run.name)),
    cell('outcome', { class: 'wrap outcome' }, el('span', { class: `pill ${OUTCOMES[run.outcome]}` }, run.outcome),
      run.reason ? el('span', { class: run.outcome === 'failed' ? 'reason error' : 'reason dim' }, run.reason) : ''),
    cell('step', { class: 'number' }, steps),
    cell('reward', { class: 'number' }, figure(run.reward)),
    cell('', { class: 'spark' }, sparkline(run.rewards)),
    cell('evaluation', { class: 'number' }, figure(run.score), run.score_name ? el('span', { class: 'dim' }, ` ${run.score_name}`) : ''),
    cell('started', { class: 'number' }, moment(run.began_unix_s)),
    cell('duration', { class: 'number' }, seconds(run.duration_s)));
}

function tick({ target }) {
  if (target.checked) ticked.add(target.dataset.run);
  else ticked.delete(target.dataset.run);
  while (ticked.size > 2) {   // the last two ticks count
    const [oldest] = ticked;
    ticked.delete(oldest);
    for (const box of document.querySelectorAll('#list input')) if (box.dataset.run === oldest) box.checked = false;
  }
  showTicked();
}

function showTicked() {
  $('compare').disabled = ticked.size !== 2;
  $('ticked').textContent = ticked.size ? [...ticked].join(' and ') : 'tick two runs to compare them';
}

/* 2026-11-30 16:05, in the reader's time. */
function moment(unix) {
  if (!unix) return '–';
  const date = new Date(unix * 1000), two = n => String(n).padStart(2, '0');
  return `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())} ${two(date.getHours())}:${two(date.getMinutes())}`;
}

function sparkline(values) {
  const known = values.filter(isNumber);
  if (known.length < 2) return '';
  const low = Math.min(...known), high = Math.max(...known), width = 96, height = 22;
  const at = (value, i) => `${(i / (values.length - 1) * (width - 2) + 1).toFixed(1)},${(height - 2 - (high > low ? (value - low) / (high - low) : 0.5) * (height - 4)).toFixed(1)}`;
  const points = values.map((value, i) => isNumber(value) ? at(value, i) : null).filter(Boolean).join(' ');
  const make = (tag, attributes) => {
    const node = document.createElementNS('http://www.w3.org/2000/svg', tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    return node;
  };
  const svg = make('svg', { width, height, viewBox: `0 0 ${width} ${height}`, role: 'img',
    'aria-label': `reward from ${figure(known[0])} to ${figure(known.at(-1))}` });
  svg.append(make('polyline', { points }));
  return svg;
}

async function keepListing() {
  await listRuns();
  setTimeout(keepListing, 5000);
}

$('compare').addEventListener('click', () => {
  location.assign(`compare/${[...ticked].map(encodeURIComponent).join('/')}`);
});
keepListing();
