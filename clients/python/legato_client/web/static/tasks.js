// The rows that say what is asked, and their form in the contract's JSON (legato.v1.Task).

import { byId, el } from "./dom.js";

const FORMATS = [["", "any text"], ["json_schema", "JSON schema"], ["choices", "choices"], ["regex", "regex"], ["grammar", "grammar"]];
const FORMAT_HINTS = {
  json_schema: '{"type": "object", "properties": {"count": {"type": "integer"}}, "required": ["count"]}',
  choices: "one a line", regex: "[0-9]{1,2} (apples|pears)", grammar: 'root ::= "yes" | "no"',
};
const LENGTHS = [["short", "short"], ["normal", "normal"], ["long", "long"]];

/** Each skill: its word, what a row asks for, and the task it makes. */
export const SKILLS = {
  detect: {
    title: "Detect", asks: "object", placeholder: "dog", example: "dog",
    kind: ({ text, wanted }) => ({ detect: { object: text, ...wanted } }), lists: true,
  },
  point: {
    title: "Point", asks: "object", placeholder: "red apple", example: "apple", places: true, lists: true,
    kind: ({ text, wanted, refs }) => ({ point: { object: text, ...wanted, ...refs } }),
  },
  segment: {
    title: "Segment", asks: "object", placeholder: "tree", example: "tree", places: true,
    kind: ({ text, refs }) => ({ segment: { object: text, ...refs } }),
  },
  caption: {
    title: "Caption", asks: "length",
    kind: ({ text }) => ({ caption: { length: `CAPTION_LENGTH_${(text || "normal").toUpperCase()}` } }),
  },
  query: {
    title: "Query", asks: "question", placeholder: "How many apples are there?", places: true, thinks: true,
    example: "How many apples are there?", formats: true,
    kind: ({ text, refs, thinks, format }) => ({ query: { question: text, ...(thinks ? { reasoning: true } : {}), ...refs, ...format } }),
  },
  gaze: {
    title: "Gaze", asks: "nothing", places: true, needs: "point",
    kind: ({ refs }) => ({ point: { object: "gaze", ...refs } }),
  },
};

/** What is wrong with a field, in words, before anything is asked. */
export class Mistake extends Error {
  constructor(input, message) {
    super(message);
    this.input = input;
  }
}

/** The number in a field, undefined if it is empty; throws a Mistake for any other. */
export function numberIn(input, name, { least = -Infinity, most = Infinity, whole = false } = {}) {
  const text = input.value.trim(), number = Number(text);
  if (!text) return undefined;
  if (!Number.isNaN(number) && number >= least && number <= most && (!whole || Number.isInteger(number))) return number;
  const range = most < Infinity ? ` from ${least} to ${most}` : least > -Infinity ? `, ${least} or more` : "";
  throw new Mistake(input, `${name} must be a ${whole ? "whole " : ""}number${range}, not “${text}”.`);
}

const given = (values) => Object.fromEntries(Object.entries(values).filter(([, value]) => value !== undefined && value !== ""));

/** "x y" or "left top right bottom" in fractions, as the contract's places; throws a Mistake. */
function regionIn(input) {
  const numbers = input.value.trim().split(/[\s,;]+/).filter(Boolean).map(Number);
  if (!numbers.length) return {};
  if (![2, 4].includes(numbers.length) || !numbers.every((number) => number >= 0 && number <= 1)) {
    throw new Mistake(input, `Region must be 2 or 4 numbers from 0 to 1, not “${input.value.trim()}”.`);
  }
  const [x, y, right, bottom] = numbers;
  const ref = numbers.length === 2
    ? { point: { x, y } } : { box: { x_min: x, y_min: y, x_max: right, y_max: bottom } };
  return { spatial_refs: [ref] };
}

/** Whether a model of these tasks takes images: one that only answers questions is a text model. */
export const seesPictures = (tasks) => !tasks.length || tasks.some((task) => task !== "query" && task in SKILLS);

let rows = 0;

/** One task to ask; `remove` is called by its button. */
export class TaskRow {
  constructor(skill, text, remove) {
    this.number = ++rows;
    this.skill = el("select", { ariaLabel: "Skill" },
      ...Object.entries(SKILLS).map(([name, { title }]) => new Option(title, name)));
    this.skill.value = skill;
    this.inputs = el("div", { className: "inputs" });
    const away = el("button", { type: "button", className: "icon", ariaLabel: "Remove this task" }, "×");
    away.addEventListener("click", () => remove(this));
    this.element = el("div", { className: "task", role: "group" }, this.skill, this.inputs, away);
    this.skill.addEventListener("change", () => this.build(""));
    this.build(text);
  }

  build(text) {
    const skill = SKILLS[this.skill.value];
    this.element.ariaLabel = `Task: ${skill.title}`;
    this.element.classList.toggle("sentence", skill.asks === "question");
    this.text = skill.asks === "length"
      ? el("select", { ariaLabel: "Length" }, ...LENGTHS.map(([name, value]) => new Option(name, value)))
      : el("input", { ariaLabel: skill.asks === "question" ? "Question" : "Object", placeholder: skill.placeholder ?? "", autocomplete: "off" });
    if (skill.asks === "length") this.text.value = text || "normal";
    else this.text.value = text || skill.example || "";
    const field = (properties) => el("input", { autocomplete: "off", ...properties });
    this.most = field({ inputMode: "numeric", placeholder: "no limit" });
    this.least = field({ inputMode: "decimal", placeholder: "0 to 1" });
    this.place = field({ placeholder: skill.needs ? "click the eye" : "whole image" });
    this.sorts = el("input", { type: "checkbox" });
    this.thinks = el("input", { type: "checkbox" });
    this.buildFormat();
    const label = (name, input) => el("label", {}, name, input);
    const check = (name, input) => el("label", { className: "check" }, input, name);
    const options = [
      ...(skill.lists ? [label("Max objects", this.most), label("Min confidence", this.least)] : []),
      skill.places ? label("Region", this.place) : null,
      skill.lists ? check("Sort by confidence", this.sorts) : null,
      skill.thinks ? check("Reasoning", this.thinks) : null,
      ...(skill.formats ? [label("Answer format", this.format), this.formatField] : []),
    ].filter(Boolean);
    this.options = el("details", { className: "more", open: Boolean(skill.needs) },
      el("summary", {}, "Options"), el("div", { className: "grid" }, ...options));
    this.inputs.replaceChildren(...[
      skill.asks === "nothing" ? null : this.text, options.length ? this.options : null,
    ].filter(Boolean));
  }

  /** The format of an answer: its language, then its source once one is chosen. */
  buildFormat() {
    this.format = el("select", {}, ...FORMATS.map(([name, title]) => new Option(title, name)));
    this.source = el("textarea", { rows: 3, spellcheck: false });
    this.sourceProblem = el("p", { className: "failure", role: "alert", id: `format-problem-${this.number}`, hidden: true });
    this.formatField = el("div", { className: "format", hidden: true }, this.source, this.sourceProblem);
    this.source.setAttribute("aria-describedby", this.sourceProblem.id);
    this.source.addEventListener("input", () => this.complain(""));
    this.format.addEventListener("change", () => {
      this.formatField.hidden = !this.format.value;
      this.source.ariaLabel = this.format.selectedOptions[0].text;
      this.source.placeholder = FORMAT_HINTS[this.format.value] ?? "";
      this.complain("");
    });
  }

  /** Show what is wrong with the format at its field, or nothing any more. */
  complain(problem) {
    this.sourceProblem.textContent = problem;
    this.sourceProblem.hidden = !problem;
    if (problem) this.source.ariaInvalid = "true";
    else this.source.removeAttribute("aria-invalid");
    if (problem) this.options.open = true;
  }

  /** The contract's format; throws a Mistake. */
  formatIn() {
    this.complain("");
    const language = this.format.value, text = this.source.value.trim();
    if (!language) return {};
    if (!text) throw new Mistake(this.source, `Answer format: type ${language === "choices" ? "choices, one a line" : `a ${this.source.ariaLabel}`}.`);
    const lines = text.split("\n").map((line) => line.trim()).filter(Boolean);
    return { response_format: { [language]: language === "choices" ? { texts: lines } : text } };
  }

  /** Fill in the region that was chosen on the image. */
  setRegion(region) {
    this.options.open = true;
    this.place.value = region;
  }

  get takesPlaces() {
    return Boolean(SKILLS[this.skill.value].places);
  }

  /** Grey out what the server's model lacks. */
  allow(tasks) {
    for (const option of this.skill.options) {
      const needed = option.value === "gaze" ? "point" : option.value;
      option.disabled = tasks.length > 0 && !tasks.includes(needed);
    }
  }

  get isAllowed() {
    return !this.skill.selectedOptions[0].disabled;
  }

  /** What this row is called in the answers. */
  get title() {
    const skill = SKILLS[this.skill.value];
    return [skill.title, skill.asks === "nothing" ? "" : this.text.value].join(" ").trim();
  }

  /** The label of what is found. */
  get noun() {
    return this.skill.value === "gaze" ? "gaze" : this.text.value.trim();
  }

  /** The contract's task; throws a Mistake. */
  task() {
    const skill = SKILLS[this.skill.value], text = this.text.value.trim();
    if (skill.asks === "object" && !text) throw new Mistake(this.text, `${skill.title}: name an object, such as ${skill.example}.`);
    if (skill.asks === "question" && !text) throw new Mistake(this.text, "Query: type a question.");
    if (skill.needs && !this.place.value.trim()) throw new Mistake(this.place, "Gaze: click the person's eye on the image.");
    const kind = skill.kind({
      text,
      wanted: skill.lists ? given({
        max_objects: numberIn(this.most, "Max objects", { least: 1, whole: true }),
        min_confidence: numberIn(this.least, "Min confidence", { least: 0, most: 1 }),
        order: this.sorts.checked ? "OBJECT_ORDER_CONFIDENCE" : undefined,
      }) : {},
      refs: skill.places ? regionIn(this.place) : {},
      thinks: this.thinks.checked,
      format: skill.formats ? this.formatIn() : {},
    });
    const sampling = samplingOf();
    return { ...kind, ...(Object.keys(sampling).length ? { sampling } : {}) };
  }
}

/** The sampling below the rows; throws a Mistake. */
export function samplingOf() {
  return given({
    temperature: numberIn(byId("temperature"), "Temperature", { least: 0 }),
    max_tokens: numberIn(byId("max-tokens"), "Max tokens", { least: 1, whole: true }),
    seed: numberIn(byId("seed"), "Seed", { least: 0, whole: true }),
  });
}

/** The options of a request; throws a Mistake. */
export function optionsOf() {
  return given({
    model: byId("model").value,
    adapter: byId("adapter").value.trim(),
    top_logprobs: numberIn(byId("alternatives"), "Top logprobs", { least: 0, most: 20, whole: true }),
  });
}

/** Run `work`; a Mistake in it is said in `place`, and its field gets the focus. Returns whether there was none. */
export function withoutMistake(place, work) {
  document.querySelectorAll("[aria-invalid]").forEach((input) => input.removeAttribute("aria-invalid"));
  place.hidden = true;
  try {
    work();
    return true;
  } catch (error) {
    if (!(error instanceof Mistake)) throw error;
    place.textContent = error.message;
    place.hidden = false;
    error.input.ariaInvalid = "true";
    error.input.closest("details")?.setAttribute("open", "");
    error.input.focus();
    return false;
  }
}
