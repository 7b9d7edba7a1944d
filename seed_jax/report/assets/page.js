"use strict";
(() => {
  // The theme follows the system until the button is used; file pages of one directory then share the choice.
  const root = document.documentElement;
  const remember = (value) => { try { if (value) localStorage.setItem("seed-theme", value); return localStorage.getItem("seed-theme"); } catch { return value; } };
  const saved = remember();
  if (saved === "dark" || saved === "light") root.dataset.theme = saved;
  document.getElementById("theme").addEventListener("click", () => {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    remember(root.dataset.theme);
  });

  // A table as tab-separated lines. Files have no clipboard permission everywhere, so a selection is the second way.
  const lines = (table) => [...table.rows].map((row) => [...row.cells].map((cell) => cell.textContent).join("\t")).join("\n");
  const select = (table) => {
    const range = document.createRange();
    range.selectNode(table);
    const selection = getSelection();
    selection.removeAllRanges();
    selection.addRange(range);
  };
  document.addEventListener("click", async (event) => {
    const button = event.target.closest("button.copy");
    if (!button) return;
    const table = button.parentElement.querySelector("table");
    try {
      await navigator.clipboard.writeText(lines(table));
      button.textContent = "Copied";
    } catch {
      select(table);
      button.textContent = "Selected: press Ctrl+C";
    }
    setTimeout(() => { button.textContent = "Copy table"; }, 2000);
  });
})();
