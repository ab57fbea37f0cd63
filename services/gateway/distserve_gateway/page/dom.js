// Figures in words, and small ways to put them into the page. What comes from the server is text, never markup.

export const byId = (id) => document.getElementById(id);

const trimmed = (value) => (value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toFixed(2));

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 60) return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
  if (value >= 1) return `${trimmed(value)} s`;
  return value >= 0.001 ? `${trimmed(value * 1e3)} ms` : value > 0 ? `${trimmed(value * 1e6)} µs` : "0";
}

export function count(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 1e9) return `${trimmed(value / 1e9)} G`;
  if (value >= 1e6) return `${trimmed(value / 1e6)} M`;
  if (value >= 1e4) return `${trimmed(value / 1e3)} k`;
  return Number.isInteger(value) || value >= 100 ? String(Math.round(value)) : trimmed(value);
}

export function bytes(value) {
  const names = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let at = 0;
  for (; value >= 1024 && at < names.length - 1; at++) value /= 1024;
  return at ? `${trimmed(value)} ${names[at]}` : `${Math.round(value)} B`;
}

export function share(value, digits = 0) {
  return value === null || value === undefined ? "–" : `${(100 * value).toFixed(digits)} %`;
}

export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function make(name, className = "", text = "") {
  const element = document.createElement(name);
  if (className) element.className = className;
  if (text) element.textContent = text;
  return element;
}

export function drawn(name, attributes) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
}

// Children of `parent`, one for each item, kept from one time to the next by the item's key, so that a reader's place
// and selection stay.
export function keep(parent, items, keyOf, build, fill) {
  const old = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  items.forEach((item, i) => {
    const key = keyOf(item, i);
    let child = old.get(key);
    old.delete(key);
    if (!child) {
      child = build(item);
      child.dataset.key = key;
    }
    fill(child, item);
    if (parent.children[i] !== child) parent.insertBefore(child, parent.children[i] ?? null);
  });
  for (const child of old.values()) child.remove();
}

// Rows of a table; `cells(item)` gives a text for each column, or a function that fills the cell.
export function rows(table, items, keyOf, cells, nothing = "none") {
  const names = [...table.tHead.rows[0].cells].map((cell) => cell.textContent);
  const body = table.tBodies[0];
  if (!items.length) {
    const row = make("tr");
    const cell = make("td", "quiet", nothing);
    cell.colSpan = names.length;
    row.append(cell);
    body.replaceChildren(row);
    return;
  }
  const build = () => {
    const row = make("tr");
    for (const name of names) {
      const cell = make("td");
      cell.dataset.label = name;
      row.append(cell);
    }
    return row;
  };
  keep(body, items, keyOf, build, (row, item) => {
    cells(item).forEach((value, i) => {
      if (typeof value === "function") value(row.cells[i]);
      else say(row.cells[i], value);
      row.cells[i].toggleAttribute("data-empty", row.cells[i].textContent === "–");
    });
  });
}
