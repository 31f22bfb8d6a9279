/* Staleness of the samples trained, step by step: how much of each step was how old. */

const HEAT_ROW = 16;

function drawHeat(parent, run) {
  const rows = run.heat;
  const box = el('figure', { class: 'panel' });
  parent.append(box);
  box.append(el('figcaption', {}, el('b', {}, 'Age of the samples'), el('span', { class: 'dim' }, 'share of a step, by versions behind')));
  if (!rows.length) {
    box.append(el('p', { class: 'dim none' }, 'nothing recorded'));
    return;
  }
  const steps = run.x.step, count = rows[0].length;
  const totals = rows.map(row => row.reduce((sum, share) => sum + share, 0) / count / 255);
  const name = age => age === rows.length - 1 && rows.length > 16 ? `${age} or more` : String(age);
  const label = `Age of the samples: ${totals.map((share, age) => `${name(age)} versions behind ${percent(share)}`).join(', ')}`;
  const drawing = el('div', {});
  box.append(drawing);
  const height = Math.max(rows.length * HEAT_ROW, 32);
  canvas(drawing, height + AXIS, label, (context, width) => {
    const left = 58, inner = width - left - RIGHT, cell = height / rows.length;
    rows.forEach((row, age) => {
      const y = height - (age + 1) * cell;
      context.fillStyle = cssValue('--track');
      context.fillRect(left, y + 1, inner, cell - 2);
      shade(context, row, left, y + 1, inner, cell - 2, cssValue('--c0'));
      context.fillStyle = cssValue('--dim');
      context.textAlign = 'right';
      context.fillText(name(age), left - 8, y + cell / 2);
    });
    for (const [share, align] of [[0, 'left'], [0.5, 'center'], [1, 'right']]) {
      context.textAlign = align;
      const at = Math.min(steps.length - 1, Math.floor(share * steps.length));
      context.fillText(`${share === 0 ? 'step ' : ''}${figure(share === 0 ? 1 : steps[at])}`, left + inner * share, height + AXIS / 2 + 2);
    }
    context.textAlign = 'left';
  });
  box.append(el('ul', { class: 'legend' }, totals.map((share, age) =>
    share >= 0.0005 ? el('li', {}, `${name(age)} behind `, el('b', {}, percent(share))) : null).filter(Boolean)));
}
