// The tokens of an answer: what each was, how likely, and what else could have stood there.

import { el } from "./dom.js";

const MOST_SHOWN = 400;

/** `tokens` as the client's values have them; closed until it is asked for. */
export function tokensView(tokens) {
  const rows = tokens.slice(0, MOST_SHOWN).map((token) => el("tr", {},
    el("td", {}, wordOf(token)),
    el("td", {}, chance(token.logprob)),
    el("td", {}, token.alternatives.map((other) => `${wordOf(other)} ${chance(other.logprob)}`).join(", ")),
    el("td", {}, sureness(token.certainty))));
  const heads = ["token", "probability", "in its place", "certainty"].map((name) => el("th", { scope: "col" }, name));
  return el("details", { className: "tokens" },
    el("summary", {}, `${tokens.length} tokens`),
    el("div", { className: "wide", tabIndex: 0, role: "group", ariaLabel: "Tokens" },
      el("table", {}, el("thead", {}, el("tr", {}, ...heads)), el("tbody", {}, ...rows))));
}

/** Its text as it is written, or the value that it carries. */
function wordOf({ text, coordinate, size, token_id: id }) {
  if (coordinate !== null && coordinate !== undefined) return coordinate.toFixed(3);
  if (size) return size.map((side) => side.toFixed(3)).join(" × ");
  return text ? JSON.stringify(text).slice(1, -1) : `#${id}`;
}

const chance = (logprob) => (logprob === null || logprob === undefined ? "" : percent(Math.exp(logprob)));

const sureness = (certainty) => (certainty
  ? `there ${percent(certainty.existence)}, place ${percent(certainty.concentration)}` : "");

const percent = (share) => `${(share * 100).toFixed(1)}%`;
