/* The list of runs, asked for every few seconds; the one that was written last stands first. */

async function listRuns() {
  const answer = await fetch('runs').catch(() => null);
  connected(Boolean(answer?.ok));
  if (answer?.ok) {
    const runs = await answer.json(), now = Date.now() / 1000;
    $('count').textContent = `${runs.length} in this directory`;
    $('list').replaceChildren(table(['run', 'state', '#steps', '#reward', '#last written', 'error'], runs.map(run => el('tr', {},
      el('td', {}, el('a', { href: `run/${encodeURIComponent(run.name)}` }, run.name)),
      el('td', {}, run.state === 'unfinished' ? 'no summary yet' : run.state),
      el('td', { class: 'number' }, figure(run.steps)),
      el('td', { class: 'number' }, figure(run.reward)),
      el('td', { class: 'number' }, `${seconds(Math.max(0, now - run.changed_unix_s))} ago`),
      el('td', { class: 'wrap' }, run.error)))));
  }
  document.body.dataset.ready = '1';
  setTimeout(listRuns, 5000);
}

listRuns();
