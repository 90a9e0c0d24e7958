// Draws launches: each span while launches are wide enough, else the share of time by columns of pixels.

import { NAMES } from "./timeline-store.js";

export const LABELS = 66; // pixels at the left
const LANE = 24, GAP = 5, AXIS = 20, MIN_LAUNCH = 4; // pixels
const [PLAN, LAUNCH, FINALIZE, WAIT, COMMIT, FORWARD, SAMPLE, COPY, IDLE, HELD] = NAMES.keys();
const COLOURS = NAMES.map((name) => `--timeline-${name}`);

/** The lanes that show a span, and in which order shares are stacked. */
const SLOT = [FORWARD, SAMPLE, COPY, COMMIT], DEVICE = [FORWARD, SAMPLE, IDLE];
const HOST = [PLAN, LAUNCH, FINALIZE, COMMIT, WAIT];

/** The lanes of the engines, from the top: {engine, label, names, slot}. */
export function lanesOf(stores) {
  const lanes = [];
  for (const [engine, store] of stores) {
    const own = (label, names, slot = -1) => {
      const prefix = stores.size > 1 ? `${engine}: ` : "";
      lanes.push({ engine, store, label: prefix + label, names, slot });
    };
    if (store.depth) {
      own("slot 0", SLOT, 0);
      own("slot 1", SLOT, 1);
      own("device", DEVICE);
    }
    own("host", HOST);
  }
  return lanes;
}

export const heightOf = (lanes) => Math.max(1, lanes.length) * (LANE + GAP) + AXIS;

/** The colours of the element's theme, for `draw`. */
export function coloursOf(element) {
  const style = getComputedStyle(element), read = (name) => style.getPropertyValue(name).trim();
  return {
    spans: COLOURS.map(read),
    text: read("--timeline-text"), faint: read("--timeline-faint"), lane: read("--timeline-lane"),
    mark: read("--timeline-mark"), chosen: read("--timeline-chosen"),
  };
}

/** `view` is {left, right} in microseconds; `chosen` is {engine, number} or null. */
export function draw(context, width, lanes, view, colours, chosen) {
  const scale = (width - LABELS) / (view.right - view.left);
  context.clearRect(0, 0, width, heightOf(lanes));
  context.font = "12px system-ui, sans-serif";
  context.textBaseline = "middle";
  drawAxis(context, width, lanes, view, scale, colours);
  lanes.forEach((lane, row) => {
    const top = row * (LANE + GAP);
    context.fillStyle = colours.text;
    context.fillText(lane.label, 4, top + LANE / 2, LABELS - 8);
    context.fillStyle = colours.lane;
    context.fillRect(LABELS, top, width - LABELS, LANE);
    context.save();
    context.beginPath();
    context.rect(LABELS, top, width - LABELS, LANE);
    context.clip();
    drawLane(context, width, lane, top, view, scale, colours);
    drawMarks(context, lane, top, view, scale, colours);
    if (chosen?.engine === lane.engine) drawChosen(context, lane, top, view, scale, colours, chosen.number);
    context.restore();
  });
}

/** The lane at this height, and the launch at this time of it or nearest to it: {lane, number} or null. */
export function at(lanes, width, view, x, y) {
  const lane = lanes[Math.floor(y / (LANE + GAP))];
  if (!lane || x < LABELS || !lane.store.size) return null;
  const { store } = lane, time = view.left + (x - LABELS) / (width - LABELS) * (view.right - view.left);
  let number = Math.min(store.after(time), store.next - 1);
  // Launches of the other slot overlap this one: the lane's own is at most one further.
  for (let other = number; lane.slot >= 0 && other < Math.min(number + 3, store.next); other++) {
    if (store.slots[other & store.mask] === lane.slot) { number = other; break; }
  }
  return { lane, number };
}

function drawLane(context, width, lane, top, view, scale, colours) {
  const { store } = lane, first = store.after(view.left);
  const last = Math.min(store.after(view.right) + 2, store.next);
  if (first >= last) return;
  const shown = store.end[(last - 1) & store.mask] - store.start[first & store.mask];
  const each = shown * scale / (last - first);
  if (each >= MIN_LAUNCH) drawSpans(context, lane, top, first, last, view, scale, colours);
  else drawShares(context, width, lane, top, first, last, view, scale, colours);
}

function drawSpans(context, lane, top, first, last, view, scale, colours) {
  const { store, slot } = lane;
  for (let number = first; number < last; number++) {
    if (slot >= 0 && store.slots[number & store.mask] !== slot) continue;
    store.spans(number, (name, start, length) => {
      const held = name === HELD && slot >= 0;
      if (!held && !lane.names.includes(name)) return;
      context.fillStyle = colours.spans[name];
      const inset = held ? 0 : name === WAIT ? 8 : 3;
      context.fillRect(LABELS + (start - view.left) * scale, top + inset, Math.max(length * scale, 0.75), LANE - 2 * inset);
    });
  }
}

let sums = new Float32Array(0); // shares of each column by name, for one lane at a time

function drawShares(context, width, lane, top, first, last, view, scale, colours) {
  const columns = Math.ceil(width - LABELS), { store, names, slot } = lane;
  if (sums.length < names.length * columns) sums = new Float32Array(names.length * columns);
  sums.fill(0, 0, names.length * columns);
  for (let number = first; number < last; number++) {
    if (slot >= 0 && store.slots[number & store.mask] !== slot) continue;
    store.spans(number, (name, start, length) => {
      const place = names.indexOf(name);
      if (place >= 0) spread(place * columns, columns, (start - view.left) * scale, (start + length - view.left) * scale);
    });
  }
  const floor = new Float32Array(columns); // of a column, what is drawn so far
  names.forEach((name, place) => {
    context.fillStyle = colours.spans[name];
    for (let column = 0; column < columns; column++) {
      const height = Math.min(sums[place * columns + column] * LANE, LANE - floor[column]);
      if (height <= 0) continue;
      context.fillRect(LABELS + column, top + LANE - floor[column] - height, 1, height);
      floor[column] += height;
    }
  });
}

/** Add to each column the part of it that lies between two places. */
function spread(base, columns, from, to) {
  const begin = Math.max(from, 0), end = Math.min(to, columns);
  for (let column = Math.floor(begin); column < end; column++) {
    sums[base + column] += Math.min(column + 1, end) - Math.max(column, begin);
  }
}

function drawMarks(context, lane, top, view, scale, colours) {
  context.fillStyle = colours.mark;
  for (const mark of lane.store.marks) {
    if (mark.at < view.left || mark.at > view.right) continue;
    context.fillRect(LABELS + (mark.at - view.left) * scale - 1, top, 2, LANE);
  }
}

function drawChosen(context, lane, top, view, scale, colours, number) {
  const { store, slot } = lane;
  if (number < store.first || number >= store.next) return;
  if (slot >= 0 && store.slots[number & store.mask] !== slot) return;
  const x = LABELS + (store.start[number & store.mask] - view.left) * scale;
  const width = (store.end[number & store.mask] - store.start[number & store.mask]) * scale;
  context.strokeStyle = colours.chosen;
  context.lineWidth = 2;
  context.strokeRect(x, top + 1, Math.max(width, 2), LANE - 2);
}

function drawAxis(context, width, lanes, view, scale, colours) {
  const bottom = heightOf(lanes) - AXIS;
  const step = [1e2, 2e2, 5e2, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6, 2e6, 5e6, 1e7, 2e7]
    .find((each) => each * scale >= 80) ?? 2e7;
  for (let ago = 0; ago <= view.right - view.left; ago += step) {
    const x = width - ago * scale;
    if (x < LABELS) break;
    context.fillStyle = colours.faint;
    context.fillRect(Math.round(x) - 1, 0, 1, bottom);
    context.fillStyle = colours.text;
    context.textAlign = x > width - 20 ? "right" : "center";
    context.fillText(ago === 0 ? "0" : `−${duration(ago)}`, x, bottom + AXIS / 2);
  }
  context.textAlign = "left";
}

/** Microseconds for people. */
export function duration(us) {
  if (us >= 1e6) return `${+(us / 1e6).toFixed(2)} s`;
  return us >= 1e3 ? `${+(us / 1e3).toFixed(2)} ms` : `${+us.toFixed(1)} µs`;
}
