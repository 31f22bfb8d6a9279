/* The list of runs, asked for every few seconds; the one that was written last stands first. */

async function listRuns() {
  const answer = await fetch('runs').catch(() => null);
  connected(Boolean(answer?.ok));
  if (answer?.ok) {
    const runs = await answer.json(), now = Date.now() / 1000;
    $('count').textContent = `${runs.length} in this directory`;
    $('list').replaceChildren(table(['run', 'state', '#last written'], runs.map(run => el('tr', {},
      el('td', {}, el('a', { href: `run/${encodeURIComponent(run.name)}` }, run.name)),
      el('td', {}, run.has_ended ? 'ended' : 'no summary yet'),
      el('td', { class: 'number' }, `${seconds(Math.max(0, now - run.changed_unix_s))} ago`)))));
  }
  document.body.dataset.ready = '1';
  setTimeout(listRuns, 5000);
}

listRuns();
