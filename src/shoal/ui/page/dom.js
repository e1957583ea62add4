// Makes elements and texts. Names come from files: they are only ever set as text, never as markup.

export function h(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

export function fill(element, ...children) {
  element.replaceChildren(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// ---- amounts for people

export function number(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-4 || size >= 1e7)) return value.toExponential(2);
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(digits)));
}

export function percent(share) {
  return share === null || share === undefined ? "–" : `${(100 * share).toFixed(share < 0.0995 && share > 0 ? 1 : 0)} %`;
}

export function bytes(amount) {
  if (amount === null || amount === undefined) return "–";
  for (const unit of ["B", "kB", "MB", "GB", "TB"]) {
    if (Math.abs(amount) < 999.5 || unit === "TB") return `${Number(amount.toPrecision(3))} ${unit}`;
    amount /= 1000;
  }
}

export function seconds(amount) {
  if (amount === null || amount === undefined) return "–";
  if (amount < 1) return `${Number((1000 * amount).toPrecision(3))} ms`;
  if (amount < 90) return `${Number(amount.toPrecision(3))} s`;
  if (amount < 5400) return `${Number((amount / 60).toPrecision(2))} min`;
  if (amount < 129600) return `${Number((amount / 3600).toPrecision(2))} h`;
  return `${Number((amount / 86400).toPrecision(2))} days`;
}

export function clock(time) {
  return time ? new Date(1000 * time).toLocaleString() : "–";
}

export function table(head, rows, caption) {
  const cell = (kind, value, column) => {
    const isNumber = head[column].startsWith("#");
    const made = h(kind, { class: isNumber ? "number" : "text", scope: kind === "th" ? "col" : null });
    made.append(value instanceof Node ? value : String(value));
    return made;
  };
  return h("table", null,
    caption ? h("caption", { class: "hidden" }, caption) : null,
    h("thead", null, h("tr", null, ...head.map((name, i) => cell("th", name.replace("#", ""), i)))),
    h("tbody", null, ...rows.map((row) => h("tr", null, ...row.map((value, i) => cell("td", value, i))))));
}
