/* Unpacks what offbeat/plugins/report/packing.py packed: gzip( u32 | JSON head | columns ). */

async function unpack(base64) {
  const packed = Uint8Array.from(atob(base64.trim()), char => char.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream('gzip'));
  const blob = new Uint8Array(await new Response(stream).arrayBuffer());
  const headBytes = new DataView(blob.buffer).getUint32(0, true);
  const head = JSON.parse(new TextDecoder().decode(blob.subarray(4, 4 + headBytes)));
  return withColumns(head, blob.subarray(4 + headBytes));
}

function withColumns(tree, columns) {
  if (Array.isArray(tree)) return tree.map(member => withColumns(member, columns));
  if (tree === null || typeof tree !== 'object') return tree;
  if (Array.isArray(tree.$)) return column(tree.$, columns);
  return Object.fromEntries(Object.entries(tree).map(([key, value]) => [key, withColumns(value, columns)]));
}

const ARRAYS = { u1: Uint8Array, u2: Uint16Array, u4: Uint32Array, f4: Float32Array };

/* Numbers of several bytes are stored byte plane by byte plane. */
function column([kind, offset, count], columns) {
  const width = ARRAYS[kind].BYTES_PER_ELEMENT;
  const planes = columns.subarray(offset, offset + count * width);
  if (width === 1) return planes;
  const joined = new Uint8Array(count * width);
  for (let plane = 0; plane < width; plane += 1) {
    for (let i = 0; i < count; i += 1) joined[i * width + plane] = planes[plane * count + i];
  }
  return new ARRAYS[kind](joined.buffer);
}

/* What uPlot draws as a gap is null; a column says NaN. */
const gaps = values => Array.from(values, value => Number.isFinite(value) ? value : null);
