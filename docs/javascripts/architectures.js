// Filters the rows of the table of architectures. Without it the page shows them all.
const rows = [...document.querySelectorAll(".architectures tbody tr")];
const form = document.querySelector("#architectures-filter");
const step = 10;
let limit = step;

function filter() {
  const words = form.elements.words.value.toLowerCase().split(/\s+/).filter(Boolean);
  const { state, operator } = form.elements;
  const matches = rows.filter((row) =>
    (!state.value || row.dataset.state === state.value) &&
    (!operator.value || row.dataset.operators.split(" ").includes(operator.value)) &&
    words.every((word) => row.textContent.toLowerCase().includes(word)));
  rows.forEach((row) => { row.hidden = true; });
  // A name that begins with what was typed comes before a mention of it elsewhere.
  const begins = (row) => row.firstElementChild.textContent.startsWith(words[0] ?? "");
  matches.sort((a, b) => begins(b) - begins(a));
  matches.slice(0, limit).forEach((row) => { row.hidden = false; row.parentNode.append(row); });
  const shown = Math.min(limit, matches.length);
  form.querySelector("output").textContent = `${shown} of ${matches.length} shown`;
  form.elements.more.hidden = shown === matches.length;
}

form.hidden = false;
form.addEventListener("input", () => { limit = step; filter(); });
form.addEventListener("submit", (event) => event.preventDefault());
form.elements.more.addEventListener("click", () => { limit += 5 * step; filter(); });
filter();
