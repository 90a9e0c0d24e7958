// The tab "Timeline", whose module is loaded when it is shown first. That tells itself what the endpoint says.

import { byId, el } from "./dom.js";

const URL = "/timeline/events";

export async function startTimeline() {
  const panel = byId("panel-timeline");
  const place = el("div", { className: "wide" });
  panel.replaceChildren(el("div", { className: "card" },
    el("h2", {}, "What the engine does"),
    el("p", { className: "help" }, "Launch by launch, as it happens."), place));
  try {
    const { mountTimeline } = await import("./timeline.js");
    mountTimeline(place, { url: URL });
  } catch {
    place.replaceChildren(el("p", { className: "notice", role: "status" },
      "The live timeline is not available in this playground: its module is missing. ",
      el("code", {}, "legato trace --server"), " records the same into a file."));
  }
}
