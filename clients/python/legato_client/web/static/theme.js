// Runs before the page is drawn, so that a chosen theme does not flash.
{
  const chosen = localStorage.getItem("legato-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
}
