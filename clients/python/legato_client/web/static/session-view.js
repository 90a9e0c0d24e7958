// The figures of a session.

import { el, ms, svg } from "./dom.js";

const NAMES = {
  rate: "answered a second", age: "age of the latest", middle: "median age", sent: "frames sent", answered: "answered",
  dropped: "dropped by the server", skipped: "left out, no credit", missed: "left out, page busy", credits: "credits left",
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
    this.reasons = el("p", { className: "help" });
    this.element = el("section", { className: "card", ariaLabel: "Figures" },
      el("h2", {}, "Figures"), el("dl", { className: "figures" }, ...tiles), this.reasons);
    this.reset();
  }

  reset() {
    this.ages = [];
    this.drops = new Map();
    this.numMissed = 0;
    for (const value of this.values.values()) value.textContent = "–";
    this.reasons.textContent = "";
  }

  take({ type, stats, credits, reason }) {
    if (stats) {
      for (const key of ["sent", "answered", "dropped", "skipped"]) this.set(key, stats[key]);
    }
    if (credits !== undefined) this.set("credits", credits);
    if (type !== "dropped") return;
    this.drops.set(reason, (this.drops.get(reason) ?? 0) + 1);
    this.reasons.textContent = `Drops: ${[...this.drops].map(([name, count]) => `${name.replace("_", " ")} ${count}`).join(", ")}.`;
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

  missed() {
    this.numMissed += 1;
    this.set("missed", this.numMissed);
  }

  set(key, value) {
    this.values.get(key).textContent = String(value);
  }
}

const POINTS = 120;

/** The ages of the latest answers as a line, from 0 to the largest. */
export class AgeChart {
  constructor() {
    this.line = svg("polyline", { class: "line", points: "" });
    const drawing = svg("svg", { viewBox: `0 0 ${POINTS} 40`, preserveAspectRatio: "none", class: "chart", role: "img", "aria-label": "Ages of the latest answers" });
    drawing.append(this.line);
    this.scale = el("p", { className: "help" });
    this.element = el("section", { className: "card", ariaLabel: "Ages" },
      el("h2", {}, "Age of each answer"), drawing, this.scale);
    this.reset();
  }

  reset() {
    this.ages = [];
    this.line.setAttribute("points", "");
    this.scale.textContent = "From a frame's capture to its last answer on this page.";
  }

  add(age) {
    if (!Number.isFinite(age)) return;
    this.ages.push(age);
    if (this.ages.length > POINTS) this.ages.shift();
    const top = Math.max(...this.ages, 1);
    const points = this.ages.map((each, index) => `${index},${(39 - (38 * each) / top).toFixed(1)}`);
    this.line.setAttribute("points", points.join(" "));
    this.scale.textContent = `From a frame's capture to its last answer on this page; the top of the chart is ${ms(top)}.`;
  }
}
