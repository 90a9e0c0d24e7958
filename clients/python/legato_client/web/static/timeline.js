// The live timeline of the engines: `mountTimeline(element, {url})`.

import { LABELS, at, coloursOf, draw, duration, heightOf, lanesOf } from "./timeline-canvas.js";
import { figuresView, fillFigures } from "./timeline-figures.js";
import { NAMES, Store } from "./timeline-store.js";
import { follow, reason } from "./timeline-stream.js";

const WINDOWS = [2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6, 2e6, 5e6, 1e7, 2e7]; // microseconds
const LAG = 150_000; // microseconds behind the newest, so that a late message leaves no hole at the right
const FIGURES = 2000; // milliseconds between two updates of the figures, which a screen reader reads out
const LEGEND = {
  forward: "forward", sample: "sample", copy: "copy to the host", commit: "commit", idle: "bubble: device idle",
  held: "slot in use", plan: "plan", launch: "launch", finalize: "enqueue sampling", wait: "host waits",
};
const SHORT = { finalize: "enqueue", idle: "bubble" };

/**
 * Show the timeline in the element until `destroy()`.
 *
 * `url` is the stream of events; `depthUrl` sets the pipeline's depth, by default `depth` beside it; `headers` go with
 * both. `empty` is shown while no launch has come. Nothing is asked of the server while the element cannot be seen.
 */
export function mountTimeline(element, { url, depthUrl = null, headers = {}, empty = "" }) {
  return new Timeline(element, new URL(url, document.baseURI), depthUrl, headers, empty);
}

class Timeline {
  constructor(element, url, depthUrl, headers, empty) {
    this.empty = made("p", { className: "timeline-empty" }, empty);
    this.url = url;
    this.depthUrl = depthUrl ?? new URL("depth", url);
    this.headers = headers;
    this.stores = new Map(); // by the engine's number
    this.lanes = [];
    this.span = 2e5;
    this.right = 0; // where it is paused
    this.paused = false;
    this.chosen = null;
    this.skew = -Infinity; // of the server's clock to this page's, in microseconds
    this.dirty = true;
    this.notBefore = 0;
    this.still = matchMedia("(prefers-reduced-motion: reduce)");
    this.#build(element);
    this.#listen();
    this.seen = new IntersectionObserver((entries) => this.#show(entries.at(-1).isIntersecting));
    this.seen.observe(this.root);
    this.ticking = setInterval(() => this.#tick(), FIGURES);
  }

  destroy() {
    this.#show(false);
    this.seen.disconnect();
    this.resized.disconnect();
    clearInterval(this.ticking);
    this.root.remove();
  }

  // ---------------------------------------------------------------- the stream

  #show(visible) {
    if (!visible) {
      this.connection?.abort();
      cancelAnimationFrame(this.frame);
      this.connection = null;
      return;
    }
    if (this.connection) return;
    this.connection = new AbortController();
    follow(this.url, this.headers, this.connection.signal, (message) => this.#receive(message), (state) => {
      this.state.textContent = state === "live" && this.paused ? "paused" : state;
    });
    this.#animate();
  }

  #receive(message) {
    this.depthSwitch.hidden = !message.switch;
    if (!message.launches.length && !message.started) return;
    let store = this.stores.get(message.engine);
    if (!store) {
      store = new Store();
      this.stores.set(message.engine, store);
      this.stores = new Map([...this.stores].sort(([a], [b]) => a - b));
    }
    const depth = store.depth;
    this.notice.textContent = store.add(message) || this.notice.textContent;
    this.skew = Math.max(this.skew, store.latest - performance.now() * 1000);
    if (!this.lanes.some((lane) => lane.store === store) || depth !== store.depth) {
      this.lanes = lanesOf(this.stores);
      this.#resize();
      this.#tick();
    }
    this.#setEmpty();
    this.dirty = true;
  }

  /** Without launches the canvas would be blank: say what to do instead. */
  #setEmpty() {
    this.empty.hidden = [...this.stores.values()].some((store) => store.size > 0);
    this.body.hidden = !this.empty.hidden;
  }

  async #setDepth(depth) {
    const response = await fetch(this.depthUrl, {
      method: "POST",
      headers: { "Content-Type": "application/json", ...this.headers },
      body: JSON.stringify({ depth }),
    }).catch((error) => ({ ok: false, json: () => ({ message: error.message }) }));
    this.notice.textContent = response.ok ? `depth ${depth} from the next step on` : await reason(response);
  }

  // ---------------------------------------------------------------- what is shown

  get #view() {
    const right = this.paused ? this.right : this.#now();
    return { left: right - this.span, right };
  }

  /** The right end: now while the engine works. The last launches stay in view while it does not. */
  #now() {
    const latest = this.#latest();
    return this.still.matches ? latest : Math.min(performance.now() * 1000 + this.skew - LAG, latest + this.span / 10);
  }

  /** A frame that took long is followed by a pause, so that drawing takes a third of the time at most. */
  #animate() {
    this.frame = requestAnimationFrame((now) => {
      if (this.connection) this.#animate();
      const right = this.#now(), moves = !this.paused && right !== this.shown;
      this.shown = right;
      if (now < this.notBefore || !(this.dirty || moves)) return;
      this.dirty = false;
      const begun = performance.now();
      this.#draw();
      this.notBefore = now + 3 * (performance.now() - begun);
    });
  }

  #latest() {
    return Math.max(0, ...[...this.stores.values()].map((store) => store.latest));
  }

  #draw() {
    draw(this.context, this.width, this.lanes, this.#view, this.colours, this.chosen);
  }

  #resize() {
    const ratio = devicePixelRatio || 1, height = heightOf(this.lanes);
    this.width = Math.max(this.canvas.clientWidth, LABELS + 100);
    this.canvas.width = Math.round(this.width * ratio);
    this.canvas.height = Math.round(height * ratio);
    this.canvas.style.height = `${height}px`;
    this.context.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.dirty = true;
  }

  #tick() {
    this.colours = coloursOf(this.root);
    fillFigures(this.figures, this.stores);
    for (const button of this.depthSwitch.querySelectorAll("button")) {
      const depths = [...this.stores.values()].map((store) => store.depth);
      button.ariaPressed = String(depths.includes(Number(button.value)));
    }
    this.dirty = true;
  }

  #pause(paused) {
    if (paused && !this.paused) this.right = this.#now();
    this.paused = paused;
    this.pauseButton.ariaPressed = String(paused);
    this.state.textContent = paused ? "paused" : this.connection ? "live" : "";
    this.dirty = true;
  }

  #zoom(steps) {
    const index = WINDOWS.findIndex((each) => each >= this.span) + steps;
    this.span = WINDOWS[Math.min(Math.max(index, 0), WINDOWS.length - 1)];
    this.window.value = String(this.span);
    this.dirty = true;
  }

  // ---------------------------------------------------------------- one launch

  #choose(found) {
    this.chosen = found && { engine: found.lane.engine, number: found.number };
    this.inspected.textContent = found ? words(found.lane, found.number, this.stores.size > 1) : "";
    this.dirty = true;
  }

  #move(by) {
    this.#pause(true);
    const lane = this.lanes.find((each) => each.engine === (this.chosen?.engine ?? each.engine));
    if (!lane?.store.size) return;
    const { store } = lane, now = this.chosen?.number ?? store.after(this.right);
    const number = Math.min(Math.max(now + by, store.first), store.next - 1);
    const { start, end } = store.read(number);
    if (end > this.right) this.right = end + this.span / 4;
    if (start < this.right - this.span) this.right = start + this.span * 3 / 4;
    this.#choose({ lane, number });
  }

  // ---------------------------------------------------------------- the elements

  #build(element) {
    const style = made("link", { rel: "stylesheet", href: new URL("timeline.css", import.meta.url).href });
    style.addEventListener("load", () => this.#tick());
    this.pauseButton = made("button", { type: "button", ariaPressed: "false" }, "Pause");
    this.window = made("select", {}, ...WINDOWS.map((each) =>
      made("option", { value: String(each), selected: each === this.span }, duration(each))));
    this.depthSwitch = made("fieldset", { hidden: true }, made("legend", {}, "Pipeline depth"),
      made("button", { type: "button", value: "1" }, "1: blocking"), made("button", { type: "button", value: "2" }, "2: pipelined"));
    this.state = made("span", { className: "timeline-state", role: "status" }, "connecting");
    this.notice = made("span", { role: "status" });
    this.canvas = made("canvas", { tabIndex: 0, role: "img" });
    this.canvas.ariaLabel = "What the engines' slots, device and host do. Space pauses, the arrows go from launch to "
      + "launch, plus and minus zoom.";
    this.inspected = made("p", { className: "timeline-chosen", role: "status" });
    const { view, help } = figuresView();
    this.figures = view;
    this.figures.ariaLive = "polite";
    const legend = made("ul", { className: "timeline-legend" }, ...Object.entries(LEGEND).map(([name, text]) =>
      made("li", {}, made("i", { className: name }), text)));
    const bar = made("div", { className: "timeline-bar" }, this.pauseButton,
      made("label", {}, "Window ", this.window), this.depthSwitch, this.notice);
    const axis = made("p", { className: "timeline-axis" }, "Time before the right end, which is now while the engine works. Point at a launch, or press the arrow keys, for its details.");
    this.body = made("div", {}, this.figures, bar, this.canvas, axis, this.inspected, legend, help);
    this.root = made("div", { className: "timeline" }, style, this.state, this.empty, this.body);
    this.#setEmpty();
    element.replaceChildren(this.root);
    this.context = this.canvas.getContext("2d");
    this.colours = coloursOf(this.root);
    this.#resize();
  }

  #listen() {
    const { canvas } = this;
    this.resized = new ResizeObserver(() => this.#resize());
    this.resized.observe(canvas);
    this.pauseButton.addEventListener("click", () => this.#pause(!this.paused));
    this.window.addEventListener("change", () => { this.span = Number(this.window.value); this.dirty = true; });
    this.depthSwitch.addEventListener("click", (event) => {
      if (event.target.value) this.#setDepth(Number(event.target.value));
    });
    canvas.addEventListener("keydown", (event) => {
      const act = {
        " ": () => this.#pause(!this.paused), ArrowLeft: () => this.#move(-1), ArrowRight: () => this.#move(1),
        "+": () => this.#zoom(-1), "=": () => this.#zoom(-1), "-": () => this.#zoom(1), Escape: () => this.#choose(null),
      }[event.key];
      if (!act) return;
      event.preventDefault();
      act();
    });
    canvas.addEventListener("pointermove", (event) => this.#point(event));
    canvas.addEventListener("pointerdown", (event) => { this.dragged = event.offsetX; canvas.setPointerCapture(event.pointerId); });
    canvas.addEventListener("pointerup", () => { this.dragged = undefined; });
    canvas.addEventListener("pointercancel", () => { this.dragged = undefined; });
  }

  #point({ offsetX, offsetY, buttons }) {
    if (buttons && this.dragged !== undefined) {
      this.#pause(true);
      this.right -= (offsetX - this.dragged) * this.span / (this.width - LABELS);
      this.dragged = offsetX;
      this.dirty = true;
    } else {
      this.#choose(at(this.lanes, this.width, this.#view, offsetX, offsetY));
    }
  }
}

/** A launch in a sentence. */
function words({ engine, store }, number, names) {
  const launch = store.read(number), parts = new Map();
  store.spans(number, (name, _, length) => {
    const word = SHORT[NAMES[name]] ?? NAMES[name];
    parts.set(word, (parts.get(word) ?? 0) + length);
  });
  const counts = [`${launch.rows} rows`, `${launch.tokens} tokens`];
  if (launch.riding) counts.push(`${launch.riding} decodes ride along`);
  if (launch.zombies) counts.push(`${launch.zombies} had ended`);
  const where = (names ? `engine ${engine}, ` : "") + (launch.slot < 0 ? "" : `slot ${launch.slot}, `);
  return `Launch ${launch.launch}: ${launch.kind}, ${where}${counts.join(", ")}. `
    + [...parts].map(([name, length]) => `${name} ${duration(length)}`).join(" · ");
}

function made(tag, properties, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}
