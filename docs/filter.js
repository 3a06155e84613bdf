// The table of algorithms: boxes to tick leave the rows that meet what one needs.
// Without scripts it is a plain table. Columns are found by their headings (docs/build.py).
document.addEventListener("DOMContentLoaded", () => {
  const needs = [
    { label: "no extra bytes", column: "extra bytes", fits: (text) => text === "no" },
    { label: "clients keep nothing", column: "client keeps", fits: (text) => text === "0" },
    { label: "clients may be absent", column: "some clients absent", fits: (text) => text === "yes" },
    { label: "no second derivatives", column: "second derivatives", fits: (text) => text === "no" },
  ];
  const headings = (table) => [...table.querySelectorAll("thead th")].map((cell) => cell.textContent.trim());
  const wanted = (table) => needs.every((need) => headings(table).includes(need.column));
  const table = [...document.querySelectorAll("article table")].find(wanted);
  if (!table) return;

  const places = headings(table);
  const rows = [...table.querySelectorAll("tbody tr")];
  const form = document.createElement("form");
  const told = document.createElement("output");
  form.className = "filter";
  form.setAttribute("aria-label", "Which algorithms to show");
  const boxes = needs.map((need) => {
    const label = document.createElement("label");
    const box = document.createElement("input");
    box.type = "checkbox";
    label.append(box, ` ${need.label}`);
    form.append(label);
    return box;
  });
  form.append(told);

  const show = () => {
    const asked = needs.filter((_, i) => boxes[i].checked);
    const fits = (row) =>
      asked.every((need) => need.fits(row.cells[places.indexOf(need.column)].textContent.trim()));
    rows.forEach((row) => { row.hidden = !fits(row); });
    told.value = `${rows.filter((row) => !row.hidden).length} of ${rows.length}`;
  };
  form.addEventListener("change", show);
  form.addEventListener("submit", (event) => event.preventDefault());
  show();
  (table.closest(".md-typeset__scrollwrap") || table).before(form);
});
