// The tab "Timeline". Its module and its endpoint may be absent, so it is loaded when it is shown.

import { byId, el } from "./dom.js";

const URL = "/timeline/events";

export async function startTimeline() {
  const panel = byId("panel-timeline");
  const place = el("div", { id: "timeline" });
  panel.replaceChildren(el("div", { className: "card" },
    el("h2", {}, "What the engine does"),
    el("p", { className: "help" }, "Launch by launch, as it happens."), place));
  try {
    const { mountTimeline } = await import("./timeline.js");
    await mountTimeline(place, { url: URL });
  } catch {
    place.replaceChildren(el("p", { className: "notice", role: "status" },
      "The live timeline is not available in this playground: its module or its endpoint is missing. ",
      el("code", {}, "legato trace --server"), " records the same into a file."));
  }
}
