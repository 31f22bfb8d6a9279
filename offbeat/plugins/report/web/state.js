/* What the reader has chosen. Every view draws itself again when a choice changes. */

const view = { axis: 'step', smoothing: 0.9, page: null };
const redraws = new Set();

function redrawAll() {
  for (const redraw of redraws) redraw();
}

const AXES = {
  step: { label: 'step', format: figure },
  time: { label: 'seconds since the start', format: seconds },
  samples: { label: 'samples trained', format: figure },
};

/* Exponential mean, divided by its weight so that the first points are not pulled to zero. */
function smoothed(values, weight) {
  let mean = 0, total = 0;
  return values.map(value => {
    if (value == null) return null;
    mean = weight * mean + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return mean / total;
  });
}

const lastOf = values => {
  for (let i = values.length - 1; i >= 0; i -= 1) if (values[i] != null) return values[i];
  return null;
};
