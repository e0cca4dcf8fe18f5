// Names each cell's column, for narrow screens, and marks wide tables; on the config reference, a field that filters the options.
document.addEventListener("DOMContentLoaded", () => {
  for (const table of document.querySelectorAll(".md-typeset table:not([class])")) {
    const names = [...table.querySelectorAll("thead th")].map((cell) => cell.textContent.trim());
    for (const row of table.querySelectorAll("tbody tr")) {
      [...row.cells].forEach((cell, at) => {
        if (at > 0 && names[at]) cell.dataset.column = names[at];
      });
    }
    for (const code of table.querySelectorAll("code")) {
      if (/\S{24}/.test(code.textContent)) code.classList.add("gear-long");
    }
    if (names.length > 7) table.className = "gear-wide";
  }
  if (!location.pathname.includes("reference/config")) return;
  const field = document.createElement("input");
  field.className = "gear-search";
  field.type = "search";
  field.placeholder = "Filter options by name, value or meaning";
  field.setAttribute("aria-label", field.placeholder);
  const content = document.querySelector(".md-content article");
  content.querySelector("h1").after(field);
  field.addEventListener("input", () => {
    const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
    const matches = (text) => words.every((word) => text.toLowerCase().includes(word));
    for (const heading of content.querySelectorAll("h2, h3")) {
      let shown = matches(heading.textContent);
      const parts = [];
      for (let part = heading.nextElementSibling; part && !/^H[123]$/.test(part.tagName); part = part.nextElementSibling) {
        parts.push(part);
        for (const row of part.querySelectorAll("tbody tr")) {
          const found = matches(heading.textContent + " " + row.textContent);
          row.hidden = !found;
          row.style.display = found ? "" : "none";
          shown = shown || found;
        }
      }
      for (const part of [heading, ...parts]) part.style.display = shown ? "" : "none";
    }
  });
});
