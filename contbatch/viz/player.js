// The player: paints what view.py worked out, and decides nothing itself. The whole trace is here, so scrubbing
// needs no kernel; only the step number goes back, when a hand lets go. Text enters the page as text, never as HTML.

const CSS = `
.cb { container-type: inline-size; font: 16px/1.4 var(--jp-ui-font-family, system-ui, sans-serif);
  color: var(--jp-content-font-color1, CanvasText); background: var(--jp-layout-color0, Canvas); text-align: left; }
.cb * { box-sizing: border-box; } .cb p, .cb ul, .cb ol { margin: 0; padding: 0; list-style: none; }
.cb-all { padding: 12px; display: grid; gap: 12px; } .cb-title { font-size: 20px; font-weight: 700; }
.cb-bar { display: flex; flex-wrap: wrap; gap: 8px; align-items: center; }
.cb input { font: inherit; } .cb button, .cb select { font: inherit; color: inherit; background: transparent; border: 1.5px solid currentColor;
  border-radius: 6px; min-height: 38px; padding: 4px 12px; cursor: pointer; }
.cb select option { color: CanvasText; background: Canvas; } .cb select { max-width: 190px; padding: 4px 6px; }
.cb button:disabled { opacity: .45; cursor: default; } .cb .cb-play { min-width: 112px; font-weight: 700;
  background: #0072B2; color: #fff; border-color: #0072B2; } .cb label { display: flex; gap: 6px; align-items: center; }
.cb :focus-visible { outline: 3px solid #0072B2; outline-offset: 2px; box-shadow: 0 0 0 2px #fff; }
.cb-now { font-size: 22px; font-weight: 700; font-variant-numeric: tabular-nums; min-width: 7.5em; padding-left: 8px; }
.contbatch-panel { --jp-widgets-font-size: 16px; }
.cb-push { margin-left: auto; display: flex; gap: 8px 14px; flex-wrap: wrap; align-items: center; } .cb-legend { display: flex; flex-wrap: wrap; gap: 4px 16px; }
.cb-legend li, .cb-words li, .cb-queue li { display: flex; gap: 8px; align-items: flex-start; }
.cb-chip { flex: none; width: 24px; height: 24px; border: 1.5px solid currentColor; border-radius: 4px;
  text-align: center; line-height: 21px; font-weight: 700; }
.cb-run { display: grid; gap: 8px 24px; align-items: start;
  grid-template: "name name" auto "main side" auto "said side" 1fr / minmax(0, 1fr) 350px; }
.cb-run + .cb-run { border-top: 2px solid currentColor; padding-top: 12px; }
.cb-name { grid-area: name; font-weight: 700; font-size: 18px; }
.cb-main { grid-area: main; min-width: 0; } .cb-run > .cb-said { grid-area: said; }
.cb-side { grid-area: side; display: grid; gap: 10px; min-width: 0; align-content: start; }
.cb canvas { display: block; width: 100%; } .cb-lanes { overflow-x: hidden; overflow-y: auto; }
.cb-lanes canvas { position: sticky; top: 0; cursor: pointer; } .cb-strip { cursor: pointer; }
.cb input[type=range] { display: block; height: 26px; margin: 0; accent-color: #0072B2; cursor: pointer; }
.cb-head { display: flex; justify-content: space-between; gap: 8px; } .cb-head b { white-space: nowrap; }
.cb-head span { text-align: right; font-variant-numeric: tabular-nums; }
.cb-queue { min-height: 168px; display: grid; gap: 4px; align-content: start; overflow-wrap: anywhere; }
.cb-words { height: 172px; overflow-y: auto; display: grid; gap: 4px; align-content: start; overflow-wrap: anywhere; }
.cb-two .cb-words { height: 128px; } .cb:fullscreen { overflow: auto; }
.cb-caption { font-weight: 600; border-top: 1px solid currentColor; padding-top: 8px; }
.cb-follow { overflow-wrap: anywhere; white-space: pre-wrap; }
@container (max-width: 960px) { .cb-run { grid-template: "name" "main" "side" "said" / minmax(0, 1fr); }
  .cb-side { grid-template-columns: 1fr 1fr; gap: 10px 24px; } .cb-side > :last-child { grid-row: 1 / span 2; grid-column: 2; } }
`;

const LANE = 26, AXIS = 30, NAMES = 148, CELL = 18, FONT = "16px system-ui, sans-serif", BOLD = "700 " + FONT;
const SPEEDS = [1, 2, 5, 10, 30];

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

const count = (n, noun) => `${n} ${noun}${n === 1 ? "" : "s"}`;
const clamp = (x, low, high) => Math.max(low, Math.min(high, x));

// `flat` is [step, value, step, value, ...]: the value that holds at step t.
function at(flat, t) {
  let low = 0, high = flat.length / 2;
  while (low < high) { const mid = (low + high) >> 1; if (flat[2 * mid] <= t) low = mid + 1; else high = mid; }
  return low ? flat[2 * low - 1] : undefined;
}

// Runs back to cells: letters, tokens and cached tokens per step; `last` is the step it ended in, -1 for never.
function unroll(lane, steps, ended) {
  const out = { letters: "", tokens: new Uint32Array(steps), cached: new Uint32Array(steps) };
  for (let i = 0, t = 0; i < lane.length; i += 3) {
    const [tokens, cached] = [lane[i + 2], 0].flat();
    out.letters += lane[i].repeat(lane[i + 1]);
    for (let k = 0; k < lane[i + 1]; k++, t++) { out.tokens[t] = tokens; out.cached[t] = Array.isArray(lane[i + 2]) ? cached : 0; }
  }
  out.last = ended ? out.letters.trimEnd().length - 1 : -1;
  return out;
}

// A drawing surface in CSS pixels, sharp on any screen; colours are those of the page at this moment.
function surface(canvas, height) {
  const dpr = window.devicePixelRatio || 1, width = Math.floor(canvas.parentElement.clientWidth);
  const size = [Math.round(width * dpr), Math.round(height * dpr)];
  if (canvas.width !== size[0] || canvas.height !== size[1]) {
    [canvas.width, canvas.height] = size;
    canvas.style.height = height + "px";
  }
  const g = canvas.getContext("2d"), css = getComputedStyle(canvas.closest(".cb"));
  g.setTransform(dpr, 0, 0, dpr, 0, 0);
  g.clearRect(0, 0, width, height);
  Object.assign(g, { font: FONT, textBaseline: "middle", textAlign: "left", globalAlpha: 1 });
  return { g, dpr, width, height, ink: css.color, paper: css.backgroundColor };
}

const TILES = new Map();
function hatch(s, kind) {
  const key = kind + s.dpr;
  if (!TILES.has(key)) {
    const side = 8, tile = h("canvas", { width: side * s.dpr, height: side * s.dpr }), g = tile.getContext("2d");
    g.scale(s.dpr, s.dpr);
    Object.assign(g, { strokeStyle: "#0007", fillStyle: "#000a", lineWidth: 1.3 });
    g.beginPath();
    const line = (...p) => { g.moveTo(p[0], p[1]); g.lineTo(p[2], p[3]); };
    if (kind === "/" || kind === "x") for (const d of [-side, 0, side]) line(d - 1, side + 1, d + side + 1, -1);
    if (kind === "\\" || kind === "x") for (const d of [-side, 0, side]) line(d - 1, -1, d + side + 1, side + 1);
    if (kind === "-") line(0, 4, side, 4);
    if (kind === ".") { g.arc(2, 2, 1.1, 0, 7); g.moveTo(7, 6); g.arc(6, 6, 1.1, 0, 7); g.fill(); } else g.stroke();
    const pattern = g.createPattern(tile, "repeat");
    pattern.setTransform(new DOMMatrix().scale(1 / s.dpr));
    TILES.set(key, pattern);
  }
  return TILES.get(key);
}

function box(s, style, x, y, w, hgt) {
  const { g } = s;
  g.fillStyle = style.colour;
  g.fillRect(x, y, w, hgt);
  if (style.hatch) { g.fillStyle = hatch(s, style.hatch); g.fillRect(x, y, w, hgt); }
}

function word(s, text, x, y, colour, align = "center", font = FONT, most = 999) {
  Object.assign(s.g, { fillStyle: colour, textAlign: align, font });
  s.g.fillText(text, x, y, most);
}

function fit(g, text, width) {
  if (g.measureText(text).width <= width) return text;
  while (text && g.measureText(text + "…").width > width) text = text.slice(0, -1);
  return text + "…";
}

function chip(styles, letter) {
  const style = styles[letter], node = h("span", { className: "cb-chip", textContent: letter || "■" });
  if (style) Object.assign(node.style, { background: style.colour, color: style.ink, borderColor: "#767676" });
  node.setAttribute("aria-hidden", "true");
  return node;
}

// One run: its lanes on the left, budget, blocks and queue on the right. `app` is shared by both runs of an A/B player.
function makeRun(data, name, app, number) {
  const { styles } = app, N = data.requests.length, n = data.steps;
  const lanes = data.lanes.map((lane, r) => unroll(lane, n, data.requests[r].ended));
  const blocks = Object.entries(data.blocks.runs).map(([b, runs]) => [Number(b), runs]);
  const highest = (uses) => Math.max(1, ...uses.map((u) => Math.max(u[3] ?? 0, u[0] + u[1] + u[2])));
  const most = highest(app.limited ? app.uses : data.use);  // two runs with a budget each share one scale
  const strip = h("canvas", { className: "cb-strip", role: "img", "aria-label": "Tokens per step over the whole run" });
  const canvas = h("canvas", { role: "img" }), spacer = h("div", {}, canvas);
  const scroller = h("div", { className: "cb-lanes", tabIndex: 0, role: "group", "aria-label": `Requests${name && " of " + name}` }, spacer);
  const bar = h("canvas", { role: "img" }), pool = h("canvas", { role: "img" });
  const barText = h("span"), poolText = h("span"), queueText = h("span");
  const words = h("ul", { className: "cb-words", tabIndex: 0, "aria-label": "Decisions of this step" });
  const queue = h("ol", { className: "cb-queue" });
  const panel = (title, value, ...rest) => h("div", {}, h("p", { className: "cb-head" }, h("b", { textContent: title }), value), ...rest);
  const said = panel("What the scheduler decided, and why", h("span"), words);
  said.className = "cb-said";
  const node = h("div", { className: "cb-run", role: "group", "aria-label": name || "Run" },
    ...(name ? [h("p", { className: "cb-name", textContent: name })] : []),
    h("div", { className: "cb-main" }, ...(number ? [] : [app.range]), h("div", {}, strip), scroller),
    h("div", { className: "cb-side" }, panel("Token budget", barText, h("div", {}, bar)), panel("KV blocks", poolText, h("div", {}, pool)),
      app.two ? said : panel("Queue", queueText, queue)), ...(app.two ? [] : [said]));
  const self = { node, data, hits: [] };
  let top = 0, grid = null;

  const rows = () => Math.min(N, app.two ? 8 : 16);
  const scale = () => {
    const room = scroller.clientWidth - NAMES - 4, cell = clamp(Math.floor(room / app.steps), CELL, 44);
    const shown = Math.min(app.steps, Math.floor(room / cell));
    return { cell, shown, first: clamp(app.t - Math.floor(shown * 0.6), 0, app.steps - shown), room };
  };
  // Where step t is on the strip and under the slider's thumb: above its column if all columns fit.
  self.thumb = () => {
    const { cell, shown, room } = scale(), all = shown === app.steps;
    return { left: NAMES + (all ? cell / 2 : 8), width: Math.max(0, all ? cell * (app.steps - 1) : room - 16) };
  };

  function paintStrip() {
    const s = surface(strip, 64), { g } = s, { left, width } = self.thumb(), { first, shown } = scale();
    const gap = width / Math.max(1, app.steps - 1), base = 54, high = 44, bar = Math.max(1, gap > 6 ? gap - 2 : gap);
    word(s, "tokens a step", NAMES - 8, 20, s.ink, "right");
    word(s, `up to ${most}`, NAMES - 8, 42, s.ink, "right");
    data.use.forEach(([p, r, d], t) => {
      let y = base;
      g.globalAlpha = t <= app.t ? 1 : 0.35;
      for (const [tokens, letter] of [[d, "D"], [r, "R"], [p, "P"]]) {
        if (!tokens) continue;
        const tall = (tokens / most) * high;
        if (gap > 6) box(s, styles[letter], left + t * gap - bar / 2, y - tall, bar, tall);
        else { g.fillStyle = styles[letter].colour; g.fillRect(left + t * gap - bar / 2, y - tall, bar, tall); }
        y -= tall;
      }
    });
    g.globalAlpha = 1; g.strokeStyle = s.ink; g.lineWidth = 1;
    g.strokeRect(left - bar / 2, base + 0.5, width + bar, 0);
    if (data.use[0] && data.use[0][3]) {
      g.setLineDash([6, 4]); g.beginPath();
      data.use.forEach((u, t) => { const y = base - ((u[3] ?? 0) / most) * high; g[t ? "lineTo" : "moveTo"](left + t * gap, y); });
      g.stroke(); g.setLineDash([]);
    }
    const x = left + app.t * gap;
    g.lineWidth = 2; g.beginPath(); g.moveTo(x, 2); g.lineTo(x, base); g.stroke();
    if (shown < app.steps) {  // the piece of the run that the lanes show, and its edges down to them
      const a = left + (first - 0.5) * gap, b = left + (first + shown - 0.5) * gap;
      g.strokeRect(a, 4, b - a, base - 4);
      g.beginPath(); g.moveTo(a, base); g.lineTo(NAMES, 64); g.moveTo(b, base); g.lineTo(NAMES + shown * scale().cell, 64); g.stroke();
    }
  }

  function keepInView(t) {
    if (N <= rows()) return;
    const followed = app.follow ? data.requests.findIndex((r) => r.id === app.follow) : -1;
    const live = lanes.map((lane, r) => (followed < 0 ? "PRD.".includes(lane.letters[t] || "-") : r === followed) ? r : -1).filter((r) => r >= 0);
    if (!live.length) return;
    const [low, high] = [live[0], live[live.length - 1]], visible = rows();
    if (low < top || (high >= top + visible && low > top + 1)) top = clamp(low - 1, 0, N - visible);
    if (Math.round(scroller.scrollTop / LANE) !== top) scroller.scrollTop = top * LANE;
  }

  function paintLanes(t) {
    const visible = rows(), high = AXIS + visible * LANE + 4;
    scroller.style.height = high + "px";
    spacer.style.height = AXIS + N * LANE + 4 + "px";
    const s = surface(canvas, high), { g } = s, { cell, shown, first } = scale(), over = app.t >= n;
    const X = (step) => NAMES + (step - first) * cell;
    word(s, "request", 4, AXIS / 2, s.ink, "left");
    word(s, "now", 111, AXIS / 2, s.ink);
    for (let step = first; step < first + shown; step++)
      if (step % 5 === 0 && Math.abs(step - app.t) * cell > 56) word(s, String(step), X(step) + cell / 2, AXIS / 2, s.ink);
    for (let row = 0; row < visible; row++) {
      const r = top + row, y = AXIS + row * LANE, lane = lanes[r], request = data.requests[r];
      if (!lane) break;
      const other = app.follow && request.id !== app.follow;
      const letter = over ? " " : lane.letters[t] ?? " ";
      g.globalAlpha = other ? 0.45 : 1;
      g.font = app.follow && !other ? BOLD : FONT;
      const id = request.id.endsWith(request.label) ? request.id : `${request.label} ${request.id}`;
      word(s, fit(g, id, 74), 4, y + LANE / 2, s.ink, "left", g.font);
      if (letter !== " ") {
        const style = styles[letter], tokens = lane.tokens[t];
        box(s, style, 82, y + 2, 58, LANE - 4);
        if (style.hatch) { g.fillStyle = style.colour; g.fillRect(86, y + 4, 50, LANE - 8); }
        word(s, tokens ? `${letter} ${tokens}` : letter, 111, y + LANE / 2, style.ink, "center", BOLD);
      } else if (lane.last >= 0 && (over || lane.last < t)) word(s, "done", 111, y + LANE / 2, s.ink);
      for (let step = first; step < Math.min(first + shown, n); step++) paintCell(s, lane, step, X(step), y, cell, other);
    }
    g.globalAlpha = 1;
    if (over || t < first || t >= first + shown) return;
    Object.assign(g, { strokeStyle: s.ink, lineWidth: 3, fillStyle: s.ink });
    g.strokeRect(X(t) - 0.5, AXIS - 2, cell + 1, visible * LANE + 4);
    g.font = BOLD;
    const label = `step ${t}`, wide = Math.max(cell + 4, g.measureText(label).width + 12);
    const middle = clamp(X(t) + cell / 2, NAMES + wide / 2 - 4, s.width - wide / 2);
    g.fillRect(middle - wide / 2, 2, wide, AXIS - 4);
    word(s, label, middle, AXIS / 2, s.paper, "center", BOLD);
  }

  function paintCell(s, lane, step, x, y, cell, other) {
    const letter = lane.letters[step] ?? " ", { g } = s, later = step > app.t;
    if (letter === " " || (later && !app.future)) return;
    const style = styles[letter], [w, tall] = [cell - 2, LANE - 6];
    const alpha = (later ? 0.25 : 1) * (other ? 0.35 : 1), pale = "W.".includes(letter);
    g.globalAlpha = alpha * (pale ? 0.35 : 1);
    box(s, style, x + 1, y + 3, w, tall);
    g.globalAlpha = alpha;
    if (lane.cached[step]) box(s, styles.C, x + 1, y + 3, w, tall / 2);
    if ("WXS.".includes(letter)) { g.strokeStyle = s.ink; g.lineWidth = 1; g.strokeRect(x + 1.5, y + 3.5, w - 1, tall - 1); }
    if (!later && (step === 0 || "PRC".includes(letter) || lane.letters[step - 1] !== letter || step === app.t)) {
      const shown = lane.cached[step] ? styles.C : style;
      if (shown.hatch) { g.fillStyle = shown.colour; g.fillRect(x + cell / 2 - 7, y + 5, 14, tall - 4); }
      word(s, lane.cached[step] ? "C" : letter, x + cell / 2, y + LANE / 2 + 1, pale ? s.ink : style.ink, "center", FONT, cell - 6);
    }
    if (step === lane.last) { g.fillStyle = s.ink; g.fillRect(x + cell - 2, y + 1, 4, LANE - 2); }
  }

  function paintBudget(t) {
    const use = data.use[t], s = surface(bar, 62), { g } = s, limit = use?.[3] ?? null, scaleMax = limit ?? most;
    const used = use ? use[0] + use[1] + use[2] : 0, wide = s.width - 2, tall = 34;
    self.hits = [];
    let x = 1;
    for (const r of (use && at(data.order, t)) || []) {
      const lane = lanes[r], style = styles[lane.letters[t]], w = (lane.tokens[t] / scaleMax) * wide;
      if (!style || !w) continue;
      g.globalAlpha = app.follow && data.requests[r].id !== app.follow ? 0.4 : 1;
      box(s, style, x, 2, w, tall);
      g.strokeStyle = s.paper; g.lineWidth = w > 4 ? 1.5 : 0.5; g.strokeRect(x, 2, w, tall);
      const texts = [`${data.requests[r].id} ${lane.tokens[t]}`, data.requests[r].label], text = texts.find((v) => g.measureText(v).width < w - 8);
      if (text) {
        const half = g.measureText(text).width / 2 + 3;
        if (style.hatch) { g.fillStyle = style.colour; g.fillRect(x + w / 2 - half, 8, 2 * half, tall - 12); }
        word(s, text, x + w / 2, 2 + tall / 2, style.ink);
      }
      x += w;
    }
    g.globalAlpha = 1;
    Object.assign(g, { strokeStyle: s.ink, lineWidth: 2 });
    g.strokeRect(1, 2, wide, tall);
    word(s, "0", 2, 50, s.ink, "left");
    word(s, limit === null ? String(scaleMax) : `limit ${limit}`, s.width - 2, 50, s.ink, "right");
    if (limit !== null && use) word(s, limit > used ? `${limit - used} unused` : "full", clamp(x, 70, s.width - 120), 50, s.ink);
    barText.textContent = !use ? "the run is over" : limit === null ? `${count(used, "token")}, no limit` : `${used} of ${limit} tokens used`;
    bar.setAttribute("aria-label", "Token budget: " + barText.textContent);
  }

  function paintPool(t) {
    const K = data.blocks.shown, [used, cached] = data.pool[t] ?? [0, 0], total = data.blocks.total;
    const width = pool.parentElement.clientWidth, room = app.two ? 130 : 300;
    let side = 34;
    while (side > 7 && Math.ceil(K / Math.floor(width / side)) * side > room) side--;
    const columns = Math.max(1, Math.floor(width / side)), lines = Math.ceil(K / columns), more = total - K;
    const s = surface(pool, lines * side + (more > 0 ? 26 : 2)), { g } = s;
    const place = (b) => [((b - 1) % columns) * side, Math.floor((b - 1) / columns) * side];
    Object.assign(g, { strokeStyle: s.ink, lineWidth: 1, globalAlpha: 0.5 });
    for (let b = 1; b <= K; b++) { const [x, y] = place(b); g.strokeRect(x + 2.5, y + 2.5, side - 4, side - 4); }
    grid = { side, columns, K };
    for (const [b, runs] of blocks) {
      const code = at(runs, t);
      if (b > K || code === undefined || code === -1) continue;
      const [x, y] = place(b), owners = code === -2 ? [] : [code].flat(), mine = owners.some((r) => data.requests[r].id === app.follow);
      const letter = owners.length ? lanes[owners[0]].letters[Math.min(t, n - 1)] : "C", style = styles[letter] ?? styles["."];
      g.globalAlpha = app.follow && !mine ? 0.3 : 1;
      box(s, style, x + 2, y + 2, side - 3, side - 3);
      const label = owners.length ? data.requests[owners[0]].label : "C";
      const text = owners.length > 1 && g.measureText(label + "+").width <= side - 3 ? label + "+" : label;
      g.strokeStyle = s.ink; g.lineWidth = owners.length > 1 ? 3 : 1;
      g.strokeRect(x + 2.5, y + 2.5, side - 4, side - 4);
      const wide = g.measureText(text).width;
      if (side >= 19 && wide <= side - 3) {
        if (style.hatch) { g.fillStyle = style.colour; g.fillRect(x + side / 2 - wide / 2 - 1, y + 4, wide + 2, side - 8); }
        word(s, text, x + side / 2 + 0.5, y + side / 2 + 1, style.ink);
      }
    }
    g.globalAlpha = 1;
    if (more > 0) word(s, `${more} more blocks are never used`, 2, lines * side + 14, s.ink, "left");
    poolText.textContent = `${used} of ${total} used` + (cached ? ` · ${cached} cached` : "");
    pool.setAttribute("aria-label", "KV blocks: " + poolText.textContent);
  }

  function paintText(t) {
    const [waiting, ...listed] = (t < n && at(data.queue, t)) || [0];
    queueText.textContent = waiting ? count(waiting, "request") : "nobody waits";
    queue.replaceChildren(...listed.map(([r, letter, why]) => h("li", {}, chip(styles, letter),
      h("span", {}, h("b", { textContent: data.requests[r].id }), why ? ": " + why : ""))),
      ...(waiting > listed.length ? [h("li", { textContent: `and ${waiting - listed.length} more` })] : []));
    const said = t < n ? data.words[t].map((i) => data.said[i]) : [["", `This run ended after step ${n - 1}.`]];
    words.replaceChildren(...said.map(([letter, text]) => h("li", {}, chip(styles, letter), h("span", { textContent: text }))));
    words.scrollTop = 0;
  }

  self.caption = () => (app.t < n ? data.captions[app.t] : `the run ended; its last step: ${data.captions[n - 1]}`);
  self.paint = () => {
    const t = app.t;
    keepInView(Math.min(t, n - 1));
    paintStrip(); paintLanes(Math.min(t, n - 1)); paintBudget(t); paintPool(t); paintText(t);
    canvas.setAttribute("aria-label", self.caption());
    canvas.dataset.frame = Math.min(t, n - 1);
  };
  const lane = (event) => {
    const y = event.clientY - canvas.getBoundingClientRect().top - AXIS;
    return y < 0 ? undefined : data.requests[top + Math.floor(y / LANE)];
  };
  const owners = (event) => {
    const rect = pool.getBoundingClientRect(), [x, y] = [event.clientX - rect.left, event.clientY - rect.top];
    const b = 1 + Math.floor(x / grid.side) + grid.columns * Math.floor(y / grid.side);
    const code = b > grid.K ? undefined : at(data.blocks.runs[b] ?? [], app.t) ?? -1;
    return { b, code, ids: [code ?? -1].flat().filter((r) => r >= 0).map((r) => data.requests[r].id) };
  };
  canvas.addEventListener("click", (e) => { const r = lane(e); if (r) app.setFollow(r.id === app.follow ? "" : r.id); });
  canvas.addEventListener("mousemove", (e) => {
    const request = lane(e), { cell, first } = scale(), step = first + Math.floor((e.offsetX - NAMES) / cell);
    const row = lanes[data.requests.indexOf(request)], style = row && styles[row.letters[step]];
    canvas.title = !request ? "" : !style || e.offsetX < NAMES ? data.requests[data.requests.indexOf(request)].about
      : `${request.id}, step ${step}: ${style.name}` + (row.tokens[step] ? `, ${count(row.tokens[step], "token")}` : "")
        + (row.cached[step] ? `, ${row.cached[step]} from the prefix cache` : "");
  });
  pool.addEventListener("click", (e) => { const { ids } = owners(e); if (ids[0]) app.setFollow(ids[0]); });
  pool.addEventListener("mousemove", (e) => {
    const { b, code, ids } = owners(e);
    pool.title = code === undefined ? "" : `block ${b}: ` + (ids.join(", ") || (code === -2 ? "free, still cached" : "free"));
  });
  scroller.addEventListener("scroll", () => { const now = Math.round(scroller.scrollTop / LANE); if (now !== top) { top = now; app.refresh(false); } });
  const seek = (e) => { const { left, width } = self.thumb(); app.go(Math.round(((e.offsetX - left) / width) * (app.steps - 1)) || 0); };
  strip.addEventListener("pointerdown", (e) => { strip.setPointerCapture(e.pointerId); seek(e); });
  strip.addEventListener("pointermove", (e) => { if (e.buttons) seek(e); });
  strip.addEventListener("pointerup", () => app.save());
  return self;
}

function render({ model, el }) {
  const root = h("div", { className: "cb", role: "group" }), off = [];
  const calm = matchMedia("(prefers-reduced-motion: reduce)"), dark = matchMedia("(prefers-color-scheme: dark)");
  el.append(h("style", { textContent: CSS }), root);
  let app = null, asked = 0, playing = 0;

  function build() {
    stop();
    const data = model.get("payload"), runs = (data && data.runs) || [];
    if (!runs.length || !Math.max(...runs.map((run) => run.steps))) {
      app = null;
      root.replaceChildren(h("p", { className: "cb-all", textContent: "There is no step to show." }));
      return;
    }
    const steps = Math.max(...runs.map((run) => run.steps)), two = runs.length > 1;
    const range = h("input", { type: "range", min: 0, max: steps - 1, step: 1, "aria-label": "Step" });
    const uses = runs.flatMap((run) => run.use), limited = uses.every((u) => u[3] !== null);
    app = { styles: data.styles, uses, limited, steps, two, range, t: 0, follow: "", future: !!model.get("future") };
    const now = h("span", { className: "cb-now" });
    const button = (text, label, act, cls = "") => h("button", { type: "button", textContent: text, title: label, "aria-label": label, className: cls, onclick: act });
    const [first, back, play, next, last] = [button("|◀\uFE0E", "First step", () => jump(0)), button("◀\uFE0E Back", "Back", () => jump(app.t - 1)),
      button("", "Play", toggle, "cb-play"), button("Next ▶\uFE0E", "Next", () => jump(app.t + 1)), button("▶\uFE0E|", "Last step", () => jump(steps - 1))];
    const pick = (options, value, act) => h("select", { onchange: act }, ...options.map(([v, text]) => h("option", { value: v, textContent: text, selected: v === value })));
    const speed = pick(SPEEDS.map((v) => [v, `${v} / s`]), SPEEDS.find((v) => v >= model.get("speed")) ?? 30, () => { set("speed", Number(speed.value)); if (playing) play_(); });
    const ids = [...new Set(runs.flatMap((run) => run.requests.map((r) => r.id)))];
    const follow = pick([["", "nobody"], ...ids.map((id) => [id, id.length > 24 ? id.slice(0, 23) + "…" : id])], "", () => app.setFollow(follow.value));
    const future = h("input", { type: "checkbox", checked: app.future, onchange: () => { app.future = future.checked; set("future", app.future); app.refresh(false); } });
    const caption = h("p", { className: "cb-caption" }), about = h("p", { className: "cb-follow" });
    const used = new Set(runs.flatMap((run) => run.lanes.flat().filter((v) => typeof v === "string")));
    if (runs.some((run) => run.lanes.flat().some(Array.isArray) || run.pool.some((p) => p[1]))) used.add("C");
    const legend = h("ul", { className: "cb-legend" }, ...Object.entries(data.styles).filter(([k]) => used.has(k))
      .map(([k, style]) => h("li", {}, chip(data.styles, k), h("span", { textContent: style.name }))),
      h("li", {}, h("span", { textContent: "▌ end of a request" })));

    app.setFollow = (id) => { app.follow = ids.includes(id) ? id : ""; follow.value = app.follow; set("follow", app.follow); app.refresh(false); };
    app.save = () => set("t", app.t);
    app.go = (t) => { t = clamp(Math.round(t), 0, steps - 1); if (t !== app.t) { app.t = t; app.refresh(); } };
    app.refresh = () => { if (!asked) asked = requestAnimationFrame(paint); };
    app.views = runs.map((run, i) => makeRun(run, two || data.labels[i] ? data.labels[i] : "", app, i));
    app.paint = () => {
      const text = app.views.map((view, i) => (two ? `${data.labels[i]}: ` : "") + view.caption()).join(" ");
      range.value = app.t;
      range.setAttribute("aria-valuetext", `Step ${app.t} of ${steps - 1}`);
      now.textContent = `Step ${app.t} / ${steps - 1}`;
      play.textContent = playing ? "❚❚ Pause" : "▶\uFE0E Play";
      play.setAttribute("aria-label", playing ? "Pause" : "Play");
      first.disabled = back.disabled = app.t === 0;
      next.disabled = last.disabled = app.t === steps - 1;
      for (const view of app.views) view.paint();
      const { left, width } = app.views[0].thumb();
      Object.assign(range.style, { marginLeft: left - 8 + "px", width: width + 16 + "px" });
      if (playing) caption.removeAttribute("role"); else caption.setAttribute("role", "status");
      if (caption.textContent !== text) caption.textContent = text;
      root.setAttribute("aria-label", `${data.title || "Player"}. ${text}`);
      about.textContent = !app.follow ? "" : runs.flatMap((run) => run.requests.filter((r) => r.id === app.follow)
        .map((r) => [r.about, r.prompt && `Prompt: “${r.prompt}”`, r.text && `Answer: “${r.text}”`].filter(Boolean).join("  "))).join("\n");
      about.hidden = !app.follow;
    };
    range.addEventListener("input", () => { stop(); app.go(Number(range.value)); });
    range.addEventListener("change", app.save);
    root.replaceChildren(h("div", { className: "cb-all" + (two ? " cb-two" : "") }, ...(data.title ? [h("p", { className: "cb-title", textContent: data.title })] : []),
      h("div", { className: "cb-bar" }, first, back, play, next, last, now,
        h("div", { className: "cb-push" }, h("label", {}, "Speed", speed), h("label", {}, "Follow", follow),
          h("label", {}, future, "Later steps"), button("Full screen", "Full screen", () => document.fullscreenElement ? document.exitFullscreen() : root.requestFullscreen()))),
      legend, ...app.views.map((view) => view.node), caption, about,
      ...runs.map((run, i) => h("p", { textContent: (two ? `${data.labels[i]}: ` : "") + run.summary }))));
    app.t = clamp(model.get("t") || 0, 0, steps - 1);
    if (model.get("follow")) { app.follow = ids.includes(model.get("follow")) ? model.get("follow") : ""; follow.value = app.follow; }
    app.refresh();
  }

  // ipywidgets gives the handle of a slider no accessible name; a knob's handle takes that of its label.
  function nameKnobs() {
    for (const handle of el.closest(".contbatch-panel")?.querySelectorAll(".noUi-handle:not([aria-label])") ?? [])
      handle.setAttribute("aria-label", handle.closest(".widget-inline-hbox")?.querySelector(".widget-label")?.textContent || "knob");
  }

  function paint() {
    asked = 0;
    nameKnobs();
    if (!app || !root.clientWidth) return;
    const start = performance.now();
    app.paint();
    root.dataset.frame = app.t;
    root.dataset.paintMs = (performance.now() - start).toFixed(2);
  }

  function set(name, value) { if (model.get(name) !== value) { model.set(name, value); model.save_changes(); } }
  function jump(t) { stop(); app.go(t); app.save(); }
  function stop() { if (playing) { cancelAnimationFrame(playing); playing = 0; if (app) { app.save(); app.refresh(); } } }
  function toggle() { if (playing) stop(); else { if (app.t === app.steps - 1) app.go(0); play_(); } }
  function play_() {
    cancelAnimationFrame(playing);
    let before = null, owed = 0;
    const tick = (time) => {
      const rate = calm.matches ? Math.min(2, model.get("speed")) : model.get("speed");
      owed += before === null ? 0 : Math.min((time - before) / 1000, 0.5) * rate;
      before = time;
      playing = requestAnimationFrame(tick);
      if (owed >= 1) { app.go(app.t + Math.floor(owed)); owed %= 1; }
      if (app.t === app.steps - 1) stop();
    };
    playing = requestAnimationFrame(tick);
    app.refresh();
  }

  // JupyterLab owns the arrow keys, so a key that means something here goes no further.
  const keys = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1, PageDown: -10, PageUp: 10, Home: -Infinity, End: Infinity };
  root.addEventListener("keydown", (event) => {
    const target = event.target, control = target.matches("select, button, input[type=checkbox]");
    if (!app || event.ctrlKey || event.altKey || event.metaKey) return;
    if (!(event.key in keys) && event.key !== " ") return;
    event.stopPropagation();
    if (target.matches("select") || (event.key === " " && control)) return;
    if (target.matches(".cb-lanes, .cb-words") && /Arrow(Up|Down)|Page/.test(event.key)) return;
    event.preventDefault();
    if (event.key === " ") toggle(); else jump(app.t + keys[event.key]);
  });

  const redraw = () => { if (app) app.refresh(); };
  const listen = (target, name, act) => { target.addEventListener(name, act); off.push(() => target.removeEventListener(name, act)); };
  const observe = (name, act) => { model.on(name, act); off.push(() => model.off(name, act)); };
  observe("change:payload", build);
  observe("change:t", () => { if (app) app.go(model.get("t")); });
  observe("change:follow", () => { if (app && model.get("follow") !== app.follow) app.setFollow(model.get("follow")); });
  listen(dark, "change", redraw);
  const sizes = new ResizeObserver(redraw), theme = new MutationObserver(redraw);
  sizes.observe(root);
  theme.observe(document.body, { attributes: true });
  off.push(() => sizes.disconnect(), () => theme.disconnect(), () => cancelAnimationFrame(playing), () => cancelAnimationFrame(asked));
  build();
  return () => off.forEach((undo) => undo());
}

export default { render };
