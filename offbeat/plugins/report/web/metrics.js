/* Every metric of the run, in sections by prefix; a chart is drawn when its section is opened. */

const openSections = new Set();   // they stay open when a live run draws again

function drawMetrics(run, meaning) {
  const names = [...Object.keys(run.curves), ...Object.keys(run.coarse), ...Object.keys(run.scores)].sort();
  const filter = el('input', { id: 'metric-filter', placeholder: 'filter, as in time/|busy', 'aria-label': 'Names that match this regular expression', size: 28 });
  const said = el('span', { class: 'dim', 'aria-live': 'polite' });
  const sections = el('div', {});
  const draw = () => {
    const keep = matcher(filter.value), shown = names.filter(name => keep(name));
    said.textContent = `${shown.length} of ${names.length} metrics`;
    const prefixes = [...new Set(shown.map(name => name.split('/')[0]))];
    sections.replaceChildren(...prefixes.map(prefix =>
      metricSection(run, meaning, prefix, shown.filter(name => name.split('/')[0] === prefix), filter.value !== '' || openSections.has(prefix))));
    redrawAll();
  };
  filter.addEventListener('input', draw);
  $('metrics').replaceChildren(el('div', { class: 'bar' }, filter, said), sections);
  draw();
}

/* What is not a regular expression yet, because it is being typed, is searched as it stands. */
function matcher(text) {
  try {
    const pattern = new RegExp(text, 'i');
    return name => pattern.test(name);
  } catch {
    return name => name.includes(text);
  }
}

function metricSection(run, meaning, prefix, names, isOpen) {
  const body = el('div', { class: 'panels' });
  const section = el('details', { open: isOpen }, el('summary', {}, el('b', {}, prefix), el('span', { class: 'dim' }, ` ${names.length}`)), body);
  const fill = () => {
    if (body.childElementCount) return;
    for (const name of names) metricChart(body, run, name, meaning[name]);
  };
  section.addEventListener('toggle', () => {
    if (!section.open) { openSections.delete(prefix); return; }
    openSections.add(prefix);
    fill();
    redrawAll();
  });
  if (isOpen) fill();
  return section;
}

function metricChart(parent, run, name, meaning) {
  const [unit, says] = meaning || ['', ''];
  const [x, values] = run.scores[name] ? [run.scores_x, run.scores[name]]
    : run.curves[name] ? [run.x, run.curves[name]] : [run.coarse_x, run.coarse[name]];
  const isScore = values === run.scores[name];
  chart(parent, {
    title: name, note: [unit && unit !== '1' ? unit : '', says].filter(Boolean).join(' · '), x, format: formatOf(unit),
    series: [{ label: name.split('/').slice(1).join('/') || name, color: '--c0', values: gaps(values), smooth: !isScore, points: isScore }],
  });
}
