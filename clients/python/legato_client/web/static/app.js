// Puts the page together.

import { describe, told } from "./api.js";
import { startAsk } from "./ask.js";
import { startChat } from "./chat.js";
import { byId } from "./dom.js";
import { PictureSource } from "./picture.js";
import { startSession } from "./session.js";
import { startTabs } from "./tabs.js";
import { startTimeline } from "./timeline-tab.js";

/** What the server said of itself; null while it does not answer. */
const server = { facts: null };

const POLL = 2000; // milliseconds between two looks at the server while the page is visible

async function connect() {
  const text = byId("server-text"), chip = byId("server");
  try {
    const facts = document.hidden && server.facts ? server.facts : await describe();
    chip.dataset.state = "up";
    if (JSON.stringify(facts) !== JSON.stringify(server.facts)) show(facts);
  } catch (error) {
    const failure = told(error);
    text.textContent = `${failure.message}. ${failure.hint ?? ""}`;
    chip.dataset.state = "down";
    server.facts = null;
  }
  setTimeout(connect, POLL);
}

function show(facts) {
  const { server: found, models } = server.facts = facts;
  const name = [found.name || "Legato", found.version].filter(Boolean).join(" ");
  byId("server-text").textContent = `${models.map((model) => model.name).join(", ")} · ${name} at ${found.target}`;
  const notices = models.map((model) => model.notice).filter(Boolean);
  byId("notice").textContent = notices.join(" ");
  byId("notice").hidden = !notices.length;
  byId("model").replaceChildren(byId("model").options[0],
    ...models.map((model) => new Option(model.name, model.name)));
  document.dispatchEvent(new CustomEvent("server", { detail: facts }));
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
  timeline: () => startTimeline(picture),
};
startTabs(tabs);
connect();
