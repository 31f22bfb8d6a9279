/* Several runs: the keys that differ, and the figures side by side. panels.js overlays the curves. */

/* What is of the first run alone follows what is of all runs. */
const OF_ONE = ['uptime', 'same', 'failures', 'waiting', 'samples', 'all', 'recipe'];

function drawComparison(runs) {
  const isComparison = runs.length > 1;
  for (const id of ['comparison', 'outcomes']) $(id).hidden = !isComparison;
  for (const id of ['state', 'headline', 'advice', 'facts', 'cards']) $(id).hidden = isComparison;
  if (!isComparison) return;
  $('name').textContent = runs.map(run => labelOf(run, runs)).join(' and ');
  $('keys').replaceChildren(differing(runs));
  $('results').replaceChildren(sideBySide(runs, summaryKeys(runs), (run, key) => new Map(run.summary).get(key) ?? '–'));
  const head = $('first') || el('h2', { id: 'first', class: 'first' });
  head.textContent = `Only ${labelOf(runs[0], runs)}`;
  document.querySelector('main').append(head, ...OF_ONE.map($));
}

const labelOf = (run, runs) => runs.some(other => other !== run && other.name === run.name) ? run.directory : run.name;

const summaryKeys = runs => [...new Set(runs.flatMap(run => run.summary.map(([key]) => key)))];

function sideBySide(runs, keys, value) {
  const rows = keys.map(key => el('tr', {}, el('th', { scope: 'row' }, key), runs.map(run => el('td', { class: 'wrap' }, value(run, key)))));
  return el('div', { class: 'scroll' }, table(['', ...runs.map(run => labelOf(run, runs))], rows, { class: 'fixed' }));
}

function differing(runs) {
  const keys = [...new Set(runs.flatMap(run => Object.keys(run.config)))].sort()
    .filter(key => new Set(runs.map(run => run.config[key])).size > 1);
  if (!keys.length) return el('p', { class: 'dim' }, 'none');
  return sideBySide(runs, keys, (run, key) => run.config[key] ?? '(not there)');
}
