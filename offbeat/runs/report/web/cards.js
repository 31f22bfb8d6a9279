/* The top of the page: how it ended, what to do now, and the figures that decide whether to read on. */

const STATES = {
  finished: ['finished', 'good'], failed: ['failed', 'bad'], aborted: ['aborted', 'warn'],
  running: ['running', 'live'], unfinished: ['no summary', 'warn'],
};

function drawHead(run, made) {
  const { verdict } = run;
  const [word, tone] = STATES[verdict.state] || [verdict.state, ''];
  $('name').textContent = run.name;
  $('state').textContent = word;
  $('state').className = `pill ${tone}`;
  $('headline').textContent = verdict.headline;
  $('headline').className = verdict.state === 'failed' ? 'error' : '';
  $('advice').textContent = verdict.advice;
  $('facts').textContent = `${run.run_id} · began ${run.began}`;
  $('problems').replaceChildren(...run.problems.map(problem => el('li', {}, problem)));
  $('made').textContent = `offbeat report, ${made}`;
  $('cards').replaceChildren(...verdict.cards.map(card =>
    el('div', { class: `card ${card.tone}` },
      el('span', { class: 'dim' }, card.title), el('strong', {}, card.value), el('span', { class: 'dim' }, card.note))));
}
