/* Draws the page from its data, and again when the reader or the machine changes something. */

function draw(page) {
  const [run] = page.runs;
  view.page = page;
  drawHead(run, page.made);
  drawNow(run.now);
  drawComparison(page.runs);
  drawLanes(run);
  drawPanels(page.runs);
  drawSame(run.same);
  drawFailures(run.failures);
  drawAttribution(run);
  drawGroups(run);
  drawMetrics(run, page.meaning);
  $('config').replaceChildren(el('details', {}, el('summary', {}, `${Object.keys(run.config).length} keys of config.yaml`),
    el('div', { class: 'scroll' }, table(['key', 'value'], Object.entries(run.config).map(([key, value]) =>
      el('tr', {}, el('th', { scope: 'row' }, key), el('td', { class: 'wrap' }, value)))))));
  if (view.group == null) view.group = worthReading(run);
  if (view.group != null) drawStory(run, view.group);
  redrawAll();
}

/* The example that is shown first: one that something happened to, in the middle of the run. */
function worthReading(run) {
  const { columns } = run.groups, row = index => rowOf(run.groups, index), all = Object.keys(run.examples).map(Number);
  const special = all.filter(index => columns.span[row(index)] > 0 || columns.attempts[row(index)] > 1);
  const mixed = all.filter(index => columns.spread[row(index)] > 0);
  const pool = special.length ? special : mixed.length ? mixed : all;
  return pool.length ? pool[Math.floor(pool.length / 2)] : null;
}

function listen() {
  $('axis').addEventListener('change', event => { view.axis = event.target.value; redrawAll(); });
  $('smoothing').addEventListener('input', event => {
    view.smoothing = Number(event.target.value);
    $('smoothing-value').value = view.smoothing.toFixed(2);
    redrawAll();
  });
  $('whole').addEventListener('click', redrawAll);
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', redrawAll);
  // Paper is white: what the canvases hold has to be drawn in its colours.
  addEventListener('beforeprint', () => { document.documentElement.dataset.print = ''; redrawAll(); });
  addEventListener('afterprint', () => { delete document.documentElement.dataset.print; redrawAll(); });
  let width = innerWidth, later;
  addEventListener('resize', () => {
    if (innerWidth === width) return;   // on a phone the address bar comes and goes
    width = innerWidth;
    clearTimeout(later);
    later = setTimeout(redrawAll, 150);
  });
}

/* A live page: the data as it is now, and again whenever the run has written something. */
async function follow(run) {
  const refresh = async () => {
    const answer = await fetch(`${run}/data`);
    connected(true);
    if (answer.ok) draw(await unpack(await answer.text()));
    else $('problems').replaceChildren(el('li', {}, await answer.text()));
    document.body.dataset.draws = Number(document.body.dataset.draws || 0) + 1;
  };
  await refresh();
  let busy = false, again = false;
  const changed = async () => {
    again = true;
    if (busy) return;
    busy = true;
    // A run writes many times a second: one reading at a time, with a pause between two.
    while (again) {
      again = false;
      await refresh().catch(() => { connected(false); again = true; });
      await new Promise(done => setTimeout(done, 2500));
    }
    busy = false;
  };
  const events = new EventSource(`${run}/events`);
  events.addEventListener('changed', changed);
  events.addEventListener('open', () => {
    $('made').dataset.live = '1';
    if (lostAt) changed(); // what was written meanwhile
  });
  events.addEventListener('error', () => connected(false));
}

async function start() {
  const data = $('data');
  listen();
  if (data) draw(await unpack(data.textContent));
  else await follow(location.pathname);
  document.body.dataset.readyMs = performance.now().toFixed(0);
  document.body.dataset.ready = '1';
}

start();
