"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);
  const state = { axis: data.axis, moment: data.peak, by: "code", zoom: [] };
  const views = {};

  // ---------------------------------------------------------------- text
  const units = [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]];
  function bytesText(size) {
    const found = units.find(([, factor]) => Math.abs(size) >= factor);
    return found ? (size / found[1]).toFixed(2) + " " + found[0] : size + (Math.abs(size) === 1 ? " byte" : " bytes");
  }
  const number = (count) => count.toLocaleString("en-US");
  function element(tag, text, className) {
    const made = document.createElement(tag);
    if (text !== undefined) made.textContent = text;
    if (className) made.className = className;
    return made;
  }
  const colour = (category) => data.colours[category] || "#8a8f98";

  // ---------------------------------------------------------------- charts
  function theme() {
    const style = getComputedStyle(document.documentElement);
    const [text, soft, line] = ["--text", "--soft", "--line"].map((name) => style.getPropertyValue(name).trim());
    return {
      background: "transparent",
      font: "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif",
      axis: { labelColor: soft, titleColor: soft, gridColor: line, domainColor: line, tickColor: line, labelFontSize: 12, titleFontSize: 12, titleFontWeight: "normal" },
      legend: { labelColor: text, titleColor: soft, labelFontSize: 12.5, titleFontSize: 12.5, titleFontWeight: "normal" },
      view: { stroke: null },
      text: { color: text },
      rule: { color: text },
      area: { line: false },
    };
  }
  async function drawCharts() {
    const names = Object.keys(data.specs[state.axis]);
    await Promise.all(names.map(async (name) => {
      const target = byId("chart-" + name);
      if (!target) return;
      const spec = { ...data.specs[state.axis][name], width: "container", height: "container", datasets: data.datasets };
      spec.autosize = { type: "fit", contains: "padding" };
      const options = { ast: true, renderer: "svg", config: theme(), actions: { export: true, source: false, compiled: false, editor: false }, downloadFileName: "xmem-" + name };
      const result = await vegaEmbed(target, spec, options);
      if (views[name]) views[name].finalize();
      views[name] = result.view;
      if (name === "memory" || name === "levels") listen(target, result.view);
    }));
    moveCursor();
    document.body.dataset.ready = "yes";
  }
  function listen(target, view) {
    target.onclick = (event) => {
      if (event.target.closest("details, summary")) return;
      const picture = target.querySelector("svg.marks");
      if (!picture) return;
      const left = event.clientX - picture.getBoundingClientRect().left - view.origin()[0];
      choose(nearest(view.scale("x").invert(left)));
    };
    target.style.cursor = "crosshair";
  }
  function nearest(x) {
    const curve = data.datasets.curve;
    let best = 0, least = Infinity;
    data.moments.forEach((point, place) => {
      const away = Math.abs(curve[point][state.axis] - x);
      if (away < least) { least = away; best = place; }
    });
    return best;
  }
  function moveCursor() {
    const point = data.datasets.curve[data.moments[state.moment]];
    for (const name of ["memory", "levels"]) {
      if (views[name]) views[name].data("cursor", [{ t: point.t, e: point.e }]).run();
    }
  }

  // ---------------------------------------------------------------- alive at a moment
  const held = { at: -1, bytes: [], count: [] };
  function levelsAt(moment) {
    if (moment < held.at || held.at < 0) {
      held.at = -1;
      held.bytes = data.groups.map(() => 0);
      held.count = data.groups.map(() => 0);
    }
    for (; held.at < moment; held.at += 1) {
      for (const [group, bytes, count] of data.changes[held.at + 1]) {
        held.bytes[group] += bytes;
        held.count[group] += count;
      }
    }
    return held;
  }
  const text = (index) => (index === null ? null : data.texts[index]);
  function causeOf(group, by) {
    const [category, phase, op, leaf, module, frames] = group;
    if (by === "category") return text(category);
    if (by === "phase") return text(phase) ?? "(phase not known)";
    if (by === "op") return text(op) ?? "(no operator recorded)";
    if (by === "module") return text(module) ?? "(no module recorded)";
    const code = frames.length ? text(frames[frames.length - 1]) : null;
    const own = frames.map(text).reverse().find((frame) => !/(^|[ (/])(torch|torchvision|nn|optim|autograd|functional|modules|site-packages)\//.test(frame));
    return own ?? code ?? text(op) ?? "(no stack or operator recorded)";
  }
  function showAlive() {
    const levels = levelsAt(state.moment);
    const sums = new Map();
    let whole = 0, many = 0;
    data.groups.forEach((group, place) => {
      const size = levels.bytes[place], count = levels.count[place];
      if (!size && !count) return;
      const category = text(group[0]);
      const key = JSON.stringify([category, causeOf(group, state.by)]);
      const sum = sums.get(key) || { category, cause: causeOf(group, state.by), size: 0, count: 0 };
      sum.size += size;
      sum.count += count;
      sums.set(key, sum);
      whole += size;
      many += count;
    });
    const rows = [...sums.values()].sort((a, b) => b.size - a.size || (a.cause < b.cause ? -1 : 1));
    const body = byId("alive").tBodies[0];
    body.replaceChildren(...rows.slice(0, 100).map((row) => rowOf(row, whole)));
    if (rows.length > 100) {
      const rest = rows.slice(100);
      const add = (name) => rest.reduce((sum, row) => sum + row[name], 0);
      body.append(rowOf({ category: null, cause: `(${rest.length} smaller causes)`, size: add("size"), count: add("count") }, whole));
    }
    const point = data.datasets.curve[data.moments[state.moment]];
    const when = data.timeUnit === "event" ? `event ${number(point.e)}` : `${number(point.t)} ${data.timeUnit}, event ${number(point.e)}`;
    byId("alive-when").textContent = (state.moment === data.peak ? "at the peak, " : "at ") + when;
    const sum = byId("alive-sum");
    sum.textContent = `${bytesText(whole)} (${number(whole)} bytes) in ${number(many)} allocations.`;
    sum.dataset.bytes = String(whole);
    byId("moment").setAttribute("aria-valuetext", `${when}: ${bytesText(whole)}`);
    drawFlame(levels, whole);
  }
  function rowOf(row, whole) {
    const line = element("tr"), cause = element("td"), swatch = element("span", "", "swatch");
    if (row.category !== null) {
      swatch.style.background = colour(row.category);
      cause.append(swatch, row.category, row.cause === row.category ? "" : " · " + row.cause);
    } else cause.append(row.cause);
    const size = element("td", bytesText(row.size), "number");
    size.dataset.bytes = String(row.size);
    size.title = number(row.size) + " bytes";
    const share = whole ? ((100 * row.size) / whole).toFixed(1) + " %" : "";
    line.append(cause, size, element("td", share, "number"), element("td", number(row.count), "number"));
    return line;
  }

  // ---------------------------------------------------------------- flame graph
  function pathOf(group) {
    const [category, phase, op, leaf, module, frames] = group;
    const tail = frames.length ? frames.map(text) : [phase, module, op, leaf === op ? null : leaf].map(text).filter((name) => name !== null);
    return [text(category), ...(tail.length ? tail : ["(no stack or operator recorded)"])];
  }
  const paths = data.groups.map(pathOf);
  function treeOf(levels) {
    const root = { name: "all", size: 0, children: new Map(), depth: 0 };
    paths.forEach((path, place) => {
      const size = levels.bytes[place];
      if (size <= 0) return;
      let node = root;
      node.size += size;
      path.forEach((name) => {
        if (!node.children.has(name)) node.children.set(name, { name, size: 0, children: new Map(), parent: node, category: path[0] });
        node = node.children.get(name);
        node.size += size;
      });
    });
    return root;
  }
  function drawFlame(levels, whole) {
    const box = byId("flame");
    let root = treeOf(levels);
    const above = [root];
    for (const name of state.zoom) {
      if (!root.children.has(name)) { state.zoom = state.zoom.slice(0, above.length - 1); break; }
      root = root.children.get(name);
      above.push(root);
    }
    const bars = [];
    above.slice(0, -1).forEach((node, depth) => bars.push({ node, left: 0, width: 1, depth, zoom: state.zoom.slice(0, depth) }));
    const lay = (node, left, depth, zoom) => {
      bars.push({ node, left, width: root.size ? node.size / root.size : 1, depth, zoom });
      let at = left;
      for (const child of [...node.children.values()].sort((a, b) => b.size - a.size)) {
        const width = root.size ? child.size / root.size : 0;
        if (width > 0.0012) lay(child, at, depth + 1, [...zoom, child.name]);
        at += width;
      }
    };
    lay(root, 0, above.length - 1, state.zoom.slice(0, above.length - 1));
    box.style.height = 22 * (1 + Math.max(...bars.map((bar) => bar.depth))) + 2 + "px";
    box.replaceChildren(...bars.map((bar) => {
      const share = whole ? ((100 * bar.node.size) / whole).toFixed(1) : "0";
      const button = element("button", bar.node.name);
      button.type = "button";
      button.tabIndex = -1;
      button.style.left = 100 * bar.left + "%";
      button.style.width = `max(${100 * bar.width}%, 2px)`;
      button.style.top = 22 * bar.depth + "px";
      const strength = Math.max(40, 84 - 3 * bar.depth);
      button.style.background = bar.node.category ? `color-mix(in srgb, ${colour(bar.node.category)} ${strength}%, #fff)` : "#c6ccd4";
      button.title = `${bar.node.name}\n${bytesText(bar.node.size)} (${number(bar.node.size)} bytes), ${share} %`;
      button.dataset.bytes = String(bar.node.size);
      button.dataset.depth = String(bar.depth);
      const tell = () => { byId("flame-detail").textContent = button.title.replace("\n", ": "); };
      button.onfocus = tell;
      button.onmouseenter = tell;
      button.onclick = () => { state.zoom = bar.zoom; drawFlame(levelsAt(state.moment), whole); box.focus(); };
      return button;
    }));
    byId("flame-detail").textContent = state.zoom.length ? "In: " + state.zoom.join(" › ") : "";
  }
  byId("flame").onkeydown = (event) => {
    const bars = [...byId("flame").children], at = bars.indexOf(document.activeElement);
    const depth = at < 0 ? -1 : Number(bars[at].dataset.depth);
    const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: "down", ArrowUp: "up" };
    if (event.key === "Escape") { state.zoom = state.zoom.slice(0, -1); showAlive(); byId("flame").focus(); event.preventDefault(); return; }
    if (!(event.key in steps)) return;
    event.preventDefault();
    if (at < 0) { bars[0].focus(); return; }
    let next = null;
    if (event.key === "ArrowDown") next = bars.slice(at + 1).find((bar) => Number(bar.dataset.depth) === depth + 1);
    else if (event.key === "ArrowUp") next = bars.slice(0, at).reverse().find((bar) => Number(bar.dataset.depth) === depth - 1);
    else {
      const row = bars.filter((bar) => Number(bar.dataset.depth) === depth);
      next = row[row.indexOf(bars[at]) + steps[event.key]];
    }
    if (next) next.focus();
  };

  // ---------------------------------------------------------------- segments
  function drawSegments() {
    const box = byId("segments");
    if (!box) return;
    const space = "http://www.w3.org/2000/svg", high = data.segments.length > 120 ? 5 : 13;
    const most = Math.max(...data.segments.map((segment) => segment.bytes));
    const make = (tag, attributes, title) => {
      const made = document.createElementNS(space, tag);
      for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
      if (title) { const text = document.createElementNS(space, "title"); text.textContent = title; made.append(text); }
      return made;
    };
    const wide = 1000, width = (bytes) => (wide * bytes) / most;
    box.setAttribute("viewBox", `0 0 ${wide} ${data.segments.length * (high + 2) + 4}`);
    box.setAttribute("preserveAspectRatio", "none");
    box.style.height = data.segments.length * (high + 2) + 4 + "px";
    data.segments.forEach((segment, place) => {
      const y = 2 + place * (high + 2);
      const label = `${bytesText(segment.bytes)} at 0x${segment.address}, stream ${segment.stream ?? "unknown"}`;
      box.append(make("rect", { x: 0, y, width: Math.max(width(segment.bytes), 1), height: high, fill: "#8a8f9844", stroke: "#8a8f98", "stroke-width": 0.5, "vector-effect": "non-scaling-stroke" }, `segment of ${label}: free`));
      for (const [offset, bytes, category] of segment.blocks) {
        box.append(make("rect", { x: width(offset), y, width: Math.max(width(bytes), 0.6), height: high, fill: colour(text(category)) }, `${text(category)}, ${bytesText(bytes)} in a segment of ${label}`));
      }
    });
  }

  // ---------------------------------------------------------------- moves
  function choose(moment) {
    state.moment = Math.min(Math.max(moment, 0), data.moments.length - 1);
    const event = data.datasets.curve[data.moments[state.moment]].e;
    try { history.replaceState(null, "", state.moment === data.peak ? "#" : "#event=" + event); } catch { /* a viewer without history */ }
    byId("moment").value = String(state.moment);
    moveCursor();
    showAlive();
  }
  function pressed() {
    document.querySelectorAll(".axis").forEach((button) => button.setAttribute("aria-pressed", String(button.dataset.axis === state.axis)));
  }
  document.querySelectorAll(".axis").forEach((button) => {
    button.hidden = data.timeUnit === "event";
    button.onclick = () => { state.axis = button.dataset.axis; pressed(); drawCharts(); };
  });
  byId("moment").max = String(data.moments.length - 1);
  byId("moment").oninput = (event) => choose(Number(event.target.value));
  byId("to-peak").onclick = () => choose(data.peak);
  byId("alive-by").onchange = (event) => { state.by = event.target.value; showAlive(); };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawCharts);
  const asked = /^#event=(\d+)$/.exec(location.hash);
  const away = (moment) => Math.abs(data.datasets.curve[data.moments[moment]].e - Number(asked[1]));
  pressed();
  drawSegments();
  choose(asked ? data.moments.map((_, moment) => moment).reduce((best, moment) => (away(moment) < away(best) ? moment : best), 0) : data.peak);
  drawCharts();
})();
