// Puts the page together.

import { describe, told } from "./api.js";
import { startAsk } from "./ask.js";
import { startChat } from "./chat.js";
import { byId } from "./dom.js";
import { PictureSource } from "./picture.js";
import { startSession } from "./session.js";
import { startTabs } from "./tabs.js";
import { startTimeline } from "./timeline-tab.js";

/** What the server said of itself; null until it has. */
const server = { facts: null };

async function connect() {
  const text = byId("server-text"), chip = byId("server");
  try {
    server.facts = await describe();
    const { server: found, models } = server.facts;
    const name = [found.name || "Legato", found.version].filter(Boolean).join(" ");
    text.textContent = `${models.map((model) => model.name).join(", ")} · ${name} at ${found.target}`;
    chip.dataset.state = "up";
    byId("model").replaceChildren(byId("model").options[0],
      ...models.map((model) => new Option(model.name, model.name)));
    document.dispatchEvent(new CustomEvent("server", { detail: server.facts }));
  } catch (error) {
    const failure = told(error);
    text.textContent = `${failure.message}. ${failure.hint ?? ""}`;
    chip.dataset.state = "down";
    setTimeout(connect, 3000);
  }
}

function startTheme() {
  const names = ["system", "light", "dark"], root = document.documentElement;
  const show = (name) => {
    byId("theme-name").textContent = name;
    if (name === "system") delete root.dataset.theme;
    else root.dataset.theme = name;
  };
  show(root.dataset.theme ?? "system");
  byId("theme").addEventListener("click", () => {
    const next = names[(names.indexOf(root.dataset.theme ?? "system") + 1) % names.length];
    localStorage.setItem("legato-theme", next);
    show(next);
  });
}

const picture = new PictureSource(server);
startTheme();
startAsk(picture);
const tabs = {
  chat: () => startChat(picture),
  session: () => startSession(server),
  timeline: () => startTimeline(),
};
startTabs(tabs);
connect();
