// The tab "Session": frames of a clip through sessions, up to 30 a second. The newest frame wins here
// too: a frame is sent only when the one before has left, and the server drops what is late. A lost
// server is looked for until it is back, and every frame that was captured has one outcome.

import { byId, el, failureView, ms } from "./dom.js";
import { openSource } from "./frames.js";
import { AgeChart, Figures, Tracks } from "./session-view.js";
import { labelOf, Overlay } from "./overlay.js";
import { Live } from "./session-socket.js";
import { NOUNS, Scene } from "./scene.js";
import { Mistake, numberIn, withoutMistake } from "./tasks.js";

const WIDTH = 480; // pixels of a frame that is sent
const QUALITY = 0.8; // of its JPEG file
const OLD = 150; // milliseconds from which the label of an untracked object tells its age, as the clip has moved on
const RETRY = 500; // milliseconds until a lost server is looked for again
const REDRAW = 24; // milliseconds at least between two frames here: without a GPU the browser takes the server's cores
const DRAIN = 10_000; // milliseconds that frames in flight have after Stop
const TRANSIENT = ["UNAVAILABLE", "ABORTED", "CANCELLED", "DEADLINE_EXCEEDED", "INTERNAL", "RESOURCE_EXHAUSTED"];

const clock = () => performance.timeOrigin + performance.now();

/** The bytes at once: browsers encode for `toBlob` when they are idle, which is seconds later while a clip is drawn. */
function jpegOf(canvas) {
  const text = atob(canvas.toDataURL("image/jpeg", QUALITY).split(",")[1]);
  return Uint8Array.from(text, (character) => character.charCodeAt(0));
}

export function startSession(server) {
  new SessionTab(server);
}

class SessionTab {
  constructor(server) {
    this.running = null;
    this.lacks = ""; // why the server's model can hold no session of this page
    this.build();
    if (server.facts) this.suit(server.facts);
    document.addEventListener("server", (event) => this.suit(event.detail));
    document.addEventListener("tab", (event) => {
      if (event.detail !== "session") this.stop();
    });
  }

  build() {
    const option = (value, text) => new Option(text, value);
    this.kind = el("select", {}, option("scene", "Bundled scene"), option("file", "Video file"), option("camera", "Webcam"));
    this.file = el("input", { type: "file", accept: "video/*", ariaLabel: "Video file", hidden: true });
    this.nouns = el("input", { value: NOUNS.join(", "), autocomplete: "off" });
    this.least = el("input", { inputMode: "decimal", placeholder: "0 to 1", autocomplete: "off" });
    this.tracks = el("input", { type: "checkbox", checked: true });
    this.policy = el("select", {}, option("latest_wins", "answer the newest frame"), option("preempt", "newest frame stops older work"), option("every_frame", "answer every frame"));
    this.age = el("input", { value: "2", inputMode: "decimal", autocomplete: "off" });
    this.rate = el("input", { type: "range", min: 1, max: 30, value: 30, ariaLabel: "Frames per second" });
    this.rateText = el("output", {}, "30");
    this.start = el("button", { type: "submit", className: "primary" }, "Start");
    this.start.setAttribute("form", "session");
    this.halt = el("button", { type: "button", disabled: true }, "Stop");
    this.problem = el("p", { className: "failure", role: "alert", hidden: true });
    const form = el("form", { className: "card", id: "session", ariaLabel: "Session" },
      el("h2", {}, "Session"),
      el("div", { className: "grid" },
        el("label", {}, "Clip", this.kind), this.file,
        el("label", {}, "Objects, separated by commas", this.nouns),
        el("label", {}, "Min confidence", this.least),
        el("label", { className: "check" }, this.tracks, "Track objects"),
        el("label", { className: "whole" }, "If frames come faster than answers", this.policy),
        el("label", {}, "Max frame age, seconds", this.age),
        el("label", {}, "Frames per second", el("span", { className: "range" }, this.rate, this.rateText))),
      this.problem);
    this.state = el("div", { className: "help", role: "status" });
    this.canvas = el("canvas", { width: WIDTH, height: WIDTH * 0.75, role: "img", ariaLabel: "The clip" });
    this.frame = el("div", { className: "frame" }, this.canvas);
    this.overlay = new Overlay(this.frame);
    this.figures = new Figures();
    this.chart = new AgeChart();
    byId("panel-session").append(el("div", { className: "columns" },
      el("div", { className: "card look" }, el("h2", { className: "hidden" }, "Clip"), el("div", { className: "stage full" }, this.frame), el("div", { className: "actions" }, this.start, this.halt), this.state),
      el("div", { className: "side" }, form, this.figures.element, this.chart.element)));
    this.legend = el("p", { className: "help legend", hidden: true },
      el("span", { className: "key" }), "where each object is now, extrapolated", el("span", { className: "key faint" }), "where it was measured");
    this.start.parentElement.before(this.legend);
    this.showPoster();
    this.kind.addEventListener("change", () => {
      this.file.hidden = this.kind.value !== "file";
    });
    this.rate.addEventListener("input", () => {
      this.rateText.textContent = this.rate.value;
    });
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.begin();
    });
    this.halt.addEventListener("click", () => this.stop());
  }

  /** Say before a start what a start would fail with. */
  suit({ models: [model] }) {
    const able = !model?.tasks.length || model.tasks.includes("detect");
    this.lacks = able ? "" : `${model.name} cannot detect objects in images, which a session here needs`;
    this.start.disabled = this.running !== null || this.lacks !== "";
    if (this.running || (!this.lacks && this.state.hasChildNodes())) return;
    this.state.textContent = this.lacks || "Press Start: the clip is streamed, and boxes follow its objects.";
  }

  /** The bundled scene stands still until the first start. */
  async showPoster() {
    const scene = new Scene();
    await scene.ready;
    if (!this.running) scene.draw(this.canvas.getContext("2d"), this.canvas.width, this.canvas.height);
  }

  async begin() {
    let opening;
    if (!withoutMistake(this.problem, () => { opening = this.opening(); })) return;
    this.toggle(true);
    this.figures.reset();
    this.chart.reset();
    let source;
    try {
      source = await openSource(this.kind.value, this.file.files[0]);
    } catch (error) {
      this.toggle(false);
      this.state.replaceChildren(failureView({ message: error.message }));
      return;
    }
    const { width, height } = source;
    this.canvas.width = WIDTH;
    this.canvas.height = Math.round((WIDTH * height) / width);
    const layers = new Map(opening.tasks.map((task, index) => [task.task_id, this.overlay.layer(index)]));
    const now = opening.tasks.map((_, index) => this.overlay.layer(index));
    this.running = { source, opening, layers, now, tracks: new Tracks(), sessions: 0, next: 0, drawn: 0, isStopping: false };
    this.legend.hidden = !this.tracks.checked;
    this.connect(this.running);
    requestAnimationFrame((time) => this.tick(time));
  }

  /** Open a session; another one takes a lost one's place. Its tracks are numbered anew, so they get its number. */
  connect(running) {
    if (this.running !== running || running.isStopping) return;
    const number = ++running.sessions;
    const live = running.live = new Live(running.opening, {
      told: (message) => this.take(running, message, number > 1 ? `${number}-` : ""),
      ended: (failure, numOpen) => this.lose(running, live, failure, numOpen),
    });
  }

  lose(running, live, failure, numOpen) {
    if (numOpen) this.figures.count("lost", numOpen);
    if (this.running !== running || running.live !== live) return;
    if (running.isStopping) return this.end(failure);
    if (failure && !TRANSIENT.includes(failure.code)) return this.end(failure);
    const message = failure?.message ?? "the server ended the session";
    this.state.textContent = `Reconnecting: ${message}.`;
    running.live = null;
    running.sessions -= live.sequence === 0; // none of its tracks was shown
    setTimeout(() => this.connect(running), RETRY);
  }

  opening() {
    const nouns = this.nouns.value.split(",").map((noun) => noun.trim()).filter(Boolean);
    if (!nouns.length) throw new Mistake(this.nouns, "Name at least one object, such as dog.");
    const least = numberIn(this.least, "Min confidence", { least: 0, most: 1 });
    const age = numberIn(this.age, "Max frame age", { least: 0.01, most: 3600 });
    const wanted = { ...(least === undefined ? {} : { min_confidence: least }), ...(this.tracks.checked ? { tracking: { max_unseen: `${Tracks.UNSEEN / 1000}s` } } : {}) };
    return {
      tasks: [...new Set(nouns)].map((noun) => ({ task_id: noun, detect: { object: noun, ...wanted } })),
      policy: this.policy.value,
      ...(age === undefined ? {} : { max_frame_age: age }),
    };
  }

  /** Take no more frames, and wait for the outcomes of those in flight. */
  stop() {
    const { running } = this;
    if (!running || running.isStopping) return;
    running.isStopping = true;
    this.halt.disabled = true;
    this.state.textContent = "Stopping: waiting for the frames in flight.";
    const { live } = running;
    if (!live) return this.end(null);
    setTimeout(() => live.end(null), DRAIN);
    live.finish();
  }

  end(failure) {
    const { running } = this;
    this.running = null;
    running.source.close();
    for (const layer of [...running.layers.values(), ...running.now]) layer.remove();
    this.legend.hidden = true;
    this.toggle(false);
    this.state.textContent = `Stopped. ${this.figures.account}`;
    if (failure) this.state.append(failureView(failure));
  }

  toggle(running) {
    this.start.disabled = running || this.lacks !== "";
    this.halt.disabled = !running;
    if (running) this.state.textContent = "Connecting.";
  }

  // ---------------------------------------------------------------- frames out

  /** Up to 40 times a second the clip and its boxes move on, and some frames are sent. */
  tick(time) {
    const { running, canvas } = this;
    if (!running) return;
    requestAnimationFrame((later) => this.tick(later));
    if (time - running.drawn < REDRAW) return;
    running.drawn = time;
    running.source.draw(canvas.getContext("2d"), canvas.width, canvas.height);
    running.tracks.draw(running.now, clock());
    if (running.isStopping || time < running.next) return;
    const period = 1000 / Number(this.rate.value);
    running.next = Math.max(running.next + period, time - period);
    if (running.live?.isOpen) this.sendFrame(running);
  }

  /** A frame that cannot leave at once is not sent. */
  sendFrame(running) {
    this.figures.count("taken");
    const isSent = !running.live.isBusy && running.live.send(clock(), jpegOf(this.canvas));
    if (!isSent) this.figures.count("unsent");
  }

  // ---------------------------------------------------------------- answers in

  take(running, message, prefix) {
    this.figures.take(message);
    if (running.isStopping) return;
    if (message.type === "opened") {
      this.state.textContent = `Connected to ${message.model}.`;
    } else if (message.type === "go_away") {
      this.state.textContent = `The server ends this session in ${message.time_left} s; another one follows.`;
    } else if (message.type === "result") {
      this.showResult(running, message, prefix);
    }
  }

  /** Tracked objects are drawn where they are now, and faintly where they were measured. */
  showResult({ layers, now, tracks }, { task_id: taskId, outcome, captured, last }, prefix) {
    const layer = layers.get(taskId), age = clock() - captured;
    layer.clear();
    if (outcome.type === "failed") {
      this.state.replaceChildren(failureView(outcome));
      return;
    }
    if (this.state.querySelector(".failure")) this.state.textContent = "Answering again.";
    for (const object of outcome.objects ?? []) {
      const name = { ...object, track_id: object.track_id && prefix + object.track_id };
      if (object.motion) tracks.note(name, captured, now[[...layers.keys()].indexOf(taskId)]);
      layer.box(object.box, labelOf(name) + (age > OLD ? `, ${ms(age)} old` : ""), { faint: Boolean(object.motion) });
    }
    if (!last) return;
    this.figures.age(age);
    this.chart.add(age);
  }
}
