// Small helpers. Whatever a peer says becomes text, never markup: nothing here parses HTML.

export const byId = (id) => document.getElementById(id);

/** A new element with this text, a class if there is one, and these children. */
export function element(tag, text = "", className = "", children = []) {
  const made = document.createElement(tag);
  if (text !== "") made.textContent = text;
  if (className) made.className = className;
  made.append(...children);
  return made;
}

/** The same list of facts, [label, text] each, in place of what was there; facts without a text are left out. */
export function facts(list, pairs) {
  const told = pairs.filter(([, text]) => text !== "" && text !== null && text !== undefined);
  list.replaceChildren(...told.flatMap(([label, text]) => [element("dt", label), element("dd", text)]));
}

/** Rows of cells in place of those of a table; a row is {cells, className}. Small screens show each cell beside its column's name. */
export function rows(table, all) {
  const columns = [...table.tHead.rows[0].cells].map((cell) => cell.textContent);
  const cell = (text, place) => {
    const made = element("td", text);
    made.dataset.column = columns[place];
    return made;
  };
  const made = all.map(({ cells, className = "" }) => element("tr", "", className, cells.map(cell)));
  table.tBodies[0].replaceChildren(...made);
}
