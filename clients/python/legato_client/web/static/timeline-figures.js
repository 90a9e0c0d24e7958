// What the engines say of their decode steps, a row for each.

const HEADS = [
  "engine", "depth", "step", "rows", "predicted gain", "observed gain", "measured gain", "device idle", "lost launches",
];
const TITLES = {
  "predicted gain": "from the parts of a step: time of a blocking step / time of a pipelined one × (1 − zombies)",
  "observed gain": "the same from the time that the latest steps took, stalls included",
  "measured gain": "from steps at both depths with as many rows; switch the depth to see it",
};

export function figuresTable() {
  const table = document.createElement("table"), row = table.createTHead().insertRow();
  table.className = "timeline-figures";
  for (const text of HEADS) {
    const head = document.createElement("th");
    head.scope = "col";
    head.textContent = text;
    head.title = TITLES[text] ?? "";
    row.append(head);
  }
  table.createTBody();
  return table;
}

/** Only what changed is written, so that a screen reader repeats nothing. */
export function fillFigures(table, stores) {
  const body = table.tBodies[0];
  while (body.rows.length > stores.size) body.deleteRow(-1);
  let index = 0;
  for (const [engine, store] of stores) {
    const row = body.rows[index] ?? body.insertRow();
    figures(engine, store).forEach((text, place) => {
      const cell = row.cells[place] ?? row.insertCell();
      if (cell.textContent !== text) cell.textContent = text;
    });
    index++;
  }
}

function figures(engine, store) {
  const { steps, depth, lost } = store;
  if (!steps) return [`${engine}`, depth ? `${depth}` : "–", "–", "–", "–", "–", "–", "–", `${lost}`];
  return [
    `${engine}`, `${depth}`, `${steps.step_ms.toPrecision(3)} ms`, steps.rows.toFixed(1),
    pipelined(depth, steps.predicted_gain), pipelined(depth, steps.observed_gain), measured(store), `${(100 * steps.idle_ms / steps.step_ms).toFixed(1)} %`, `${lost}`,
  ];
}

/** From the figures at both depths, if their steps had about as many rows. */
function measured({ byDepth }) {
  const blocking = byDepth.get(1), pipelined = byDepth.get(2);
  if (!blocking || !pipelined || Math.abs(blocking.rows / pipelined.rows - 1) > 0.1) return "–";
  return gain(blocking.step_ms / pipelined.step_ms * (1 - pipelined.zombie_ratio) - 1);
}

/** A loop that blocks has no gain over itself. */
const pipelined = (depth, ratio) => (depth === 1 ? "–" : gain(ratio));

const gain = (ratio) => `${ratio < 0 ? "−" : "+"}${Math.abs(100 * ratio).toFixed(1)} %`;
