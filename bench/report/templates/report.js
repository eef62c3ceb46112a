"use strict";
(() => {
  let parsed = null;
  const data = () => (parsed ??= JSON.parse(at("data").textContent));  // megabytes, which nobody needs to read the page
  const table = document.getElementById("overview");
  const bodies = [...table.tBodies];
  const rows = [...table.querySelectorAll("tr[data-id]")];
  const at = (id) => document.getElementById(id);
  const said = at("said");
  const field = (row, key) => row.querySelector(`[data-key="${key}"]`);
  const baseline = at("baseline");
  const place = at("by-place");
  const own = at("by-backend");
  const chosenN = () => (at("by-n").value ?? new FormData(at("controls")).get("n"));

  // Cells of the baseline that is picked; ratios and verdicts are those that the run was judged by.
  const put = (row, key, value) => {
    const cell = field(row, key);
    if (value === null) delete cell.dataset.value;
    else cell.dataset.value = value;
    return cell;
  };
  const mark = (row) => {
    const cell = field(row, "verdict");
    for (const word of ["faster", "slower"]) cell.classList.toggle(word, cell.textContent === word);
  };
  const name = (row) => row.cells[0].textContent;
  const against = () => {
    const picked = Number(baseline.value);
    const chosen = data().baselines[picked];
    // The ratio of memory is to the run's own baseline.
    for (const one of table.querySelectorAll('[data-part="memory"]')) one.hidden = picked !== 0;
    for (const row of rows) {
      const found = (data().ratios[row.dataset.id] || []).find((one) => one[0] === picked);
      let ratio = "-", ends = "", verdict = "-";
      const isTimed = "timed" in row.closest("tbody").dataset;
      if (isTimed && name(row) === chosen) [ratio, verdict] = ["1", "baseline"];
      else if (found) {
        const [, middle, below, word, reason, more] = found;
        if (middle !== null) [ratio, ends] = [middle, below];
        verdict = data().verdicts[word] + (data().decided.includes(word) ? "" : `: ${data().reasons[reason]}`) + more;
      }
      const cell = put(row, "ratio", ratio === "-" ? null : ratio);
      cell.querySelector('[data-part="ratio"]').textContent = ratio;
      cell.querySelector('[data-part="ends"]').textContent = ends;
      put(row, "verdict", verdict === "-" ? null : verdict).textContent = verdict;
      mark(row);
    }
    const shown = document.createElement("bdi");
    shown.textContent = chosen;
    at("against").replaceChildren(shown);
    sort();
  };

  const filter = () => {
    const n = chosenN();
    for (const body of bodies) {
      body.hidden = (n !== "" && body.dataset.n !== n) || (place && place.value !== "" && body.dataset.place !== place.value);
    }
    for (const row of rows) row.hidden = own.value !== "" && row.dataset.backend !== own.value;
    for (const body of bodies) body.hidden ||= [...body.rows].slice(1).every((row) => row.hidden);
    said.textContent = bodies.every((body) => body.hidden) ? "No cell has this N, world and backend." : "";
  };

  // What has no value comes last, whichever way the column is sorted.
  let by = null, down = false;
  const sort = () => {
    if (by === null) return;
    const numeric = by.classList.contains("number");
    for (const body of bodies) {
      const keyed = [...body.rows].slice(1).map((row) => [row, field(row, by.dataset.key).dataset.value]);
      keyed.sort(([, a], [, b]) => {
        if (a === undefined || b === undefined) return (a === undefined) - (b === undefined);
        const order = numeric ? Number(a) - Number(b) : a < b ? -1 : a > b ? 1 : 0;
        return down ? -order : order;
      });
      body.append(...keyed.map(([row]) => row));
    }
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
    const format = data().citations[kind][at("format").value];
    return format.of[key] + format.end;
  };
  const cited = (button) => {
    if (button.dataset.plot) return ["the plot", citation("plot", button.dataset.plot)];
    const id = button.dataset.cell;
    const text = citation("cell", id);
    const picked = baseline ? data().baselines[baseline.value] : null;
    if (picked === null || picked === data().baselines[0]) {
      if (!(id in data().citations.ratio.text.of)) return ["the cell", text];
      return [`the cell and of its ratio to ${data().baselines[0]}`, `${text}\n\n${citation("ratio", id)}`];
    }
    // That to another baseline is cited on the command line: the page has the run's own.
    const other = [...button.closest("tbody").rows].find((row) => row.dataset.id && name(row) === picked);
    if (!other || other.dataset.id === id) return ["the cell", text];
    const command = `python -m bench cite ${data().places} ${id} ${other.dataset.id}`;
    return [`the cell, and the command that cites its ratio to ${picked}`, `${text}\n\n${command}`];
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

  if (baseline) baseline.addEventListener("change", against);
  at("controls").addEventListener("change", filter);
  at("controls").addEventListener("submit", (event) => event.preventDefault());
  at("controls").hidden = false;

  // A browser with scripts takes what is in noscript as text: tables cost nothing until they are opened.
  const show = (box) => {
    for (const one of box.querySelectorAll(":scope > noscript")) one.outerHTML = one.textContent;
  };
  const boxes = [...document.querySelectorAll("details")];
  for (const one of boxes) one.addEventListener("toggle", () => show(one));

  let opened = [];
  addEventListener("beforeprint", () => {
    boxes.forEach(show);
    opened = [...document.querySelectorAll("details:not([open])")];
    for (const one of opened) one.open = true;
  });
  addEventListener("afterprint", () => {
    for (const one of opened) one.open = false;
  });

  if (bodies.length) {
    const first = bodies[0].dataset;
    const box = at("by-n");
    if (box.tagName === "SELECT") box.value = first.n;
    else box.querySelector(`[value="${first.n}"]`).checked = true;
    if (place) place.value = first.place;
  }
  filter();
})();
