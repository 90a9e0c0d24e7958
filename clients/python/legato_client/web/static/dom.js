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

/** The contract's failure, or any error of this page, in words. */
export function failureView(failure) {
  const title = failure.reason || failure.code || "error";
  return el(
    "div", { className: "failure", role: "alert" },
    el("p", {}, el("strong", {}, title), " ", failure.message),
    ...(failure.fields ?? []).map((each) =>
      el("p", {}, el("code", {}, each.field), " ", each.description)),
    failure.hint ? el("p", { className: "hint" }, failure.hint) : null,
    failure.retry_after ? el("p", {}, `Try again in ${failure.retry_after} s.`) : null,
    failure.request_id ? el("p", { className: "small" }, "request ", el("code", {}, failure.request_id)) : null,
  );
}
