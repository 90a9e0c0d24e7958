// The figures of a session, and where its objects are now.

import { el, ms, svg } from "./dom.js";
import { labelOf } from "./overlay.js";

// What became of frames: each has one of these, or is under way.
const OUTCOMES = { answered: "answered", dropped: "dropped by the server", unsent: "not sent, no room", lost: "lost with a server" };
const NAMES = {
  rate: "answers per second", age: "age of the latest", middle: "median age", taken: "frames captured", ...OUTCOMES,
  open: "in flight", credits: "credits left",
};
const WINDOW = 2000; // milliseconds over which rate and median are taken

export class Figures {
  constructor() {
    this.values = new Map();
    const tiles = Object.entries(NAMES).map(([key, name]) => {
      const value = el("dd", {}, "–");
      this.values.set(key, value);
      return el("div", { data: { figure: key } }, el("dt", {}, name), value);
    });
    this.element = el("section", { className: "card", ariaLabel: "Figures" },
      el("h2", {}, "Figures"), el("dl", { className: "figures" }, ...tiles));
    this.reset();
  }

  reset() {
    this.ages = [];
    this.reasons = new Map();
    this.counts = { taken: 0, ...Object.fromEntries(Object.keys(OUTCOMES).map((key) => [key, 0])) };
    for (const value of this.values.values()) value.textContent = "–";
  }

  count(key, number = 1) {
    this.counts[key] += number;
    for (const [name, count] of Object.entries(this.counts)) this.set(name, count);
    this.set("open", this.open);
  }

  /** Frames without an outcome yet. */
  get open() {
    return this.counts.taken - Object.keys(OUTCOMES).reduce((sum, key) => sum + this.counts[key], 0);
  }

  /** Count the outcome that a message tells. */
  take({ type, last, credits, reason }) {
    if (credits !== undefined) this.set("credits", credits);
    if (last) this.count("answered");
    if (type === "left_out") this.count("unsent");
    if (type !== "dropped") return;
    this.reasons.set(reason, (this.reasons.get(reason) ?? 0) + 1);
    this.count("dropped");
  }

  age(age) {
    const now = performance.now();
    this.ages.push([now, age]);
    while (this.ages[0][0] < now - WINDOW) this.ages.shift();
    const sorted = this.ages.map(([, each]) => each).sort((a, b) => a - b);
    this.set("age", ms(age));
    this.set("middle", ms(sorted[sorted.length >> 1]));
    const span = Math.max(now - this.ages[0][0], 1);
    this.set("rate", this.ages.length > 1 ? ((this.ages.length - 1) * 1000 / span).toFixed(1) : "–");
  }

  /** All frames in a sentence. */
  get account() {
    const { taken, answered, unsent, lost } = this.counts;
    const dropped = [...this.reasons].map(([reason, count]) => `${count} ${DROPS[reason] ?? reason.replaceAll("_", " ")}`);
    const parts = [`${answered} answered`, ...dropped, unsent && `${unsent} not sent`, lost && `${lost} lost`, this.open && `${this.open} in flight`];
    return `${taken} frames captured: ${parts.filter(Boolean).join(", ")}.`;
  }

  set(key, value) {
    this.values.get(key).textContent = String(value);
  }
}

const DROPS = { superseded: "replaced by a newer frame", too_old: "too old", overloaded: "beyond the credits" };

/** The tracked objects, moved on to this moment as `Session.now` of the Python client does. */
export class Tracks {
  static UNSEEN = 4000; // milliseconds, `Tracking.max_unseen`: a CPU's answers are a second old

  constructor() {
    this.seen = new Map();
  }

  /** `object` of the frame captured at `captured`, drawn on `layer`. */
  note(object, captured, layer) {
    const old = this.seen.get(object.track_id);
    if (!old || old.captured <= captured) this.seen.set(object.track_id, { object, captured, layer });
  }

  /** Draw them at `now`, in milliseconds since the Unix epoch. */
  draw(layers, now) {
    for (const [track, { captured }] of this.seen) if (now - captured > Tracks.UNSEEN) this.seen.delete(track);
    for (const layer of layers) {
      const own = [...this.seen].filter(([, each]) => each.layer === layer);
      layer.move(own.map(([track, { object, captured }]) => {
        const seconds = (now - captured) / 1000;
        return [track, boxAfter(object.motion, seconds), labelOf(object), certaintyAfter(object.motion, seconds)];
      }).filter(([, box]) => isInside(box)));
    }
  }
}

/** Whether the centre lies within the image. */
const isInside = (box) => [[box.x_min, box.x_max], [box.y_min, box.y_max]].every(([low, high]) => low + high >= 0 && low + high <= 2);

/** From 1 to 0.35, which it is where the centre may be off by the box's own size. */
function certaintyAfter({ position, position_deviation: p, velocity_deviation: v, acceleration_deviation: a }, seconds) {
  const off = (axis, size) => Math.hypot(p[axis], v[axis] * seconds, (a[axis] * seconds ** 2) / 2) / position[size];
  return Math.max(0.35, 1 - 0.65 * Math.max(off("center_x", "width"), off("center_y", "height")));
}

function boxAfter({ position, velocity, acceleration }, seconds) {
  const at = (axis) => position[axis] + velocity[axis] * seconds + (acceleration[axis] * seconds ** 2) / 2;
  const x = at("center_x"), y = at("center_y"), across = Math.max(at("width"), 0) / 2, down = Math.max(at("height"), 0) / 2;
  return { x_min: x - across, y_min: y - down, x_max: x + across, y_max: y + down };
}

const SPAN = 30_000; // milliseconds that the chart shows
const TOPS = [100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 60_000]; // milliseconds of its upper end

/** The ages of the answers of the last half minute, with axes. */
export class AgeChart {
  constructor() {
    this.line = svg("polyline", { class: "line", points: "" });
    const grid = svg("path", { class: "gridline", d: "M0 0H100M0 50H100M0 100H100" });
    const drawing = svg("svg", { viewBox: "0 0 100 100", preserveAspectRatio: "none", class: "chart", role: "img", "aria-label": "Age of each answer over the last 30 seconds" });
    drawing.append(grid, this.line);
    this.marks = [1, 0.5, 0].map((part) => [el("span"), part]);
    this.element = el("section", { className: "card", ariaLabel: "Ages" },
      el("h2", {}, "Age of each answer"),
      el("div", { className: "plot" }, el("div", { className: "marks" }, ...this.marks.map(([mark]) => mark)), drawing,
        el("div", { className: "times" }, el("span", {}, "30 s ago"), el("span", {}, "15 s"), el("span", {}, "now"))),
      el("p", { className: "help" }, "From a frame's capture to its last answer on this page."));
    this.reset();
  }

  reset() {
    this.ages = [];
    this.draw();
  }

  add(age) {
    if (!Number.isFinite(age)) return;
    this.ages.push([performance.now(), age]);
    this.draw();
  }

  draw() {
    const now = performance.now();
    while (this.ages.length && this.ages[0][0] < now - SPAN) this.ages.shift();
    const most = Math.max(0, ...this.ages.map(([, age]) => age)), top = TOPS.find((each) => each >= most) ?? most;
    for (const [mark, part] of this.marks) mark.textContent = ms(top * part);
    const points = this.ages.map(([time, age]) => `${(100 - (100 * (now - time)) / SPAN).toFixed(2)},${(100 - (100 * age) / top).toFixed(1)}`);
    this.line.setAttribute("points", points.join(" "));
  }
}
