// Elements without markup in strings.

/** An element with properties, then children: elements or text. */
export function el(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "data") Object.assign(made.dataset, value);
    else if (name in made) made[name] = value;
    else made.setAttribute(name.replace(/^aria(?=[A-Z])/, "aria-").toLowerCase(), value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

const SVG = "http://www.w3.org/2000/svg";

/** An SVG element with attributes. */
export function svg(tag, attributes = {}) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

export const byId = (id) => document.getElementById(id);

/** Tell a screen reader something that the page shows elsewhere. */
export function say(text) {
  byId("say").textContent = text;
}

export const ms = (milliseconds) =>
  milliseconds < 10_000 ? `${Math.round(milliseconds)} ms` : `${(milliseconds / 1000).toFixed(1)} s`;

const FIELDS = {
  image: "Image", images: "Images", json_schema: "JSON schema", choices: "Choices", texts: "Choices", regex: "Regex", grammar: "Grammar", object: "Object", question: "Question", messages: "Conversation", max_objects: "Max objects",
  min_confidence: "Min confidence", spatial_refs: "Region", temperature: "Temperature", max_tokens: "Max tokens",
  seed: "Seed", top_logprobs: "Top logprobs", model: "Model", adapter: "Adapter", max_frame_age: "Max frame age",
};

/** A failure in words, each once; what a report of a bug needs is folded away. */
export function failureView(failure) {
  const fields = (failure.fields ?? []).map(({ field, description }) => {
    const name = field.split(".").at(-1).replace(/\[.*/, "");
    return `${FIELDS[name] ?? field}: ${description}`;
  });
  const facts = [
    failure.reason || failure.code, ...(failure.fields ?? []).map(({ field }) => field), failure.detail,
    failure.request_id && `request ${failure.request_id}`,
  ].filter(Boolean);
  return el(
    "div", { className: "failure", role: "alert" },
    ...(fields.length ? fields : [failure.message]).map((text) => el("p", {}, sentence(text))),
    failure.hint ? el("p", { className: "hint" }, failure.hint) : null,
    failure.retry_after ? el("p", {}, `Try again in ${failure.retry_after} s.`) : null,
    facts.length ? el("details", { className: "small" }, el("summary", {}, "Details"), el("code", {}, facts.join(" · "))) : null,
  );
}

const sentence = (text) => text.charAt(0).toUpperCase() + text.slice(1) + (/[.!?]$/.test(text) ? "" : ".");
