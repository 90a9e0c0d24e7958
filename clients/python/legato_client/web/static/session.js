// The tab "Session": frames of a clip through one session, up to 30 a second. The newest frame wins
// here too: a frame is sent only when the one before has left, and the server drops what is late.

import { byId, el, failureView, ms } from "./dom.js";
import { openSource } from "./frames.js";
import { AgeChart, Figures } from "./session-view.js";
import { labelOf, Overlay } from "./overlay.js";
import { Live } from "./session-socket.js";
import { NOUNS } from "./scene.js";
import { numeric } from "./tasks.js";

const WIDTH = 480; // pixels of a frame that is sent
const QUALITY = 0.8; // of its JPEG file
const OLD = 150; // milliseconds from which a label tells its age, as the clip has moved on

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
    addEventListener("pagehide", () => this.stop());
  }

  build() {
    const option = (value, text) => new Option(text, value);
    this.kind = el("select", {}, option("scene", "Bundled scene"), option("file", "Video file"), option("camera", "Webcam"));
    this.file = el("input", { type: "file", accept: "video/*", ariaLabel: "Video file", hidden: true });
    this.nouns = el("input", { value: NOUNS.join(", "), autocomplete: "off" });
    this.least = el("input", { inputMode: "decimal", placeholder: "any", autocomplete: "off" });
    this.tracks = el("input", { type: "checkbox", checked: true });
    this.policy = el("select", {}, option("latest_wins", "newest frame wins"), option("preempt", "newest frame stops older work"), option("every_frame", "every frame"));
    this.age = el("input", { value: "2", inputMode: "decimal", autocomplete: "off" });
    this.rate = el("input", { type: "range", min: 1, max: 30, value: 30, ariaLabel: "Frames a second" });
    this.rateText = el("output", {}, "30");
    this.start = el("button", { type: "submit", className: "primary" }, "Start");
    this.halt = el("button", { type: "button", disabled: true }, "Stop");
    const form = el("form", { className: "card", ariaLabel: "Session" },
      el("h2", {}, "Session"),
      el("div", { className: "grid" },
        el("label", {}, "Clip", this.kind), this.file,
        el("label", {}, "Detect, separated by commas", this.nouns),
        el("label", {}, "Least confidence, 0 to 1", this.least),
        el("label", { className: "check" }, this.tracks, "follow objects from frame to frame"),
        el("label", {}, "When frames come faster than answers", this.policy),
        el("label", {}, "Oldest frame answered, seconds", this.age),
        el("label", {}, "Frames a second", el("span", { className: "range" }, this.rate, this.rateText))),
      el("div", { className: "actions" }, this.start, this.halt));
    this.state = el("div", { className: "help", role: "status" });
    this.canvas = el("canvas", { width: WIDTH, height: WIDTH * 0.75, role: "img", ariaLabel: "The clip" });
    this.frame = el("div", { className: "frame" }, this.canvas);
    this.overlay = new Overlay(this.frame);
    this.figures = new Figures();
    this.chart = new AgeChart();
    byId("panel-session").append(el("div", { className: "columns" },
      el("div", { className: "card look" }, el("h2", { className: "hidden" }, "Clip"), el("div", { className: "stage full" }, this.frame), this.state),
      el("div", { className: "side" }, form, this.figures.element, this.chart.element)));
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
    this.lacks = able ? "" : `${model.name} cannot detect objects in pictures, which a session here asks for`;
    this.start.disabled = this.running !== null || this.lacks !== "";
    if (!this.running) this.state.textContent = this.lacks;
  }

  async begin() {
    this.stop();
    this.toggle(true);
    this.figures.reset();
    this.chart.reset();
    let source;
    try {
      source = await openSource(this.kind.value, this.file.files[0]);
    } catch (error) {
      this.complain({ code: "CLIP", message: error.message, hint: "" });
      return;
    }
    const { width, height } = source;
    this.canvas.width = WIDTH;
    this.canvas.height = Math.round((WIDTH * height) / width);
    this.layers = new Map(this.tasks().map((task, index) => [task.task_id, this.overlay.layer(index)]));
    const live = new Live(this.opening(), {
      told: (message) => this.take(message),
      failed: (failure) => {
        if (this.running?.live === live) this.complain(failure);
      },
    });
    this.running = { source, live, next: 0, encoding: false };
    requestAnimationFrame((now) => this.tick(now));
  }

  tasks() {
    const nouns = this.nouns.value.split(",").map((noun) => noun.trim()).filter(Boolean);
    const least = this.least.value.trim();
    const wanted = { ...(least ? { min_confidence: numeric(least) } : {}), ...(this.tracks.checked ? { tracking: {} } : {}) };
    return [...new Set(nouns)].map((noun) => ({ task_id: noun, detect: { object: noun, ...wanted } }));
  }

  opening() {
    const age = this.age.value.trim();
    return {
      tasks: this.tasks(), policy: this.policy.value,
      ...(age ? { max_frame_age: numeric(age) } : {}),
    };
  }

  stop() {
    if (!this.running) return;
    const { live, source } = this.running;
    this.running = null;
    live.close();
    source.close();
    for (const layer of this.layers.values()) layer.remove();
    this.toggle(false);
    this.state.textContent = "stopped";
  }

  complain(failure) {
    this.stop();
    this.toggle(false);
    this.state.replaceChildren(failureView(failure));
  }

  toggle(running) {
    this.start.disabled = running || this.lacks !== "";
    this.halt.disabled = !running;
    if (running) this.state.textContent = "opening";
  }

  // ---------------------------------------------------------------- frames out

  tick(now) {
    const running = this.running;
    if (!running) return;
    requestAnimationFrame((later) => this.tick(later));
    if (now < running.next) return;
    const period = 1000 / Number(this.rate.value);
    running.next = Math.max(running.next + period, now - period);
    const { canvas } = this;
    running.source.draw(canvas.getContext("2d"), canvas.width, canvas.height);
    if (running.live.isOpen) this.sendFrame(running);
  }

  /** A frame that cannot leave at once is left out. */
  sendFrame(running) {
    if (running.encoding || running.live.isBusy) {
      this.figures.missed();
      return;
    }
    running.encoding = true;
    const captured = performance.timeOrigin + performance.now();
    this.canvas.toBlob(async (blob) => {
      const data = await blob.arrayBuffer();
      running.encoding = false;
      if (this.running === running) running.live.send(captured, data);
    }, "image/jpeg", QUALITY);
  }

  // ---------------------------------------------------------------- answers in

  take(message) {
    if (!this.running) return;
    this.figures.take(message);
    if (message.type === "opened") {
      this.state.textContent = `session ${message.session_id} of ${message.model}, ${message.max_in_flight} at a time`;
    } else if (message.type === "go_away") {
      this.state.textContent = `the server ends this session in ${message.time_left} s`;
    } else if (message.type === "result") {
      this.showResult(message);
    }
  }

  showResult({ task_id: taskId, outcome, age, last }) {
    const layer = this.layers.get(taskId);
    layer?.clear();
    if (outcome.type === "failed") {
      this.state.replaceChildren(failureView(outcome));
      return;
    }
    if (this.state.querySelector(".failure")) this.state.textContent = "answering again";
    const late = age > OLD ? `, ${ms(age)} old` : "";
    for (const object of outcome.objects ?? []) layer?.box(object.box, labelOf(object) + late);
    if (!last) return;
    this.figures.age(age);
    this.chart.add(age);
  }
}
