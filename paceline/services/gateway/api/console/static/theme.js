// Sets the chosen theme before the page is drawn, so that it does not flash in the other one. "auto" follows the system.
"use strict";
{
  const root = document.documentElement;
  let chosen = "auto";
  try {
    chosen = localStorage.getItem("paceline.theme") || "auto";
  } catch { /* storage is forbidden; the system decides */ }
  root.dataset.theme = chosen;
}
