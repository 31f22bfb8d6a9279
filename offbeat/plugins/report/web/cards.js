/* The top of the page: how it ended, what to do now, and the figures that decide whether to read on. */

const STATES = {
  finished: ['finished', 'good'], failed: ['failed', 'bad'], aborted: ['stopped', 'warn'],
  running: ['running', 'live'], unfinished: ['no summary', 'warn'],
};

/* Of a run that is alive: its phase, and who waits for what how long already. */
function drawNow(now) {
  $('now').hidden = !now;
  if (!now) return;
  const rows = now.waits.map(wait => el('tr', {},
    el('td', {}, wait.waiter), el('td', { class: 'wrap' }, wait.target),
    el('td', { class: 'number' }, seconds(wait.for_s)),
    el('td', { class: 'number' }, wait.deadline_s == null ? 'none' : seconds(wait.deadline_s))));
  $('waits').replaceChildren(
    el('p', {}, `step ${figure(now.step)} of ${figure(now.steps)}, ${now.phase}; groups: ${now.ready} ready, ${now.in_flight} in flight`),
    rows.length ? el('div', { class: 'scroll' }, table(['who waits', 'for what', '#already', '#at most'], rows)) : el('p', { class: 'dim' }, 'Nobody waits.'));
}

function drawHead(run, made) {
  const { verdict } = run;
  const [word, tone] = STATES[verdict.state] || [verdict.state, ''];
  $('name').textContent = run.name;
  $('state').textContent = word;
  $('state').className = `pill ${verdict.tone || tone}`;
  $('headline').textContent = verdict.headline;
  $('headline').className = verdict.state === 'failed' ? 'error' : '';
  $('advice').textContent = verdict.advice;
  $('facts').textContent = `${run.run_id} · began ${run.began}`;
  $('problems').replaceChildren(...run.problems.map(problem => el('li', {}, problem)));
  $('thinned').replaceChildren(...run.thinned.map(sentence => el('li', {}, sentence)));
  $('made').textContent = `offbeat report, ${made}`;
  $('cards').replaceChildren(...verdict.cards.map(card =>
    el('div', { class: `card ${card.tone}` },
      el('span', { class: 'dim' }, card.title), el('strong', {}, card.value), el('span', { class: 'dim' }, card.note))));
}
