// The dialog with a request as programs to copy.

import { code, told } from "./api.js";
import { byId, el, failureView, say } from "./dom.js";

const LANGUAGES = [["python", "Python"], ["go", "Go"], ["grpcurl", "grpcurl"]];

/** Show the programs of one request; it closes by its button, by Escape, and gives the focus back. */
export async function showCode(request) {
  const dialog = byId("code");
  const close = el("button", { type: "button", className: "icon", ariaLabel: "Close" }, "×");
  close.addEventListener("click", () => dialog.close());
  const head = el("header", {}, el("h2", { id: "code-title" }, "This request as code"), close);
  let body;
  try {
    body = languages(await code(request));
  } catch (error) {
    body = [failureView(told(error))];
  }
  dialog.replaceChildren(head, ...body);
  if (!dialog.open) dialog.showModal();
}

function languages(programs) {
  const text = el("code", {}), shown = el("pre", { tabIndex: 0, ariaLabel: "Program" }, text);
  const copy = el("button", { type: "button", className: "primary" }, "Copy");
  const choose = (name) => {
    text.textContent = programs[name];
    copy.textContent = "Copy";
    for (const button of buttons.children) button.ariaPressed = String(button.value === name);
  };
  const buttons = el("div", { className: "languages", role: "group", ariaLabel: "Language" },
    ...LANGUAGES.map(([name, title]) => {
      const button = el("button", { type: "button", value: name }, title);
      button.addEventListener("click", () => choose(name));
      return button;
    }));
  copy.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text.textContent);
      copy.textContent = "Copied";
      say("copied");
    } catch {
      getSelection().selectAllChildren(text);
      copy.textContent = "Selected: copy with Ctrl C";
    }
  });
  choose("python");
  return [buttons, shown, el("div", { className: "actions" }, copy)];
}
