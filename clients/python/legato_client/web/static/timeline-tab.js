// The tab "Timeline", whose module is loaded when it is shown first. That tells itself what the endpoint says.

import { generate, told } from "./api.js";
import { byId, el, failureView } from "./dom.js";

const URL = "/timeline/events";

export async function startTimeline(picture) {
  const panel = byId("panel-timeline"), place = el("div", {}), problem = el("div", { role: "status" });
  const run = el("button", { type: "button" }, "Run a sample request");
  run.addEventListener("click", () => runSample(picture, run, problem));
  panel.replaceChildren(el("div", { className: "card" },
    el("div", { className: "actions" }, el("h2", {}, "What the engine does"), run), problem, place));
  try {
    const { mountTimeline } = await import("./timeline.js");
    mountTimeline(place, { url: URL, empty: "Nothing has run since this tab was opened. Run a sample request, or ask from another program: each launch on the device and on the host appears here as it happens." });
  } catch {
    place.replaceChildren(el("p", { className: "notice", role: "status" },
      "The timeline's files could not be loaded. ", el("code", {}, "legato trace --server"), " records the same into a file."));
  }
}

/** A request that decodes for a while: a caption of the image, without one a question. */
async function runSample(picture, button, problem) {
  button.disabled = true;
  problem.replaceChildren();
  try {
    const imageId = await picture.imageId();
    const request = imageId ? { image_id: imageId, task: { caption: { length: "CAPTION_LENGTH_LONG" } } }
      : { task: { query: { question: "Why is the sky blue?" } } };
    for await (const event of generate(request)) if (event.type === "finished") break;
  } catch (error) {
    problem.replaceChildren(failureView(told(error)));
  }
  button.disabled = false;
}
