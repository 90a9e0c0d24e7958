// The tabs, by the pattern of WAI-ARIA: arrows move, and a tab's content starts when it is first shown.

import { byId } from "./dom.js";

/** `starts` has a function for each tab that needs one, called when it is first shown. */
export function startTabs(starts) {
  const tabs = [...document.querySelectorAll('[role="tab"]')];
  const nameOf = (tab) => tab.id.replace("tab-", "");

  function show(tab, focus) {
    for (const each of tabs) {
      const chosen = each === tab;
      each.ariaSelected = String(chosen);
      each.tabIndex = chosen ? 0 : -1;
      byId(each.getAttribute("aria-controls")).hidden = !chosen;
    }
    const name = nameOf(tab), start = starts[name];
    delete starts[name];
    start?.();
    history.replaceState(null, "", `#${name}`);
    if (focus) tab.focus();
    document.dispatchEvent(new CustomEvent("tab", { detail: name }));
  }

  const moves = { ArrowRight: 1, ArrowLeft: -1 };
  for (const [index, tab] of tabs.entries()) {
    tab.addEventListener("click", () => show(tab));
    tab.addEventListener("keydown", (event) => {
      const ends = { Home: 0, End: tabs.length - 1 };
      const next = event.key in moves
        ? (index + moves[event.key] + tabs.length) % tabs.length : ends[event.key];
      if (next === undefined) return;
      event.preventDefault();
      show(tabs[next], true);
    });
  }
  show(tabs.find((tab) => `#${nameOf(tab)}` === location.hash) ?? tabs[0]);
}
