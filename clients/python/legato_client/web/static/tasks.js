// The rows that say what is asked, and their form in the contract's JSON (legato.v1.Task).

import { byId, el } from "./dom.js";

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
    example: "How many apples are there?",
    kind: ({ text, refs, thinks }) => ({ query: { question: text, ...(thinks ? { reasoning: true } : {}), ...refs } }),
  },
  gaze: {
    title: "Gaze", asks: "nothing", places: true, needs: "point",
    kind: ({ refs }) => ({ point: { object: "gaze", ...refs } }),
  },
};

/** Which objects a list has, and in which order. What is no number is passed on: the process says what is wrong. */
const listed = (most, least, surest) => ({
  ...(most ? { max_objects: numeric(most) } : {}),
  ...(least ? { min_confidence: numeric(least) } : {}),
  ...(surest ? { order: "OBJECT_ORDER_CONFIDENCE" } : {}),
});

export const numeric = (text) => (Number.isNaN(Number(text)) ? text : Number(text));

/** "x y" or "left top right bottom" in fractions, as the contract's places. */
export function refsOf(text) {
  const numbers = text.trim().split(/[\s,;]+/).filter(Boolean).map(Number);
  if (!numbers.length) return {};
  if (numbers.some(Number.isNaN) || ![2, 4].includes(numbers.length)) {
    throw new Error(`a place is two numbers or four, from 0 to 1, not “${text}”`);
  }
  const [x, y, right, bottom] = numbers;
  const ref = numbers.length === 2
    ? { point: { x, y } } : { box: { x_min: x, y_min: y, x_max: right, y_max: bottom } };
  return { spatial_refs: [ref] };
}

/** Whether a model of these tasks takes pictures: one that only answers questions is a text model. */
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
    this.text = skill.asks === "length"
      ? el("select", { ariaLabel: "Length" }, ...LENGTHS.map(([name, value]) => new Option(name, value)))
      : el("input", { ariaLabel: skill.asks === "question" ? "Question" : "Object", placeholder: skill.placeholder ?? "", autocomplete: "off" });
    if (skill.asks === "length") this.text.value = text || "normal";
    else this.text.value = text || skill.example || "";
    this.most = el("input", { ariaLabel: "Most objects", inputMode: "numeric", placeholder: "most", className: "short", autocomplete: "off" });
    this.place = el("input", { ariaLabel: "Place, two or four numbers from 0 to 1", placeholder: skill.needs ? "click the eye" : "place", className: "place", autocomplete: "off" });
    this.least = el("input", { ariaLabel: "Least confidence, 0 to 1", inputMode: "decimal", placeholder: "sure", className: "short", autocomplete: "off" });
    this.surest = el("input", { type: "checkbox" });
    this.thinks = el("input", { type: "checkbox" });
    this.inputs.replaceChildren(...[
      skill.asks === "nothing" ? null : this.text,
      ...(skill.lists ? [this.most, this.least] : []),
      skill.places ? this.place : null,
      skill.lists ? el("label", { className: "check" }, this.surest, "surest first") : null,
      skill.thinks ? el("label", { className: "check" }, this.thinks, "think first") : null,
    ].filter(Boolean));
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

  /** The contract's task; throws an Error for a place that is none. */
  task() {
    const skill = SKILLS[this.skill.value];
    const kind = skill.kind({
      text: this.text.value.trim(),
      wanted: listed(this.most.value.trim(), this.least.value.trim(), this.surest.checked),
      refs: skill.places ? refsOf(this.place.value) : {},
      thinks: this.thinks.checked,
    });
    const sampling = samplingOf();
    return { ...kind, ...(Object.keys(sampling).length ? { sampling } : {}) };
  }
}

/** The options below the rows, as they were typed: the process says what is wrong with them. */
export function samplingOf() {
  const typed = {
    temperature: byId("temperature").value, max_tokens: byId("max-tokens").value, seed: byId("seed").value,
  };
  return Object.fromEntries(Object.entries(typed)
    .filter(([, value]) => value.trim())
    .map(([name, value]) => [name, numeric(value)]));
}

export function optionsOf() {
  const options = {
    model: byId("model").value, adapter: byId("adapter").value.trim(), top_logprobs: byId("alternatives").value.trim(),
  };
  return Object.fromEntries(Object.entries(options)
    .filter(([, value]) => value)
    .map(([name, value]) => [name, name === "top_logprobs" ? numeric(value) : value]));
}
