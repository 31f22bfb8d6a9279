/* The charts that answer the questions, in the order in which they are asked. */

function curve(run, name, label, color, more = {}) {
  const values = run.curves[name];
  return values ? { label, color, values: gaps(values), ...more } : null;
}

/* Where an incident stands on each axis: a rewind undoes steps, so time decides. */
function marksOf(run) {
  const times = Array.from(run.x.time);
  return run.incidents.filter(each => each.what !== 'quiet').map(each => {
    let at = times.findIndex(time => time >= each.at_s);
    if (at < 0) at = times.length - 1;
    return { time: each.at_s, step: run.x.step[at], samples: run.x.samples[at] };
  });
}

/*
 * The lines of a chart: `make` gives those of one run. Of several runs each has its colour, and each
 * line of a run its dash.
 */
function linesOf(runs, make) {
  if (runs.length === 1) return make(runs[0]);
  return runs.flatMap((run, i) => {
    const lines = make(run).filter(each => each && !each.quiet);
    return lines.map((each, k) => ({
      x: run.x, ...each, color: COLORS[i % COLORS.length], dash: DASHES[k % DASHES.length],
      label: lines.length > 1 ? `${labelOf(run, runs)}, ${each.label}` : labelOf(run, runs),
    }));
  });
}

const isRecorded = (runs, name) => runs.some(run => run.curves[name]?.some(Number.isFinite));

function drawPanels(runs) {
  const marks = runs.length === 1 ? marksOf(runs[0]) : [], [{ x }] = runs;
  const put = (parent, spec, make) => chart(parent, { x, marks, ...spec, series: linesOf(runs, make) });
  const glance = $('glance'), learning = $('learning-charts'), age = $('age-charts'), sync = $('sync-charts');
  for (const parent of [glance, learning, age, sync]) parent.replaceChildren();

  if (isRecorded(runs, 'train/reward') || !isRecorded(runs, 'train/loss')) {
    put(glance, { title: 'Reward', note: 'mean of the samples trained' }, run => [
      curve(run, 'train/reward', 'reward', '--c0', { smooth: true })]);
  } else {
    put(glance, { title: 'Loss', note: 'this run has no rewards' }, run => [
      curve(run, 'train/loss', 'loss', '--c0', { smooth: true })]);
  }
  put(glance, { title: 'Entropy', note: 'of the policy, nats per token; near 0 it tries nothing new', range: fromZero }, run => [
    curve(run, 'train/entropy', 'entropy', '--c0', { smooth: true })]);
  put(glance, { title: 'KL divergence', note: 'nats per token, by what the policy is compared with' }, run => [
    curve(run, 'off_policy/behaviour_kl', 'policy that sampled', '--c0', { smooth: true }),
    curve(run, 'train/kl_reference', 'reference', '--c1', { smooth: true }),
    curve(run, 'train/kl_reward', 'reference, in the reward', '--c3', { smooth: true }),
    curve(run, 'train/teacher_kl', 'teacher', '--c2', { smooth: true })]);

  if (runs.some(run => evaluations(run).length)) {
    put(learning, { title: 'Evaluation', note: 'mean reward by set, at one weight version' }, evaluations);
  }
  put(learning, { title: 'Signal', note: 'groups whose samples all got one reward: nothing to learn from', format: percent, range: [0, 1] }, run => [
    curve(run, 'train/zero_variance_groups', 'without signal', '--c1', { smooth: true })]);
  put(learning, { title: 'Response length', note: 'tokens, mean of a sample' }, run => [
    curve(run, 'rollout/response_tokens_mean', 'tokens', '--c0', { smooth: true })]);
  put(learning, { title: 'Cut off, masked', note: 'share of the samples', format: percent, range: fromZero }, run => [
    curve(run, 'rollout/truncated_fraction', 'out of tokens', '--c0'),
    curve(run, 'rollout/masked_fraction', 'failed and masked', '--c1', { dash: [6, 4] }),
    run.curves['rollout/refused_fraction']?.some(share => share > 0)
      ? curve(run, 'rollout/refused_fraction', 'with a refused request', '--c2') : null]);
  put(learning, { title: 'Gradient', note: 'L2 norm before clipping', range: fromZero }, run => [
    curve(run, 'train/grad_norm', 'norm', '--c0', { smooth: true })]);
  put(learning, { title: 'Speed', note: 'samples trained per second', range: fromZero }, run => [
    curve(run, 'throughput/samples_per_s', 'samples/s', '--c0', { smooth: true })]);
  if (runs.length > 1) {
    put(learning, { title: 'Step', note: 'seconds of a step', format: seconds, range: fromZero }, run => [
      curve(run, 'time/step_s', 'step', '--c0', { smooth: true })]);
  }

  const bound = run => run.bound == null ? null : { label: 'bound', color: '--bad', dash: [6, 4], values: Array.from(run.x.step, () => run.bound) };
  const most = runs.flatMap(run => [run.bound ?? 0, ...Array.from(run.curves['off_policy/staleness_max'] || []).filter(Number.isFinite)]);
  const top = most.reduce((high, value) => Math.max(high, value), 1);
  put(age, { title: 'Staleness', note: 'weight versions behind; the bound holds for the oldest token', range: [0, top + 0.5] }, run => [
    curve(run, 'off_policy/staleness_mean', 'mean', '--c0'), curve(run, 'off_policy/staleness_max', 'most', '--c4'), bound(run)]);
  if (runs.length === 1) drawHeat(age, runs[0]);
  put(age, { title: 'Probability ratio by age', note: `trained to sampled policy: median of the tokens${runs.length > 1 ? '' : '; dotted: 5th and 95th percentile'}` }, ratios);
  put(age, { title: 'Engine against trainer', note: 'distance of a token\'s two logprobs, nats', range: fromZero }, run => [
    curve(run, 'off_policy/logprob_gap_mean', 'mean', '--c0', { smooth: true })]);
  put(age, { title: 'Clipped tokens', note: 'lost their gradient to a bound of the loss', format: percent, range: fromZero }, run => [
    curve(run, 'train/clip_fraction_low', 'lower bound', '--c0'), curve(run, 'train/clip_fraction_high', 'upper bound', '--c1', { dash: [6, 4] })]);

  put(sync, { title: 'Pause', note: 'of the slowest engine\'s decoding', format: seconds, range: fromZero }, run => [
    curve(run, 'sync/pause_s', 'paused', '--c1')]);
  put(sync, { title: 'Transfer', note: 'to receive and verify the weights', format: seconds, range: fromZero }, run => [
    curve(run, 'sync/transfer_s', 'transfer', '--c0')]);
  put(sync, { title: 'Bytes', note: 'of one copy of the weights', format: bytes, range: fromZero }, run => [
    curve(run, 'sync/bytes', 'copied', '--c2')]);
}

/* Axes of quantities that cannot be negative start at zero; 1.05 leaves air above the highest. */
const fromZero = (_, low, high) => [Math.min(0, low ?? 0), (high > 0 ? high : 1) * 1.05];

const COLORS = ['--c0', '--c1', '--c2', '--c3', '--c4', '--c5'];
const DASHES = [undefined, [6, 4], [2, 3], [10, 3, 2, 3]];

function evaluations(run) {
  const names = Object.keys(run.scores).filter(name => /^eval\/(.*\/)?reward$/.test(name)).sort();
  return names.slice(0, COLORS.length).map((name, i) => ({
    label: name.replace(/^eval\/?/, '').replace(/\/?reward$/, '') || 'eval', color: COLORS[i],
    x: run.scores_x, values: gaps(run.scores[name]), points: true }));
}

function ratios(run) {
  const found = Object.keys(run.curves).map(name => /^staleness\/ratio_p(\d+)_at_(\w+)$/.exec(name)).filter(Boolean);
  const ages = [...new Set(found.map(each => each[2]))].slice(0, COLORS.length);
  return ages.flatMap((age, i) => found.filter(each => each[2] === age).map(each =>
    curve(run, each[0], `${age.replace('_up', ' or more').replace('_', ' to ')} behind`, COLORS[i],
      each[1] === '50' ? {} : { dash: [2, 3], width: 1, quiet: true })));
}
