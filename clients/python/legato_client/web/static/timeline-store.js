// The latest launches of one engine, in memory of a fixed size.

export const NAMES = [
  "plan", "launch", "finalize", "wait", "commit", "forward", "sample", "copy", "idle", "held",
];
const PLACES = 11; // of spans in a launch: one for each name, and a second idle one
const SECOND_IDLE = 10;
const IDLE = NAMES.indexOf("idle");
const COUNTS = 5; // launch, rows, riding, zombies, tokens
const MAX_MARKS = 64;

export class Store {
  /** `capacity` launches, a power of two; later ones replace the oldest. */
  constructor(capacity = 1 << 15) {
    this.mask = capacity - 1;
    this.first = 0; // the oldest launch is at `first & mask`
    this.next = 0;
    this.start = new Float64Array(capacity); // microseconds of the server's clock
    this.end = new Float64Array(capacity); // of the commit: never before the one before
    this.offsets = new Float32Array(capacity * PLACES); // after `start`
    this.lengths = new Float32Array(capacity * PLACES); // 0: there is no such span
    this.counts = new Uint32Array(capacity * COUNTS);
    this.slots = new Int8Array(capacity);
    this.kinds = new Array(capacity).fill("");
    this.marks = []; // of lost launches and of other engines: {at, text}
    this.marked = 0;
    this.lost = 0;
    this.depth = 0;
    this.steps = null;
    this.started = 0;
    this.byDepth = new Map(); // the latest figures at each depth
  }

  get size() {
    return this.next - this.first;
  }

  get latest() {
    return this.size ? this.end[(this.next - 1) & this.mask] : 0;
  }

  /** Take in one message of the stream; returns what it marks, in words, or "". */
  add(message) {
    const marked = this.marked;
    const at = message.launches.length ? message.launches[0][7] : this.latest;
    if (message.started && this.started && message.started !== this.started) {
      this.mark(message.started, "the engine was started again");
      this.byDepth.clear();
    }
    if (message.started) this.started = message.started;
    if (message.lost) {
      this.lost += message.lost;
      this.mark(at, `${message.lost} launches lost: this page read too slowly`);
    }
    if (message.depth) {
      if (this.depth && this.depth !== message.depth) this.mark(at, `depth ${message.depth}`);
      this.depth = message.depth;
    }
    this.steps = message.steps ?? this.steps;
    if (message.steps && this.depth) this.byDepth.set(this.depth, message.steps);
    for (const launch of message.launches) this.#push(launch);
    return this.marked > marked ? this.marks.at(-1).text : "";
  }

  mark(at, text) {
    this.marks.push({ at, text });
    this.marked++;
    if (this.marks.length > MAX_MARKS) this.marks.shift();
  }

  /** The number of the first launch that ends after `time`, by bisection. */
  after(time) {
    let low = this.first, high = this.next;
    while (low < high) {
      const middle = (low + high) >>> 1;
      if (this.end[middle & this.mask] > time) high = middle;
      else low = middle + 1;
    }
    return low;
  }

  /** Calls `visit(name, start, length)` for each span of the launch with this number, `held` before what lies in it. */
  spans(number, visit) {
    const index = number & this.mask, start = this.start[index];
    for (let place = PLACES - 1; place >= 0; place--) {
      const length = this.lengths[index * PLACES + place];
      if (length <= 0) continue;
      visit(place === SECOND_IDLE ? IDLE : place, start + this.offsets[index * PLACES + place], length);
    }
  }

  /** A launch in words and numbers. */
  read(number) {
    const index = number & this.mask, [launch, rows, riding, zombies, tokens] =
      this.counts.subarray(index * COUNTS, (index + 1) * COUNTS);
    return {
      launch, rows, riding, zombies, tokens,
      kind: this.kinds[index], slot: this.slots[index], start: this.start[index], end: this.end[index],
    };
  }

  #push([launch, kind, slot, rows, riding, zombies, tokens, start, flat]) {
    const index = this.next & this.mask, base = index * PLACES;
    if (this.size > this.mask) this.first++;
    this.next++;
    this.lengths.fill(0, base, base + PLACES);
    let end = start;
    for (let i = 0; i < flat.length; i += 3) {
      let place = flat[i];
      if (place === IDLE && this.lengths[base + IDLE] > 0) place = SECOND_IDLE;
      this.offsets[base + place] = flat[i + 1];
      this.lengths[base + place] = flat[i + 2];
      if (flat[i] !== IDLE) end = Math.max(end, start + flat[i + 1] + flat[i + 2]);
    }
    this.start[index] = start;
    this.end[index] = Math.max(end, this.size > 1 ? this.end[(this.next - 2) & this.mask] : 0);
    this.counts.set([launch, rows, riding, zombies, tokens], index * COUNTS);
    this.slots[index] = slot;
    this.kinds[index] = kind;
  }
}
