/* One group: its prompt, its responses shaded by weight version, and what became of it. */

function drawStory(run, index) {
  const example = run.examples[index], box = $('story');
  box.replaceChildren(el('h3', {}, groupName(index)));
  if (!example) {
    box.append(el('p', { class: 'dim' }, 'Its text is not in this page. The run directory has it: '),
      el('code', {}, `offbeat why RUN ${index}`));
    return;
  }
  box.append(el('p', {}, example.now));
  if (example.prompt != null) box.append(el('h4', {}, 'Prompt'), el('pre', { class: 'text' }, example.prompt || '(empty)'));
  if (example.pictures.length) box.append(el('h4', {}, 'Its pictures, small, as the model reads them'), el('div', {}, example.pictures.map(picture)));
  if (example.row != null) box.append(el('h4', {}, 'Its row besides the text'), el('pre', { class: 'text' }, example.row));
  const oldest = Math.min(...example.samples.flatMap(sample => sample.spans.map(([version]) => version)));
  if (example.samples.length) {
    box.append(el('h4', {}, `${example.samples.length} samples`), versionKey(example.samples, oldest));
    box.append(el('ol', { class: 'responses' }, example.samples.map(sample => response(sample, oldest))));
  }
  box.append(el('h4', {}, 'What became of it'), el('ol', { class: 'moments' }, example.moments.map(([at, what, detail]) =>
    el('li', {}, el('span', { class: 'dim number' }, at == null ? '' : seconds(at)), el('b', {}, what), el('span', {}, detail)))));
}

/* Drawn pixel by pixel: no decoder of the browser reads bytes of a run. */
function picture({ height, width, rgb }) {
  const canvas = el('canvas', { class: 'picture', height, width }), context = canvas.getContext('2d');
  const image = context.createImageData(width, height), values = atob(rgb);
  for (let at = 0; at < height * width; at++) {
    for (let channel = 0; channel < 3; channel++) image.data[4 * at + channel] = values.charCodeAt(3 * at + channel);
    image.data[4 * at + 3] = 255;
  }
  context.putImageData(image, 0, 0);
  return canvas;
}

const shadeOf = (version, oldest) => `v${Math.min(version - oldest, 3)}`;

function versionKey(samples, oldest) {
  const versions = [...new Set(samples.flatMap(sample => sample.spans.map(([version]) => version)))].sort((a, b) => a - b);
  if (!versions.length) return el('p', { class: 'dim small' }, 'No text was logged for this attempt.');
  return el('p', { class: 'dim small' }, 'sampled under version ', versions.map(version => el('span', { class: `version ${shadeOf(version, oldest)}` }, version)));
}

function response(sample, oldest) {
  const facts = [sample.reward == null ? 'masked' : `reward ${figure(sample.reward)}`, `${figure(sample.tokens)} tokens`, sample.finish];
  if (sample.turns > 1) facts.push(`${sample.turns} turns`);
  if (sample.branches > 1) facts.push(`${sample.branches} branches`);
  const text = el('div', { class: 'text' }, sample.spans.map(([version, part]) =>
    el('span', { class: shadeOf(version, oldest), title: `version ${version}` }, part)));
  if (sample.is_cut) text.append(el('span', { class: 'dim' }, ' … (cut here)'));
  const tone = sample.reward == null ? 'masked' : sample.reward > 0 ? 'good' : '';
  return el('li', { class: tone }, el('div', { class: 'dim small' }, facts.join(' · ')), text);
}
