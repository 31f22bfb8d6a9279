/* Several runs: curves over one another, the keys that differ, the figures side by side. */

const COMPARED = [
  ['train/reward', 'Reward', 'mean of the samples trained', figure],
  ['eval/reward', 'Evaluation', 'mean reward', figure],
  ['rollout/response_tokens_mean', 'Response length', 'tokens', figure],
  ['off_policy/staleness_mean', 'Staleness', 'versions behind, mean', figure],
  ['throughput/samples_per_s', 'Speed', 'samples trained per second', figure],
  ['time/step_s', 'Step', 'seconds of a step', seconds],
];

function drawComparison(runs) {
  $('comparison').hidden = runs.length < 2;
  if (runs.length < 2) return;
  const overlays = $('overlays');
  overlays.replaceChildren();
  for (const [name, title, note, format] of COMPARED) {
    const series = runs.map((run, i) => {
      const isScore = name === 'eval/reward', values = (isScore ? run.scores : run.curves)[name];
      return values && {
        label: labelOf(run, runs), color: COLORS[i % COLORS.length], dash: i >= COLORS.length ? [6, 4] : undefined,
        x: isScore ? run.scores_x : run.x, values: gaps(values), smooth: !isScore, points: isScore, format,
      };
    }).filter(Boolean);
    if (series.length) chart(overlays, { title, note, x: series[0].x, series, format });
  }
  $('differences').replaceChildren(
    el('h3', {}, 'Results'), sideBySide(runs, summaryKeys(runs), (run, key) => new Map(run.summary).get(key) ?? '–'),
    el('h3', {}, 'Keys of the recipes that differ'), differing(runs));
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
