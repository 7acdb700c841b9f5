// The linked arrays: paints what flat.py worked out, and marks the entries that speak of the chosen token. It knows
// no rule of the flat batch; which entry belongs to which token comes with the data. Text enters the page as text.

const CSS = `
.cf { container-type: inline-size; font: 16px/1.4 var(--jp-ui-font-family, system-ui, sans-serif); text-align: left;
  color: var(--jp-content-font-color1, CanvasText); background: var(--jp-layout-color0, Canvas); }
.cf * { box-sizing: border-box; } .cf p { margin: 0; } .cf-all { padding: 12px; display: grid; gap: 12px; min-width: 0; }
.cf-all > * { min-width: 0; } .cf-title { font-size: 20px; font-weight: 700; }
.cf-bar { display: flex; flex-wrap: wrap; gap: 8px 12px; align-items: center; }
.cf button, .cf select { font: inherit; color: inherit; background: transparent; border: 1.5px solid currentColor;
  border-radius: 6px; min-height: 38px; padding: 4px 12px; cursor: pointer; }
.cf select option { color: CanvasText; background: Canvas; } .cf button:disabled { opacity: .45; cursor: default; }
.cf label { display: flex; gap: 8px; align-items: center; } .cf-slide { flex: 1 1 260px; }
.cf input[type=range] { flex: 1; height: 26px; margin: 0; accent-color: #0072B2; cursor: pointer; }
.cf-now { font-size: 20px; font-weight: 700; font-variant-numeric: tabular-nums; min-width: 5.4em; }
.cf :focus-visible { outline: 3px solid #0072B2; outline-offset: 2px; box-shadow: 0 0 0 2px #fff; }
.cf-said { font-size: 18px; min-height: 5.8em; border-left: 6px solid #F0E442; padding-left: 12px; }
.cf-wide { overflow-x: auto; } .cf-pair { display: flex; flex-wrap: wrap; gap: 12px 40px; align-items: flex-start; }
.cf-pair > * { min-width: 0; max-width: 100%; }
.cf table { border-collapse: separate; border-spacing: 2px; font-variant-numeric: tabular-nums; margin: 0;
  font-size: 16px; background: inherit; color: inherit; border: 0; table-layout: auto; width: auto; }
.cf caption { text-align: left; font-weight: 700; padding: 0 0 4px; color: inherit; caption-side: top; }
.cf thead, .cf tbody, .cf tr { background: transparent !important; border: 0; }
.cf th, .cf td { border: 1px solid color-mix(in srgb, currentColor 45%, transparent); padding: 2px 4px; text-align: center; min-width: clamp(30px, 4.2cqw, 54px); height: 32px;
  font-weight: 400; white-space: pre; vertical-align: middle; background: transparent; max-width: none; }
.cf th[scope=row] { border-color: transparent; text-align: right; font-family: var(--jp-code-font-family, monospace);
  position: sticky; left: 0; background: var(--jp-layout-color0, Canvas); padding-right: 8px; }
.cf thead th { border-color: transparent; } .cf thead th.cf-owner { font-weight: 700; border-color: #767676; }
.cf td.cf-text { font-size: 14px; } .cf td.cf-token, .cf th.cf-token { cursor: pointer; }
.cf .cf-on { background: #F0E442 !important; color: #000 !important; font-weight: 700; outline: 3px solid #000; outline-offset: -1px;
  box-shadow: 0 0 0 3px #F0E442; }
.cf .cf-wrong { border: 3px solid #D55E00; font-weight: 700; }
.cf canvas { display: block; width: 100%; cursor: pointer; } .cf-caption { font-weight: 600; }
.cf-end { border-top: 1px solid currentColor; padding-top: 8px; display: grid; gap: 4px; }
`;

function h(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(props)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key in node && key !== "role") node[key] = value;
    else node.setAttribute(key, value);
  }
  node.append(...children);
  return node;
}

const clamp = (x, low, high) => Math.max(low, Math.min(high, x));
const HATCH = "repeating-linear-gradient(135deg, #0006 0 1.5px, transparent 1.5px 8px)";

function render({ model, el }) {
  const root = h("div", { className: "cf", role: "group" }), off = [];
  el.append(h("style", { textContent: CSS }), root);
  let app = null, asked = 0;

  function build() {
    const data = model.get("payload"), T = data.tokens.length, wrong = new Set(data.wrong.map(([name, i]) => `${name} ${i}`));
    const marks = [];  // [does it speak of token t?, node]
    const mark = (node, speaks) => { marks.push([speaks, node]); return node; };
    const pick = (node, t) => {
      node.classList.add("cf-token");
      node.addEventListener("pointerenter", () => show(t));
      node.addEventListener("click", () => choose(t));
      return node;
    };
    const table = (title, head, rows) => h("div", { className: "cf-wide", tabIndex: 0, role: "region", "aria-label": title },
      h("table", {}, h("caption", { textContent: title }), h("thead", {}, ...head), h("tbody", {}, ...rows)));
    const rowHead = (text) => h("th", { scope: "row", textContent: text });

    const owner = (r) => {
      const { id, letter, start, end } = data.requests[r], style = data.styles[letter];
      const node = h("th", { className: "cf-owner", scope: "colgroup", colSpan: end - start, textContent: end - start > 1 ? `${letter} ${id}` : id });
      Object.assign(node.style, { background: style.colour, color: style.ink });
      if (style.hatch) node.style.borderTop = node.style.borderBottom = "5px double #000";
      return node;
    };
    const tokenTable = table("One entry per token", [
      h("tr", {}, rowHead("request"), ...data.requests.map((_, r) => owner(r))),
      h("tr", {}, rowHead("token"), ...data.tokens.map((_, t) => pick(mark(h("th", { scope: "col", textContent: t }), (now) => now === t), t))),
    ], data.tokenRows.map(([name, texts]) => h("tr", {}, rowHead(name), ...texts.map((text, t) => {
      const bad = wrong.has(`${name} ${t}`) || (name === "sampled" && wrong.has(`sample_rows ${t}`));
      const node = h("td", { textContent: (bad ? "✘ " : "") + text, className: (bad ? "cf-wrong " : "") + (name === "text" ? "cf-text" : "") });
      return pick(mark(node, (now) => now === t), t);
    }))));

    const B = data.requests.length, row = (t) => data.tokens[t].row;
    const requestTable = table("One entry per request", [
      h("tr", {}, rowHead("entry"), ...[...Array(B + 1).keys()].map((b) => h("th", { scope: "col", textContent: b }))),
      h("tr", {}, rowHead("request"), ...data.requests.map((r, b) => mark(h("th", { scope: "col", textContent: `${r.letter} ${r.id}` }), (now) => row(now) === b)), h("td")),
    ], data.requestRows.map(([name, texts]) => h("tr", {}, rowHead(name), ...texts.map((text, b) =>
      mark(h("td", { textContent: text }), (now) => name === "sample_rows" ? Number(text) === now
        : row(now) === b || (name === "cu_seqlens" && row(now) + 1 === b))),
      ...Array(Math.max(0, B + 1 - texts.length)).fill(0).map(() => h("td")))));

    const columns = data.blockTables[0].length;
    const blockTable = table("block_tables", [
      h("tr", {}, rowHead("block of the sequence"), ...[...Array(columns).keys()].map((c) => h("th", { scope: "col", textContent: c }))),
    ], data.blockTables.map((blocks, b) => h("tr", {}, rowHead(data.requests[b].id), ...blocks.map((block, c) =>
      mark(h("td", { textContent: block }), (now) => row(now) === b && data.tokens[now].column === c)))));

    const canvas = h("canvas", { role: "img" });
    canvas.addEventListener("pointermove", (e) => { const t = app.maskRow(e); if (t !== null) show(t); });
    canvas.addEventListener("click", (e) => { const t = app.maskRow(e); if (t !== null) choose(t); });
    const range = h("input", { type: "range", min: 0, max: T - 1, step: 1, "aria-label": "Token", oninput: () => show(Number(range.value), true), onchange: save });
    const button = (text, label, act) => h("button", { type: "button", textContent: text, "aria-label": label, onclick: act });
    const back = button("◀\uFE0E Back", "Back", () => choose(app.t - 1)), next = button("Next ▶\uFE0E", "Next", () => choose(app.t + 1));
    const request = h("select", { onchange: () => choose(data.requests[Number(request.value)].start) },
      ...data.requests.map((r, b) => h("option", { value: b, textContent: `${r.letter} ${r.id}` })));
    const now = h("span", { className: "cf-now" }), said = h("p", { className: "cf-said", role: "status" });
    const tables = h("div", { className: "cf-pair" }, requestTable, blockTable);
    for (const place of [tokenTable, canvas]) place.addEventListener("pointerleave", () => show(app.chosen));

    app = { data, marks, canvas, range, back, next, request, now, said, t: clamp(model.get("token") || 0, 0, T - 1) };
    app.chosen = app.t;
    app.maskRow = (e) => {
      const t = Math.floor((e.offsetY - HEAD) / app.tall);
      return t >= 0 && t < T ? t : null;
    };
    root.setAttribute("aria-label", `${data.title}. ${data.caption}`);
    root.replaceChildren(h("div", { className: "cf-all" },
      h("p", { className: "cf-title", textContent: data.title }),
      h("div", { className: "cf-bar" }, back, h("label", { className: "cf-slide" }, "Token", range), next, now, h("label", {}, "Request", request)),
      said, tokenTable, tables,
      h("div", {}, h("p", { className: "cf-caption", textContent: "Attention mask: a row per token, a column per key" }), canvas),
      h("div", { className: "cf-end" }, h("p", { className: "cf-caption", textContent: data.caption }), h("p", { textContent: data.maskCaption }),
        ...data.problems.map((text) => h("p", { textContent: `✘ ${text}` })))));
    refresh();
  }

  const HEAD = 44, LEFT = 96;

  function paintMask() {
    const { data, canvas, t } = app, T = data.tokens.length, width = Math.floor(canvas.parentElement.clientWidth);
    if (!width) return;
    const dpr = window.devicePixelRatio || 1, tall = app.tall = clamp(Math.round(420 / T), 10, 26), height = HEAD + T * tall + 4;
    canvas.width = Math.round(width * dpr); canvas.height = Math.round(height * dpr); canvas.style.height = height + "px";
    const g = canvas.getContext("2d"), css = getComputedStyle(root), ink = css.color, last = data.requests.length - 1;
    const K = data.requests[last].keys[1], unit = (width - LEFT - 4) / K, X = (k) => LEFT + k * unit, Y = (r) => HEAD + r * tall;
    g.setTransform(dpr, 0, 0, dpr, 0, 0);
    g.clearRect(0, 0, width, height);
    Object.assign(g, { font: "15px system-ui, sans-serif", textBaseline: "middle", strokeStyle: ink });
    for (const { id, letter, start, end, context, keys } of data.requests) {
      g.fillStyle = ink; g.globalAlpha = 0.14; g.fillRect(X(keys[0]), Y(start), X(keys[1]) - X(keys[0]), (end - start) * tall); g.globalAlpha = 1;
      g.lineWidth = 1; g.beginPath(); g.moveTo(X(keys[1]), HEAD - 6); g.lineTo(X(keys[1]), Y(T)); g.moveTo(4, Y(end)); g.lineTo(X(K), Y(end)); g.stroke();
      g.textAlign = "left"; g.fillText(`${letter} ${id}`, 6, Y((start + end) / 2));
      g.textAlign = "center";
      const wide = X(keys[1]) - X(keys[0]), texts = [`${id}: ${context} + ${end - start}`, id].find((text) => g.measureText(text).width < wide);
      if (texts) g.fillText(texts, X(keys[0]) + wide / 2, HEAD / 2 - 4);
    }
    data.tokens.forEach(({ keys }, r) => { g.fillStyle = ink; g.fillRect(X(keys[0]), Y(r) + 1, (keys[1] - keys[0]) * unit, tall - 2); });
    for (const { start, end, context, keys } of data.requests) {
      Object.assign(g, { strokeStyle: "#D55E00", lineWidth: 2.5 }); g.setLineDash([5, 3]);
      g.beginPath(); g.moveTo(X(keys[0] + context), Y(start)); g.lineTo(X(keys[0] + context), Y(end)); g.stroke();
    }
    g.setLineDash([]);
    const { keys } = data.tokens[t];
    g.fillStyle = "#F0E442"; g.fillRect(X(keys[0]), Y(t), (keys[1] - keys[0]) * unit, tall);
    Object.assign(g, { strokeStyle: ink, lineWidth: 2.5, textAlign: "right", fillStyle: ink });
    g.strokeRect(X(0), Y(t), X(K) - X(0), tall);
    g.font = "700 15px system-ui, sans-serif"; g.fillText(String(t), LEFT - 6, Y(t) + tall / 2);
    canvas.setAttribute("aria-label", `${data.maskCaption} Token ${t} looks at ${keys[1] - keys[0]} of them.`);
  }

  function paint() {
    asked = 0;
    if (!app || !root.clientWidth) return;
    const { data, t } = app, T = data.tokens.length;
    for (const [speaks, node] of app.marks) node.classList.toggle("cf-on", speaks(t));
    app.range.value = t;
    app.range.setAttribute("aria-valuetext", `Token ${t} of ${T - 1}, request ${data.requests[data.tokens[t].row].id}`);
    app.now.textContent = `${t} / ${T - 1}`;
    app.request.value = data.tokens[t].row;
    app.back.disabled = app.chosen === 0; app.next.disabled = app.chosen === T - 1;
    if (app.said.textContent !== data.tokens[t].said) app.said.textContent = data.tokens[t].said;
    paintMask();
    root.dataset.token = t;
  }

  function refresh() { if (!asked) asked = requestAnimationFrame(paint); }
  function show(t, chosen = false) { app.t = t; if (chosen) app.chosen = t; refresh(); }
  function save() { if (model.get("token") !== app.chosen) { model.set("token", app.chosen); model.save_changes(); } }
  function choose(t) { show(clamp(t, 0, app.data.tokens.length - 1), true); save(); }

  // JupyterLab owns the arrow keys, so a key that means something here goes no further.
  const keys = { ArrowLeft: -1, ArrowRight: 1, PageDown: -10, PageUp: 10, Home: -Infinity, End: Infinity };
  root.addEventListener("keydown", (event) => {
    if (!app || event.ctrlKey || event.altKey || event.metaKey || !(event.key in keys)) return;
    event.stopPropagation();
    if (event.target.matches("select, .cf-wide")) return;
    event.preventDefault();
    choose(app.chosen + keys[event.key]);
  });

  const observe = (name, act) => { model.on(name, act); off.push(() => model.off(name, act)); };
  observe("change:payload", build);
  observe("change:token", () => { if (app) show(model.get("token"), true); });
  const sizes = new ResizeObserver(refresh), theme = new MutationObserver(refresh);
  sizes.observe(root);
  theme.observe(document.body, { attributes: true });
  off.push(() => sizes.disconnect(), () => theme.disconnect(), () => cancelAnimationFrame(asked));
  build();
  return () => off.forEach((undo) => undo());
}

export default { render };
