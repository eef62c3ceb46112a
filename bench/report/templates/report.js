"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const table = document.getElementById("overview");
  const body = table.tBodies[0];
  const rows = [...body.rows];
  const at = (id) => document.getElementById(id);
  const said = at("said");
  const field = (row, key) => row.querySelector(`[data-key="${key}"]`);
  const filters = { backend: at("by-backend"), n: at("by-n"), w: at("by-w"), status: at("by-status") };
  const baseline = at("baseline");
  const own = Object.create(null);

  // Cells of the baseline that is picked; ratios and verdicts are those that the run was judged by.
  const put = (row, key, text, value) => {
    const cell = field(row, key);
    cell.textContent = text;
    if (value === null) delete cell.dataset.value;
    else cell.dataset.value = value;
  };
  const mark = (row) => {
    const cell = field(row, "verdict");
    cell.classList.toggle("faster", cell.textContent === "faster");
    cell.classList.toggle("slower", cell.textContent === "slower");
  };
  const decided = new Set(["outside floor", "inside margin"]);
  const name = (row) => row.cells[0].textContent;
  const against = () => {
    const place = Number(baseline.value || 0);
    const chosen = data.baselines[place];
    for (const row of rows) {
      const found = (data.ratios[row.dataset.id] || []).find((one) => one[0] === place);
      let ratio = ["-", null], interval = ["-", null], verdict = ["-", null];
      if (name(row) === chosen) {
        ratio = ["1", 1];
        verdict = ["baseline", ""];
      } else if (found) {
        const [, middle, low, high, word, reason] = found;
        if (middle !== null) {
          ratio = [middle.toFixed(3), middle];
          interval = low === null ? ["none", null] : [`${low.toFixed(3)} - ${high.toFixed(3)}`, low];
        }
        const why = data.reasons[reason];
        const text = decided.has(why) ? data.verdicts[word] : `${data.verdicts[word]}: ${why}`;
        verdict = [text, text];
        field(row, "verdict").title = data.next[reason];
      }
      if (!found) field(row, "verdict").removeAttribute("title");
      put(row, "ratio", ...ratio);
      put(row, "interval", ...interval);
      put(row, "verdict", ...verdict);
      mark(row);
    }
    const shown = document.createElement("bdi");
    shown.textContent = chosen;
    at("against").replaceChildren(shown);
    sort();
  };

  const filter = () => {
    let shown = 0;
    for (const row of rows) {
      row.hidden = Object.entries(filters).some(([key, box]) => box.value !== "" && row.dataset[key] !== box.value);
      shown += !row.hidden;
    }
    at("count").textContent = `${shown} of ${rows.length} cells shown`;
  };

  // What has no value comes last, whichever way the column is sorted.
  let by = null, down = false;
  const sort = () => {
    if (by === null) return;
    const numeric = by.classList.contains("number");
    const keyed = rows.map((row) => [row, field(row, by.dataset.key).dataset.value]);
    keyed.sort(([, a], [, b]) => {
      if (a === undefined || b === undefined) return (a === undefined) - (b === undefined);
      const order = numeric ? Number(a) - Number(b) : a < b ? -1 : a > b ? 1 : 0;
      return down ? -order : order;
    });
    body.append(...keyed.map(([row]) => row));
  };
  for (const head of table.querySelectorAll("thead th[data-key]")) {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      down = by === head && !down;
      if (by) by.removeAttribute("aria-sort");
      by = head;
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      sort();
    });
  }

  const citation = (kind, key) => {
    const format = data.citations[kind][at("format").value];
    return format.of[key] + format.end;
  };
  // The ratio to the baseline that is picked; its parts were escaped for each format when the page was written.
  const ratioCitation = (id, place) => {
    const ratios = data.citations.ratio;
    const found = (ratios.of[id] || []).find((one) => one[0] === place);
    if (!found) return null;
    const [, other, words, numbers, tail] = found;
    const form = ratios.forms[at("format").value];
    const values = numbers.split(" ");
    const joined = (texts) => texts.map((text, i) => (i ? values[i - 1] : "") + text).join("");
    const parts = {
      subject: form.labels[ratios.ids.indexOf(id)] + ratios.against + form.labels[other],
      statement: joined(form.statements[words]),
      fields: joined(ratios.fields[words]),
      place: `${form.place}${id}/${ratios.ids[other]}`,
      key: `${ratios.key}${id}-${ratios.ids[other]}`,
      tail: form.tails[tail],
    };
    return form.template.map((text, i) => (i % 2 ? parts[text] : text)).join("");
  };
  const cited = (button) => {
    if (button.dataset.plot) return ["the plot", citation("plot", button.dataset.plot)];
    const id = button.dataset.cell;
    const place = Number(baseline.value || 0);
    const ratio = ratioCitation(id, place);
    if (ratio === null) return ["the cell", citation("cell", id)];
    return [`the cell and of its ratio to ${data.baselines[place]}`, `${citation("cell", id)}\n\n${ratio}`];
  };
  const byHand = (text) => {
    at("manual-text").value = text;
    at("manual").showModal();
    at("manual-text").select();
  };
  const oldWay = (text) => {
    const box = document.createElement("textarea");
    box.value = text;
    box.setAttribute("readonly", "");
    box.style.position = "fixed";
    box.style.opacity = "0";
    document.body.append(box);
    box.select();
    let done = false;
    try { done = document.execCommand("copy"); } catch { done = false; }
    box.remove();
    return done;
  };
  const copy = async (button) => {
    const [what, text] = cited(button);
    let done = false;
    try {
      await navigator.clipboard.writeText(text);
      done = true;
    } catch {
      done = oldWay(text);
      button.focus();
    }
    said.textContent = done ? `Copied the citation of ${what}.` : "";
    if (!done) byHand(text);
  };
  for (const button of document.querySelectorAll("button.copy")) {
    button.hidden = false;
    button.addEventListener("click", () => copy(button));
  }

  baseline.addEventListener("change", against);
  for (const box of Object.values(filters)) box.addEventListener("change", filter);
  at("controls").addEventListener("submit", (event) => event.preventDefault());
  at("controls").hidden = false;

  let opened = [];
  addEventListener("beforeprint", () => {
    opened = [...document.querySelectorAll("details:not([open])")];
    for (const one of opened) one.open = true;
  });
  addEventListener("afterprint", () => {
    for (const one of opened) one.open = false;
  });

  rows.forEach(mark);
  filter();
})();
