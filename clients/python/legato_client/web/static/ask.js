// The tab "Ask": several tasks about one image, all at once.

import { Run } from "./run.js";
import { byId, say } from "./dom.js";
import { optionsOf, seesPictures, TaskRow, withoutMistake } from "./tasks.js";
import { SAMPLES } from "./picture.js";

const MOST_TASKS = 5; // a browser opens six connections to a host; one is left for the page

export function startAsk(picture) {
  new Ask(picture);
}

class Ask {
  constructor(picture) {
    this.picture = picture;
    this.rows = [];
    this.runs = new Set();
    this.lastRow = null;
    this.served = [];
    this.list = byId("tasks");
    this.isFresh = true; // nothing was asked or chosen
    this.addSample(SAMPLES[0]);
    this.listen();
    this.sample = picture.showSample(SAMPLES[0], true).catch(() => {}); // this process has gone: the page says so
  }

  /** The first answer comes without a click, once, if the model takes images and the tab is seen. */
  async greet() {
    await this.sample;
    const canSee = this.picture.server.facts && seesPictures(this.served);
    if (!this.isFresh || !canSee || byId("panel-ask").hidden) return;
    this.ask();
  }

  listen() {
    byId("add").addEventListener("click", () => this.add(this.usual, "").text.focus());
    byId("stop").addEventListener("click", () => this.stopAll());
    byId("questions").addEventListener("submit", (event) => {
      event.preventDefault();
      this.ask();
    });
    document.addEventListener("keydown", (event) => {
      if ((event.ctrlKey || event.metaKey) && event.key === "Enter" && !byId("panel-ask").hidden) this.ask();
      if (event.key === "Escape" && !byId("code").open) this.stopAll();
    });
    this.list.addEventListener("focusin", (event) => {
      this.lastRow = this.rows.find((row) => row.element.contains(event.target)) ?? null;
    });
    this.picture.addEventListener("picture", () => {
      this.isFresh &&= this.picture.name === SAMPLES[0].file;
      this.forget();
    });
    document.addEventListener("tab", () => this.greet());
    this.picture.addEventListener("sample", (event) => this.addSample(event.detail));
    this.picture.addEventListener("place", (event) => this.fillPlace(event.detail));
    document.addEventListener("server", (event) => {
      this.served = event.detail.models[0]?.tasks ?? [];
      byId("main").dataset.sees = seesPictures(this.served) ? "yes" : "no";
      this.suit();
      this.greet();
    });
  }

  add(skill, text) {
    const row = new TaskRow(skill, text, (gone) => this.remove(gone));
    row.allow(this.served);
    this.rows.push(row);
    this.list.append(row.element);
    this.refresh();
    return row;
  }

  /** The skill of a new row. */
  get usual() {
    return this.served.length && !this.served.includes("detect") ? "query" : "detect";
  }

  /** A question in place of what the server's model lacks. */
  suit() {
    this.rows.forEach((row) => row.allow(this.served));
    const canSee = seesPictures(this.served);
    const fitting = this.rows.filter((row) => row.isAllowed && (canSee || !this.isFresh));
    if (fitting.length === this.rows.length) return;
    this.list.replaceChildren(...fitting.map((row) => row.element));
    this.rows = fitting;
    if (!fitting.length) this.add("query", canSee ? "" : "Why is the sky blue?");
    this.refresh();
  }

  remove(row) {
    row.element.remove();
    this.rows = this.rows.filter((each) => each !== row);
    this.refresh();
    (this.rows.at(-1)?.text ?? byId("add")).focus();
  }

  refresh() {
    byId("add").disabled = this.rows.length >= MOST_TASKS;
    byId("stop").disabled = ![...this.runs].some((run) => run.running);
  }

  /** The tasks that suit a bundled image, in place of those that are there. */
  addSample(sample) {
    this.list.replaceChildren();
    this.rows = [];
    for (const [skill, text] of sample.tasks) this.add(skill, text);
    this.suit();
  }

  fillPlace(place) {
    const row = this.lastRow?.takesPlaces ? this.lastRow : this.rows.find((each) => each.takesPlaces);
    if (!row) return;
    row.setRegion(place);
    say(`region ${place}`);
  }

  ask() {
    this.isFresh = false;
    let asked;
    const isRight = withoutMistake(byId("problem"), () => {
      const options = optionsOf();
      asked = this.rows.map((row) => [row, row.task(), options]);
    });
    if (!isRight) return;
    this.forget();
    byId("no-answers").hidden = this.rows.length > 0;
    const failures = new Set(); // shown already
    for (const [colour, [row, task, options]] of asked.entries()) {
      const run = new Run(row, task, colour, this.picture, options, failures);
      this.runs.add(run);
      byId("answers").append(run.element);
      run.start().then(() => {
        this.refresh();
        if (this.runs.size && [...this.runs].every((each) => !each.running)) say("all answers are complete");
      });
    }
    this.refresh();
  }

  stopAll() {
    for (const run of this.runs) run.stop();
  }

  /** Answers about another image, or of the tasks before. */
  forget() {
    for (const run of this.runs) run.forget();
    this.runs.clear();
    byId("answers").replaceChildren();
    byId("no-answers").hidden = false;
    this.refresh();
  }
}
