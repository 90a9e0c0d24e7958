// One task that runs: its card among the answers, and its layer over the image.

import { generate, told } from "./api.js";
import { showCode } from "./code.js";
import { el, failureView, ms } from "./dom.js";
import { labelOf } from "./overlay.js";
import { tokensView } from "./tokens.js";

const MOST_LISTED = 200; // found objects in a card; all are drawn

export class Run {
  /** `failures` has those that other runs show; what is in it is not shown again. */
  constructor(row, task, colour, picture, options, failures) {
    this.task = task;
    this.failures = failures;
    this.picture = picture;
    this.options = options;
    this.row = row;
    this.noun = row.noun;
    this.running = false;
    this.count = 0;
    this.abort = new AbortController();
    this.build(row.title, colour);
    this.layer = picture.overlay?.layer(colour);
  }

  build(title, colour) {
    this.status = el("span", { className: "status" }, "waiting");
    this.cancel = el("button", { type: "button", className: "small", ariaLabel: `Stop: ${title}` }, "Stop");
    this.cancel.addEventListener("click", () => this.stop());
    this.codeButton = el("button", { type: "button", className: "small", ariaLabel: `Code: ${title}` }, "Code");
    this.codeButton.addEventListener("click", () => showCode(this.question("picture", this.picture.name)));
    this.thoughts = el("p", { className: "thoughts", hidden: true });
    this.words = el("p", { className: "words", hidden: true, ariaLive: "polite" });
    this.found = el("ol", { className: "found", hidden: true });
    this.times = el("p", { className: "times" });
    this.element = el("article", { className: `answer ink-${colour % 6}`, ariaLabel: title, ariaBusy: "true" },
      el("header", {}, el("span", { className: "swatch", ariaHidden: "true" }), el("h3", {}, title), this.status, this.cancel, this.codeButton),
      this.thoughts, this.words, this.found, this.times);
  }

  question(key, value) {
    return { ...(value ? { [key]: value } : {}), task: this.task, options: this.options };
  }

  async start() {
    this.running = true;
    this.started = performance.now();
    try {
      await this.listen(await this.picture.imageId());
    } catch (error) {
      await this.fail(error);
    }
    this.running = false;
    this.cancel.hidden = true;
    this.element.ariaBusy = "false";
  }

  /** An image that the server has forgotten is sent once more. */
  async fail(error) {
    if (error.name === "AbortError") return;
    if (told(error).reason === "IMAGE_NOT_FOUND" && !this.repeated) {
      this.repeated = true;
      try {
        await this.listen(await this.picture.imageId(true));
      } catch (again) {
        await this.fail(again);
      }
      return;
    }
    const failure = told(error), ofFormat = failure.fields?.find(({ field }) => field.includes("response_format"));
    if (ofFormat) this.row.complain(ofFormat.description);
    const key = `${failure.reason || failure.code} ${failure.message}`;
    this.set(this.failures.has(key) ? "failed for the same reason" : "failed");
    if (!this.failures.has(key)) this.times.before(failureView(failure));
    this.failures.add(key);
  }

  async listen(imageId) {
    for await (const event of generate(this.question("image_id", imageId), this.abort.signal)) {
      this.first ??= performance.now() - this.started;
      this.take(event);
    }
  }

  stop() {
    if (!this.running) return;
    this.abort.abort();
    this.set("stopped");
    this.showTimes("stopped after");
  }

  forget() {
    this.abort.abort();
    this.layer?.remove();
  }

  // ---------------------------------------------------------------- events

  take(event) {
    if (!["queued", "started", "finished"].includes(event.type)) this.firstPart ??= performance.now() - this.started;
    switch (event.type) {
      case "queued": return this.set(`${event.position} ahead`);
      case "started": return this.set("decoding");
      case "text": return this.write(this.words, event.text);
      case "reasoning": return this.write(this.thoughts, event.text);
      case "object": return this.takeObject(event);
      case "point": return this.takePoint(event);
      case "outline": return this.takeOutline(event);
      case "finished": return this.finish(event.result);
      default: return undefined; // an event newer than this page
    }
  }

  write(paragraph, text) {
    paragraph.hidden = false;
    paragraph.append(text);
  }

  takeObject(object) {
    this.layer?.box(object.box, labelOf(object));
    this.listObject(object);
  }

  listObject(object) {
    const { x_min, y_min, x_max, y_max } = object.box;
    this.list(object, `${place(x_min, y_min)} to ${place(x_max, y_max)}`);
  }

  takePoint(object) {
    this.layer?.point(object.point, labelOf(object));
    this.listPoint(object);
  }

  listPoint(object) {
    this.list(object, place(object.point.x, object.point.y));
  }

  /** In the order of the result; while it was decoded they came as the model found them. */
  listAgain(result) {
    this.found.replaceChildren();
    this.count = 0;
    for (const object of result.objects ?? []) this.listObject(object);
    for (const object of result.points ?? []) this.listPoint(object);
    for (const object of result.segments ?? []) this.listOutline({ label: this.noun, ...object });
  }

  takeOutline(delta) {
    this.layer?.outline(delta.index, delta, this.noun);
    if (delta.box) this.listOutline({ label: this.noun, box: delta.box });
  }

  listOutline(object) {
    this.list(object, `outline from ${place(object.box.x_min, object.box.y_min)}`);
  }

  list(object, where) {
    this.count += 1;
    this.set(`${this.count} found`);
    if (this.count > MOST_LISTED) return;
    this.found.hidden = false;
    this.found.append(el("li", {}, el("span", {}, labelOf(object)), el("span", { className: "where" }, where)));
  }

  finish(result) {
    const lists = Object.values(result).filter(Array.isArray); // of what has a place in the image
    const outlines = lists.flat().filter((found) => "path" in found);
    for (const [index, outline] of outlines.entries()) this.layer?.whole(index, outline);
    if (Object.values(this.task)[0]?.order || outlines.length) this.listAgain(result);
    if (this.options.top_logprobs !== undefined && result.info.tokens.length) this.times.before(tokensView(result.info.tokens));
    const info = result.info, nothing = lists.length > 0 && this.count === 0;
    const cut = { length: "stopped at max tokens", max_objects: "stopped at max objects", cancelled: "stopped by an operator" };
    this.set(cut[info.finish_reason] ?? (nothing ? "nothing found" : this.count ? `${this.count} found` : "done"));
    this.showTimes("total", info);
  }

  set(text) {
    this.status.textContent = text;
  }

  showTimes(word, info) {
    const parts = [
      this.first === undefined ? null : ["first message", ms(this.first)],
      this.firstPart === undefined ? null : ["first result", ms(this.firstPart)],
      [word, ms(performance.now() - this.started)],
      info?.timings ? ["on the server", ms(info.timings.total * 1000)] : null,
      info?.usage ? ["tokens", `${info.usage.input_tokens} in, ${info.usage.output_tokens} out`] : null,
    ].filter(Boolean);
    this.times.replaceChildren(...parts.map(([name, value]) => el("span", {}, `${name} `, el("b", {}, value))));
  }
}

const place = (x, y) => `${x.toFixed(2)}, ${y.toFixed(2)}`;
