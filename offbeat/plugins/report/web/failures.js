/* Samples that failed: the row and the response that broke the reward, and its traceback. */

function drawFailures(failures) {
  $('failures').hidden = !failures;
  if (!failures) return;
  const { count, file, samples } = failures;
  const more = count > samples.length ? ` The first ${samples.length} are shown.` : '';
  $('failed-samples').replaceChildren(
    el('p', { class: 'dim' }, `${figure(count)} in ${file}.${more}`),
    ...samples.map((each, i) => el('details', { class: 'panel', open: i === 0 },
      el('summary', { class: 'wrap' }, el('b', {}, each.group || 'a group'), each.sample == null ? '' : `, sample ${each.sample}`,
        each.attempt > 1 ? `, attempt ${each.attempt}` : '', each.evaluation ? ', in an evaluation' : '',
        ': ', el('span', { class: 'error' }, each.detail || each.reason)),
      part('Row', each.row), part('Response', each.response), part('Traceback', each.traceback))));
}

const part = (title, text) => text ? el('div', {}, el('h4', {}, title), el('pre', { class: 'text' }, text)) : '';
