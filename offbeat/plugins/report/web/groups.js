/* The group table: sorted and filtered here, so that 200,000 rows need no server. */

const PAGE_ROWS = 14;
const GROUP_COLUMNS = [
  ['group', null], ['step', 'step'], ['reward', 'reward'], ['spread', 'spread'], ['tokens', 'tokens'],
  ['behind', 'stale'], ['versions', 'span'], ['attempts', 'attempts'], ['engine', 'generate_s'],
];
const ONLY = {
  all: ['all', () => true],
  text: ['with text in this page', (_, row, isExample) => isExample(row)],
  retried: ['retried', (g, row) => g.attempts[row] > 1],
  mixed: ['of several weight versions', (g, row) => g.span[row] > 0],
  same: ['all rewards equal', (g, row) => g.spread[row] === 0],
  masked: ['with masked samples', (g, row) => g.masked[row] > 0],
  dropped: ['dropped', (g, row) => g.dropped[row] > 0],
  waiting: ['not trained', (g, row) => g.step[row] === 0 && g.dropped[row] === 0],
};
const groupName = index => `g-${String(index).padStart(6, '0')}`;
/* Rows are runs of consecutive groups: [first, count]. A group that is not listed has no row. */
function indexOf(groups, row) {
  for (const [first, count] of groups.runs) {
    if (row < count) return first + row;
    row -= count;
  }
}
function rowOf(groups, index) {
  let before = 0;
  for (const [first, count] of groups.runs) {
    if (first <= index && index < first + count) return before + index - first;
    before += count;
  }
}
const table_state = { sort: null, ascending: true, only: 'all', number: '', page: 0, order: [] };

function drawGroups(run) {
  const { groups } = run, columns = groups.columns, isExample = row => String(indexOf(groups, row)) in run.examples;
  const body = el('tbody'), count = el('span', { class: 'dim', 'aria-live': 'polite', id: 'group-count' });
  const number = el('input', { id: 'group-number', placeholder: 'number', inputmode: 'numeric', size: 8, 'aria-label': 'Groups whose number begins with', value: table_state.number });
  const only = el('select', { id: 'group-only', 'aria-label': 'Which groups' },
    Object.entries(ONLY).map(([value, [label]]) => el('option', { value, selected: value === table_state.only }, label)));
  const select = () => {
    const wanted = table_state.number, [, keep] = ONLY[table_state.only], order = [];
    for (let row = 0; row < groups.count; row += 1) {
      if (wanted && !String(indexOf(groups, row)).startsWith(wanted)) continue;
      if (keep(columns, row, isExample)) order.push(row);
    }
    const by = columns[table_state.sort], sign = table_state.ascending ? 1 : -1;
    // A group without a number stands at the end either way.
    const rank = value => Number.isNaN(value) ? Infinity : sign * value;
    if (by) order.sort((a, b) => rank(by[a]) - rank(by[b]) || a - b);
    else if (!table_state.ascending) order.reverse();
    table_state.order = order;
  };
  const show = () => {
    const pages = Math.max(1, Math.ceil(table_state.order.length / PAGE_ROWS));
    table_state.page = Math.min(Math.max(0, table_state.page), pages - 1);
    const from = table_state.page * PAGE_ROWS;
    body.replaceChildren(...table_state.order.slice(from, from + PAGE_ROWS).map(row => groupRow(run, row)));
    count.textContent = `${table_state.order.length.toLocaleString('en')} groups · page ${table_state.page + 1} of ${pages.toLocaleString('en')}`;
    previous.disabled = table_state.page === 0;
    next.disabled = table_state.page === pages - 1;
    for (const [title, button] of heads) button.setAttribute('aria-sort', title === table_state.sort ? (table_state.ascending ? 'ascending' : 'descending') : 'none');
  };
  const again = () => { table_state.page = 0; select(); show(); };
  const turn = by => () => { table_state.page += by; show(); };
  const previous = el('button', { type: 'button', onclick: turn(-1) }, 'previous');
  const next = el('button', { type: 'button', onclick: turn(1) }, 'next');
  const heads = [];
  const head = el('tr', {}, GROUP_COLUMNS.map(([title, key]) => {
    const cell = el('th', { scope: 'col', class: key ? 'number' : '' }, el('button', { type: 'button', class: 'link', onclick: () => {
      table_state.ascending = table_state.sort === key ? !table_state.ascending : true;
      table_state.sort = key;
      again();
    } }, title));
    heads.push([key, cell]);
    return cell;
  }));
  number.addEventListener('input', () => { table_state.number = number.value.replace(/^g-0*|\D/g, ''); again(); });
  only.addEventListener('change', () => { table_state.only = only.value; again(); });
  $('groups').replaceChildren(
    el('div', { class: 'bar' }, number, only, previous, next, count),
    el('div', { class: 'scroll' }, el('table', { class: 'rows' }, el('thead', {}, head), body)),
    el('p', { class: 'dim small' }, 'behind: versions between the oldest token and training · versions: from the oldest to the newest token · engine: time of the group in its engine'));
  select();
  show();
}

function groupRow(run, row) {
  const { groups } = run, g = groups.columns, index = indexOf(groups, row);
  const dropped = g.dropped[row] ? groups.drop_labels[g.dropped[row] - 1] || 'dropped' : '';
  const step = g.step[row] ? figure(g.step[row]) : dropped || '–';
  const number = value => el('td', { class: 'number' }, value);
  return el('tr', { class: view.group === index ? 'chosen' : '' },
    el('td', {}, el('button', { type: 'button', class: 'link', onclick: event => openGroup(run, index, event.target) }, groupName(index))),
    el('td', { class: g.step[row] ? 'number' : 'number dim' }, step),
    number(figure(g.reward[row])), number(figure(g.spread[row])), number(figure(g.tokens[row])),
    number(g.step[row] ? g.stale[row] : '–'), number(g.span[row]), number(g.attempts[row]), number(seconds(g.generate_s[row])));
}

function openGroup(run, index, button) {
  view.group = index;
  for (const chosen of document.querySelectorAll('tr.chosen')) chosen.classList.remove('chosen');
  button.closest('tr').classList.add('chosen');
  drawStory(run, index);
  // Beside the table the story is in sight already.
  if (matchMedia('(max-width: 1000px)').matches) $('story').scrollIntoView({ block: 'start' });
  $('story').focus({ preventScroll: true });
}
