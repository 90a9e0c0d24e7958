// What the engines say of their decode steps, a group of figures for each.

const FIGURES = {
  depth: ["pipeline depth", "Launches in flight: 1 waits for each step, 2 launches a step before the last one is read back."],
  step: ["decode step", "Time from one decode step to the next, the median of the latest."],
  rows: ["requests per step", "How many requests share a step."],
  predicted: ["gain, predicted", "Throughput gained by pipelining, from the parts of a step. Steps after an answer's end are taken off."],
  observed: ["gain, observed", "The same from the time that the latest steps took, stalls included."],
  measured: ["gain, measured", "From steps at both depths with as many requests; switch the depth to see it."],
  idle: ["device idle", "Share of a step in which the device had no work."],
  lost: ["launches not shown", "This page read too slowly for them."],
};

/** An empty place for figures, and what they mean. */
export function figuresView() {
  const view = document.createElement("div"), help = document.createElement("details"), list = document.createElement("dl");
  const title = document.createElement("summary");
  title.textContent = "What these figures mean";
  for (const [name, meaning] of Object.values(FIGURES)) {
    const term = document.createElement("dt"), text = document.createElement("dd");
    term.textContent = name;
    text.textContent = meaning;
    list.append(term, text);
  }
  help.append(title, list);
  help.className = "timeline-help";
  return { view, help };
}

/** Only what changed is written, so that a screen reader repeats nothing. */
export function fillFigures(view, stores) {
  while (view.children.length > stores.size) view.lastChild.remove();
  let index = 0;
  for (const [engine, store] of stores) {
    const list = view.children[index] ?? view.appendChild(document.createElement("dl"));
    list.className = "timeline-figures";
    const shown = figures(store);
    if (stores.size > 1) shown.unshift(["engine", `${engine}`]);
    while (list.children.length > shown.length) list.lastChild.remove();
    shown.forEach(([name, text], place) => {
      const tile = list.children[place] ?? list.appendChild(document.createElement("div"));
      if (!tile.children.length) tile.append(document.createElement("dt"), document.createElement("dd"));
      for (const [element, words] of [[tile.firstChild, name], [tile.lastChild, text]]) {
        if (element.textContent !== words) element.textContent = words;
      }
    });
    index++;
  }
}

function figures({ steps, depth, lost, byDepth }) {
  const named = (values) => Object.entries(values).map(([key, value]) => [FIGURES[key][0], value]);
  const depths = depth === 1 ? "1, blocking" : depth ? `${depth}, pipelined` : "–";
  if (!steps) return named({ depth: depths, lost: `${lost}` });
  return named({
    depth: depths, step: `${steps.step_ms.toPrecision(3)} ms`, rows: steps.rows.toFixed(1),
    // A loop that blocks has no gain over itself.
    ...(depth === 1 ? {} : { predicted: gain(steps.predicted_gain), observed: gain(steps.observed_gain) }),
    ...measured(byDepth),
    idle: `${(100 * steps.idle_ms / steps.step_ms).toFixed(1)} %`,
    ...(lost ? { lost: `${lost}` } : {}),
  });
}

/** From the figures at both depths, if their steps had about as many rows. */
function measured(byDepth) {
  const blocking = byDepth.get(1), pipelined = byDepth.get(2);
  if (!blocking || !pipelined || Math.abs(blocking.rows / pipelined.rows - 1) > 0.1) return {};
  return { measured: gain(blocking.step_ms / pipelined.step_ms * (1 - pipelined.zombie_ratio) - 1) };
}

const gain = (ratio) => `${ratio < 0 ? "−" : "+"}${Math.abs(100 * ratio).toFixed(1)} %`;
