/* The same prompts early and late: both responses side by side. */

function drawSame(same) {
  $('same').hidden = !same;
  if (!same) return;
  const { better, equal, worse } = same, all = better + equal + worse;
  const [where, what] = same.source === 'evaluation' ? ['in the last evaluation than in the first', 'evaluation prompts']
    : ['in the last tenth of the run than in the first', 'prompts that were trained in both'];
  $('same-prompts').replaceChildren(
    el('p', { class: 'dim' }, `Of ${figure(all)} ${what}, ${figure(better)} had a higher mean reward ${where}, `
      + `${figure(equal)} the same and ${figure(worse)} a lower one. Of each kind one is shown, with its first sample.`),
    el('div', { class: 'same' }, same.prompts.map(each => el('article', { class: 'panel' },
      el('h3', {}, `${each.why[0].toUpperCase()}${each.why.slice(1)}`, el('span', { class: 'dim small' }, ` ${each.key}`)),
      el('pre', { class: 'text' }, each.prompt || '(no text was kept)'),
      el('div', { class: 'pair' }, sampleOf('Early', each.early), sampleOf('Late', each.late))))));
}

function sampleOf(when, sample) {
  const facts = [`version ${sample.version}`, sample.reward == null ? 'masked' : `reward ${figure(sample.reward)}`];
  if (sample.samples > 1) facts.push(`mean of ${sample.samples} samples ${figure(sample.mean)}`);
  facts.push(`${figure(sample.tokens)} tokens`, sample.finish);
  if (sample.group) facts.push(sample.group);
  return el('div', { class: sample.reward > 0 ? 'good' : '' }, el('h4', {}, when),
    el('div', { class: 'dim small' }, facts.join(' · ')), el('div', { class: 'text' }, sample.text || '(no text was kept)'));
}
