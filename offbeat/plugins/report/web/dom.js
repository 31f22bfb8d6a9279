'use strict';
/* Elements and numbers. `el` is the only way that text enters the page: as text nodes. */

const $ = id => document.getElementById(id);

function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith('on')) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, '');
    else if (value !== false && value != null) node.setAttribute(name, value);
  }
  for (const child of children.flat()) {
    node.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return node;
}

/* A live page says since when its server has not answered: what it shows is older than that. */
let lostAt = null;
function connected(isConnected) {
  lostAt = isConnected ? null : lostAt ?? new Date();
  const line = $('connection');
  line.hidden = isConnected;
  line.textContent = isConnected ? '' : `Disconnected since ${lostAt.toLocaleTimeString('en-GB')}: `
    + 'what is shown is from before. The page asks again; if offbeat watch was started anew, open its new address.';
}

const cssValue = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

const isNumber = value => value != null && Number.isFinite(value);

/* Three significant digits, thousands separated; a dash for what is not a number. */
function figure(value) {
  if (!isNumber(value)) return value != null && Math.abs(value) === Infinity ? String(value) : '–';
  const size = Math.abs(value);
  if (size >= 1000) return Math.round(value).toLocaleString('en');
  if (size >= 100) return value.toFixed(0);
  if (size >= 10) return trimmed(value.toFixed(1));
  if (size >= 0.001 || size === 0) return trimmed(value.toFixed(size >= 1 ? 2 : 3));
  return value.toExponential(1);
}
const trimmed = text => text.includes('.') ? text.replace(/\.?0+$/, '') : text;

function bytes(value) {
  if (!isNumber(value)) return '–';
  const units = ['B', 'kB', 'MB', 'GB', 'TB'];
  let unit = 0;
  while (Math.abs(value) >= 1000 && unit < units.length - 1) { value /= 1000; unit += 1; }
  return `${figure(value)} ${units[unit]}`;
}

function seconds(value) {
  if (!isNumber(value)) return '–';
  if (Math.abs(value) < 1 && value !== 0) return `${figure(value * 1000)} ms`;
  if (Math.abs(value) < 120) return `${figure(value)} s`;
  return clock(value);
}

/* 3:05:00, as a time line is labelled. */
function clock(value) {
  const whole = Math.round(value), two = n => String(n).padStart(2, '0');
  const hours = Math.floor(whole / 3600), minutes = Math.floor(whole / 60) % 60;
  return hours ? `${hours}:${two(minutes)}:${two(whole % 60)} h` : `${minutes}:${two(whole % 60)} min`;
}

const percent = share => isNumber(share) ? `${figure(share * 100)} %` : '–';

const formats = {
  s: seconds, bytes, fraction: percent,
  versions: v => `${figure(v)}`, tokens: v => figure(v),
};
const formatOf = unit => formats[unit] || figure;

/* A head that begins with # is above numbers. */
function table(head, rows, attributes = {}) {
  const cell = text => el('th', { scope: 'col', class: text.startsWith('#') ? 'number' : '' }, text.replace('#', ''));
  return el('table', attributes,
    el('thead', {}, el('tr', {}, head.map(cell))),
    el('tbody', {}, rows));
}
