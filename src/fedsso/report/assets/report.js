"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const AXES = { round: "Rounds", megabytes: "Megabytes", seconds: "Seconds" };
  const AXIS_TITLES = { round: "communication round", megabytes: "megabytes sent, both ways", seconds: "seconds" };
  const CONFIG = {
    responsive: true,
    displaylogo: false,
    showSendToCloud: false, // nothing leaves the page
    plotlyServerURL: "",
    modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"],
  };
  const MANY = 20; // curves from which on lines are thin and bands left out
  const PAPER = 640; // width of a page's chart on paper, in pixels
  const state = {
    metric: data.first || (data.metrics.length ? data.metrics[0].key : ""),
    axis: "round",
    logX: false,
    logY: false,
    judged: data.judged,
    shown: new Set(data.curves.map((_, i) => i).filter((i) => data.curves[i].shown)),
  };
  const drawings = []; // {node, draw, done}

  // ---- the numbers ----

  const memory = new Map();
  function remember(key, make) {
    if (!memory.has(key)) memory.set(key, make());
    return memory.get(key);
  }

  function series(place) {
    return remember(place, () => {
      const bytes = Uint8Array.from(atob(data.arrays[place]), (c) => c.charCodeAt(0));
      return new Float32Array(bytes.buffer);
    });
  }

  // The evaluated points of one run; after divergence the values stand for nothing.
  function points(trace, metric, axis) {
    const found = { round: [], x: [], y: [] };
    if (!(metric in trace.columns) || !(axis in trace.columns)) return found;
    const [round, x, y] = ["round", axis, metric].map((name) => series(trace.columns[name]));
    for (let i = 0; i < round.length; i++) {
      if (!Number.isFinite(y[i]) || (trace.diverged !== null && round[i] >= trace.diverged)) continue;
      found.round.push(round[i]);
      found.x.push(x[i]);
      found.y.push(y[i]);
    }
    return found;
  }

  // Whether a logarithmic axis has anything to show.
  function positive(metric) {
    return data.curves.some((curve) => curve.traces.some((trace) => points(trace, metric, "round").y.some((v) => v > 0)));
  }

  // Mean and range over the seeds that stayed finite, and the others one by one.
  function summary(index, metric, axis) {
    return remember(`${index} ${metric} ${axis}`, () => {
      const rows = new Map();
      const lost = [];
      for (const trace of data.curves[index].traces) {
        const own = points(trace, metric, axis);
        if (trace.diverged !== null) {
          lost.push(own);
          continue;
        }
        own.round.forEach((round, i) => {
          const row = rows.get(round) || { n: 0, x: 0, y: 0, low: Infinity, high: -Infinity };
          row.n += 1;
          row.x += own.x[i];
          row.y += own.y[i];
          row.low = Math.min(row.low, own.y[i]);
          row.high = Math.max(row.high, own.y[i]);
          rows.set(round, row);
        });
      }
      const sorted = [...rows.keys()].sort((a, b) => a - b).map((round) => rows.get(round));
      return {
        x: sorted.map((row) => row.x / row.n),
        y: sorted.map((row) => row.y / row.n),
        low: sorted.map((row) => row.low),
        high: sorted.map((row) => row.high),
        lost: lost.filter((own) => own.x.length),
      };
    });
  }

  // ---- looks ----

  function theme() {
    const css = getComputedStyle(document.documentElement);
    const names = ["ink", "soft", "line", "card", "tint"];
    return Object.fromEntries(names.map((name) => [name, css.getPropertyValue(`--${name}`).trim()]));
  }

  const channels = (color) => [1, 3, 5].map((i) => parseInt(color.slice(i, i + 2), 16));
  const hex = (parts) => "#" + parts.map((p) => Math.round(p).toString(16).padStart(2, "0")).join("");
  const mix = (color, other, share) => {
    const [from, to] = [channels(color), channels(other)];
    return hex(from.map((value, i) => value + share * (to[i] - value)));
  };
  function luminance(color) {
    const linear = channels(color).map((v) => (v / 255 <= 0.04 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
  }
  function contrast(one, other) {
    const [dark, light] = [luminance(one), luminance(other)].sort((a, b) => a - b);
    return (light + 0.05) / (dark + 0.05);
  }

  // On a dark page a dark colour is mixed with white until it can be seen.
  function visible(color) {
    const { card } = theme();
    if (luminance(card) > 0.5) return color;
    let share = 0;
    while (contrast(mix(color, "#ffffff", share), card) < 4 && share < 1) share += 0.05;
    return mix(color, "#ffffff", share);
  }
  const faint = (color, share) => `rgba(${channels(color).join(",")},${share})`;

  function axisLook(t, more) {
    const plain = { gridcolor: t.line, linecolor: t.line, zeroline: false, automargin: true };
    const { title, ...rest } = more;
    return { ...plain, title: { text: title || "", font: { size: 13, color: t.soft }, standoff: 8 }, ...rest };
  }

  function layout(t, x, y, more) {
    return {
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: "system-ui, Segoe UI, Roboto, sans-serif", size: 12, color: t.ink },
      margin: { l: 44, r: 14, t: 26, b: 40 },
      hoverlabel: { bgcolor: t.card, bordercolor: t.line, font: { color: t.ink }, namelength: 40 },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: t.soft, activecolor: t.ink },
      showlegend: false,
      xaxis: axisLook(t, x),
      yaxis: axisLook(t, y),
      ...("print" in document.documentElement.dataset ? { width: more.paper } : {}),
      ...more.layout,
    };
  }

  // Full numbers at 1, 2 and 5, or at powers of ten where the range is wide.
  function logTicks(low, high) {
    const [first, last] = [Math.floor(low), Math.ceil(high)];
    const step = Math.max(1, Math.ceil((high - low) / 7));
    const found = [];
    for (let power = first; power <= last; power++) {
      if (high - low > 2.2) found.push(...((power - first) % step ? [] : [10 ** power]));
      else if (high - low > 0.5) found.push(...[1, 2, 5].map((digit) => digit * 10 ** power));
      else if (high - low > 0.1) for (let digit = 1; digit < 10; digit += 0.5) found.push(digit * 10 ** power);
    }
    if (high - low <= 0.1) {
      const [from, to] = [10 ** low, 10 ** high];
      const decimals = Math.max(0, Math.ceil(-Math.log10((to - from) / 4)));
      for (let i = 0; i <= 4; i++) found.push(Number((from + (i * (to - from)) / 4).toFixed(decimals)));
    }
    const powers = "⁰¹²³⁴⁵⁶⁷⁸⁹";
    const raised = (k) => (k < 0 ? "⁻" : "") + [...String(Math.abs(k))].map((d) => powers[d]).join("");
    const text = (v) => {
      const power = Math.floor(Math.log10(v) + 1e-9);
      const front = Number((v / 10 ** power).toPrecision(3));
      const figures = high - low > 0.1 ? 3 : 6;
      return Math.abs(power) > 3 ? `${front === 1 ? "" : `${front}·`}10${raised(power)}` : String(Number(v.toPrecision(figures)));
    };
    return { tickmode: "array", tickvals: found, ticktext: found.map(text) };
  }

  // Draw, with ticks on logarithmic axes that follow the range, also when it is zoomed.
  function paint(node, traces, made, config) {
    Plotly.react(node, traces, made, config);
    const changes = {};
    for (const name of ["xaxis", "yaxis"]) {
      const axis = node._fullLayout[name];
      if (axis.type !== "log") continue;
      const { tickvals, ...rest } = logTicks(Math.min(...axis.range), Math.max(...axis.range));
      if (tickvals.join() === (axis.tickvals || []).join()) continue;
      Object.entries({ tickvals, ...rest }).forEach(([key, value]) => { changes[`${name}.${key}`] = value; });
    }
    if (Object.keys(changes).length) Plotly.relayout(node, changes);
    if (!node.dataset.watched) {
      node.dataset.watched = "yes";
      node.on("plotly_relayout", (event) => {
        if (Object.keys(event).some((key) => key.includes("range"))) paint(node, node.data, node.layout, config);
      });
    }
  }

  // ---- curves ----

  function lines(index, metric, axis, logY, crowd) {
    const curve = data.curves[index];
    const found = summary(index, metric, axis);
    const color = visible(curve.color);
    const dash = curve.dash.length ? curve.dash.map((d) => `${d}px`).join(",") : "solid";
    const base = { type: "scatter", mode: "lines", name: curve.label, meta: index, legendgroup: "calm", hoverinfo: "skip" };
    const made = [];
    const positive = (y) => (logY ? y.map((v) => (v > 0 ? v : null)) : y);
    if (curve.traces.length > 1 && !crowd && found.x.length > 1) {
      const keep = found.low.map((v, i) => i).filter((i) => !logY || found.low[i] > 0);
      const back = keep.slice().reverse();
      made.push({
        ...base,
        x: [...keep.map((i) => found.x[i]), ...back.map((i) => found.x[i])],
        y: [...keep.map((i) => found.high[i]), ...back.map((i) => found.low[i])],
        fill: "toself",
        fillcolor: faint(color, 0.18),
        line: { width: 0 },
      });
    }
    if (found.x.length) {
      made.push({
        ...base,
        x: found.x,
        y: positive(found.y),
        mode: found.x.length <= 25 ? "lines+markers" : "lines",
        line: { color, dash, width: crowd ? 1.1 : 2.2 },
        marker: { color, size: 5 },
        hoverinfo: undefined,
        hovertemplate: `%{y:.4~g}<extra>${plain(curve.label)}</extra>`,
      });
    }
    for (const own of found.lost) {
      const end = own.x.length - 1;
      const y = positive(own.y);
      made.push({ ...base, legendgroup: "lost", x: own.x, y, line: { color, dash, width: 1.3 } });
      made.push({
        ...base,
        legendgroup: "cross",
        x: [own.x[end]],
        y: [y[end]],
        mode: "markers",
        marker: { color, size: 11, symbol: "x", line: { color: theme().card, width: 1.5 } },
        cliponaxis: false,
        hoverinfo: undefined,
        hovertemplate: `%{y:.4~g}, then diverged<extra>${plain(curve.label)}</extra>`,
      });
    }
    return made;
  }

  // Plotly reads a few tags and %{...} in its texts; here they are plain.
  const plain = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;").replace(/%\{/g, "%\u200b{");

  // The range of a loss is cut where only runs that diverge would be seen.
  function lossRange(traces, logY) {
    const usable = (group) => traces.filter((t) => t.legendgroup === group).flatMap((t) => t.y).filter((v) => v !== null);
    const [calm, lost] = [usable("calm"), usable("lost")];
    if (!calm.length || !lost.length) return undefined;
    const every = [...calm, ...lost];
    const least = (values) => values.reduce((a, b) => Math.min(a, b));
    const most = (values) => values.reduce((a, b) => Math.max(a, b));
    const [low, high] = [least(every), Math.min(most(every), most(calm) + 9 * Math.abs(most(calm)))];
    return logY ? [Math.log10(low) - 0.05, Math.log10(high) + 0.05] : [low - 0.03 * (high - low), high];
  }

  // The targets whose names do not overlap: the goal, then the others, the highest first.
  function apart(targets, traces) {
    const values = traces.flatMap((one) => one.y).filter((v) => v !== null);
    const span = values.reduce((a, b) => Math.max(a, b), -Infinity) - values.reduce((a, b) => Math.min(a, b), Infinity);
    const found = targets.filter((y) => y === data.goal);
    [...targets].reverse().forEach((y) => {
      if (found.every((other) => Math.abs(other - y) > 0.04 * span)) found.push(y);
    });
    return found;
  }

  function drawChart(node) {
    const t = theme();
    const { metric, axis, logX, logY } = state;
    const shown = [...state.shown].sort((a, b) => a - b);
    const crowd = shown.length > MANY;
    const traces = shown.flatMap((i) => lines(i, metric, axis, logY, crowd));
    const name = (data.metrics.find((one) => one.key === metric) || {}).name || "";
    const isLoss = metric.endsWith("loss");
    const targets = metric === "test_accuracy" ? data.targets : [];
    const more = {
      paper: PAPER,
      layout: {
        hovermode: shown.length <= 8 ? "x unified" : "closest",
        shapes: targets.map((y) => ({
          type: "line", xref: "paper", x0: 0, x1: 1, y0: y, y1: y, layer: "above", // below, a grid line hides it
          line: { color: t.soft, width: 1, dash: "dot" },
        })),
        annotations: apart(targets, traces).map((y) => ({
          xref: "paper", x: 1, xanchor: "left", y: logY ? Math.log10(y) : y, yanchor: "middle", showarrow: false,
          text: String(y), font: { size: 11, color: t.soft },
        })),
        margin: { l: 44, r: targets.length ? 36 : 14, t: 30, b: 40 },
      },
    };
    const at = { round: "round %{x}", megabytes: "%{x:.4~g} MB", seconds: "%{x:.4~g} s" };
    const x = { title: AXIS_TITLES[axis], type: logX ? "log" : "linear", unifiedhovertitle: { text: at[axis] } };
    const y = { title: plain(name.toLowerCase()), type: logY ? "log" : "linear" };
    const range = isLoss ? lossRange(traces, logY) : undefined;
    paint(node, traces, layout(t, x, range ? { ...y, range } : y, more), CONFIG);
    const said = shown.map((i) => data.curves[i].label).slice(0, 8).join(", ");
    node.setAttribute("aria-label", `${name} against ${AXES[axis].toLowerCase()}: ${said || "no curve"}`);
  }

  function drawDiagnostic(node, one) {
    const shown = [...state.shown].sort((a, b) => a - b);
    const traces = shown.flatMap((i) => lines(i, one.key, "round", false, shown.length > MANY));
    const log = ["radius", "grad_norm", "gamma", "alpha"].includes(one.key);
    const x = { title: "round", nticks: 6 };
    const y = { type: log ? "log" : "linear", nticks: 6 };
    const more = { paper: PAPER / 2 - 12, layout: { margin: { l: 44, r: 10, t: 8, b: 34 }, hovermode: "closest" } };
    paint(node, traces, layout(theme(), x, y, more), { ...CONFIG, displayModeBar: false });
  }

  // ---- maps ----

  const SCALE = ["#fde725", "#7ad151", "#22a884", "#2a788e", "#414487", "#440154"]; // viridis, the best first

  function scaleColor(share) {
    const place = Math.min(Math.max(share, 0), 1) * (SCALE.length - 1);
    const i = Math.min(Math.floor(place), SCALE.length - 2);
    return mix(SCALE[i], SCALE[i + 1], place - i);
  }

  function judge(index) {
    const curve = data.curves[index];
    return state.judged === "final" ? curve.final : curve.rounds[Number(state.judged)];
  }

  // 0 for the best cell of all maps, 1 for the worst; rounds by their logarithms.
  function badness() {
    const cells = data.maps.flatMap((map) => map.cells.flat()).filter((i) => i !== null);
    const values = cells.map(judge).filter((v) => v !== null);
    const final = state.judged === "final";
    const scaled = (v) => (!final ? Math.log(Math.max(v, 0.5)) : data.final.endsWith("loss") ? v : -v);
    const [low, high] = [Math.min(...values.map(scaled)), Math.max(...values.map(scaled))];
    return (v) => (high > low ? (scaled(v) - low) / (high - low) : 0);
  }

  function drawMap(node, map) {
    const t = theme();
    const share = badness();
    const final = state.judged === "final";
    const paper = PAPER / 2 - 12;
    const wide = (("print" in document.documentElement.dataset ? paper : node.clientWidth) - 60) / map.columns.length;
    const figures = wide < 30 ? 2 : 3; // three overlap on a phone
    const write = (v) => {
      if (!final) return String(Math.round(v * 10) / 10);
      return (data.final.endsWith("loss") ? String(Number(v.toPrecision(figures))) : v.toFixed(figures)).replace(/^0/, "");
    };
    const z = [];
    const text = { x: [], y: [], text: [], color: [], hover: [], custom: [] };
    map.cells.forEach((row, r) => {
      z.push(row.map((i, c) => {
        if (i === null) return null;
        const value = judge(i);
        const curve = data.curves[i];
        const shown = value === null ? "–" : write(value);
        text.x.push(c);
        text.y.push(r);
        text.text.push(curve.lost ? `${value === null ? "" : shown}×` : shown);
        text.color.push(value === null ? t.soft : contrast(scaleColor(share(value)), "#ffffff") > 4 ? "#ffffff" : "#111111");
        text.hover.push(`${plain(curve.label)}<br>${value === null ? "not reached" : shown}${curve.lost ? `<br>${curve.lost} of ${curve.traces.length} diverged` : ""}`);
        text.custom.push(i);
        return value === null ? null : share(value);
      }));
    });
    const traces = [
      {
        type: "heatmap", z, zmin: 0, zmax: 1, xgap: 2, ygap: 2, showscale: false, hoverinfo: "skip",
        colorscale: SCALE.map((color, i) => [i / (SCALE.length - 1), color]),
      },
      {
        type: "scatter", mode: "markers+text", x: text.x, y: text.y, text: text.text, customdata: text.custom,
        textfont: { size: map.columns.length > 8 ? 10 : 12, color: text.color },
        marker: { size: 26, color: "rgba(0,0,0,0)" }, hovertext: text.hover, hoverinfo: "text",
      },
    ];
    // Below narrow columns only every second or third value is written: turned, they would be cut off.
    const short = (label) => (label.length > 16 ? `${label.slice(0, 15)}…` : label);
    const step = Math.ceil((7 * Math.max(...map.columns.map((label) => short(label).length)) + 2) / wide);
    const ticks = (labels, every) => {
      const places = labels.map((_, i) => i).filter((i) => i % every === 0);
      const texts = places.map((i) => plain(short(labels[i])));
      return { tickvals: places, ticktext: texts, ticklabeloverflow: "allow", ticks: "", showgrid: false, fixedrange: true };
    };
    const x = { title: plain(map.across), ...ticks(map.columns, step), range: [-0.5, map.columns.length - 0.5] };
    const y = { title: plain(map.down), ...ticks(map.rows, 1), range: [map.rows.length - 0.5, -0.5] };
    const more = { paper, layout: { margin: { l: 44, r: 8, t: 6, b: 36 }, hovermode: "closest" } };
    paint(node, traces, layout(t, x, y, more), { ...CONFIG, displayModeBar: false });
    if (!node.dataset.ready) {
      node.dataset.ready = "yes";
      node.on("plotly_click", (event) => reveal(event.points[0].customdata));
    }
  }

  function drawHolding(node, one) {
    const t = theme();
    const flat = series(one.counts);
    const many = one.labels.length;
    const z = one.clients.map((_, i) => Array.from(flat.subarray(i * many, (i + 1) * many), (v) => v || null));
    const dark = luminance(t.card) < 0.5;
    const trace = {
      type: "heatmap", z, xgap: many > 40 ? 0 : 1.5, ygap: one.clients.length > 60 ? 0 : 1.5,
      colorscale: dark ? [[0, "#1d3a4c"], [1, "#8ed3ff"]] : [[0, "#d9ebf6"], [1, "#00466e"]],
      colorbar: { thickness: 10, outlinewidth: 0, title: { text: "rows", side: "right" }, nticks: 5 },
      customdata: one.clients.map((name) => one.labels.map((label) => [plain(name), plain(label)])),
      hovertemplate: "client %{customdata[0]}, label %{customdata[1]}: %{z:,} rows<extra></extra>",
    };
    const few = one.clients.length <= 30;
    const names = one.clients.map((name) => plain(name.length > 12 ? `${name.slice(0, 11)}…` : name));
    const ticks = few ? { tickvals: names.map((_, i) => i), ticktext: names } : { showticklabels: false };
    const short = one.labels.map((label) => plain(label.length > 14 ? `${label.slice(0, 13)}…` : label));
    const named = many <= 20 ? { tickvals: short.map((_, i) => i), ticktext: short } : {};
    const x = { title: "label", showgrid: false, ...named, fixedrange: true };
    const y = { title: "client", showgrid: false, autorange: "reversed", fixedrange: true, ...ticks };
    const more = { paper: PAPER, layout: { margin: { l: 44, r: 8, t: 6, b: 36 } } };
    Plotly.react(node, [trace], layout(t, x, y, more), { ...CONFIG, displayModeBar: false });
  }

  // ---- the page ----

  function element(tag, properties, ...children) {
    const node = Object.assign(document.createElement(tag), properties);
    node.append(...children);
    return node;
  }

  function swatch(curve) {
    const name = "http://www.w3.org/2000/svg";
    const svg = document.createElementNS(name, "svg");
    const line = document.createElementNS(name, "line");
    const set = (node, values) => Object.entries(values).forEach(([key, value]) => node.setAttribute(key, value));
    set(svg, { class: "swatch", width: 26, height: 10, "aria-hidden": "true" });
    set(line, { x1: 1, y1: 5, x2: 25, y2: 5, "stroke-width": 3, "stroke-dasharray": curve.dash.join(" "), "data-color": curve.color });
    svg.append(line);
    return svg;
  }

  function recolor() {
    for (const line of document.querySelectorAll("[data-color]")) line.setAttribute("stroke", visible(line.dataset.color));
  }

  // A drawing waits until it is nearly in sight.
  const watcher = new IntersectionObserver(
    (seen) => {
      const near = seen.filter((one) => one.isIntersecting).map((one) => drawings.find((d) => d.node === one.target));
      near.filter((d) => !d.done).forEach(render); // drawn again without a change, Plotly forgets its ranges
    },
    { rootMargin: "300px" },
  );
  function render(drawing) {
    if (drawing.node.offsetParent === null) return; // put away
    drawing.done = true;
    drawing.draw(drawing.node);
  }
  // A diagnostic that none of the curves on show has is put away.
  function fit() {
    const section = document.getElementById("diagnostics");
    const has = (key) => [...state.shown].some((i) => data.curves[i].traces.some((trace) => key in trace.columns));
    section.querySelectorAll(".panel").forEach((panel, i) => { panel.hidden = !has(data.diagnostics[i].key); });
    section.hidden = !section.querySelector(".panel:not([hidden])");
  }
  function redraw() {
    fit();
    recolor();
    drawings.filter((drawing) => drawing.done).forEach(render);
  }
  function plan(node, draw) {
    node.setAttribute("role", "img");
    drawings.push({ node, draw, done: false });
    watcher.observe(node);
  }

  function option(kind, name, label, checked, change) {
    const input = element("input", { type: kind, name, checked, onchange: () => change(input.checked) });
    return element("label", { className: "option" }, input, element("span", { textContent: label }));
  }
  function choice(id, name, label, checked, change) {
    document.getElementById(id).append(option("radio", name, label, checked, change));
  }

  function controls() {
    const logY = option("checkbox", "logy", "vertical", false, (on) => { state.logY = on; redraw(); });
    const setMetric = (key) => {
      state.metric = key;
      state.logY = key.endsWith("loss") && positive(key);
      logY.querySelector("input").checked = state.logY;
    };
    data.metrics.forEach((one) =>
      choice("metric", "metric", one.name, one.key === state.metric, () => { setMetric(one.key); redraw(); }));
    data.axes.forEach((key) =>
      choice("axis", "axis", AXES[key], key === state.axis, () => { state.axis = key; redraw(); }));
    const logX = option("checkbox", "logx", "horizontal", false, (on) => { state.logX = on; redraw(); });
    document.getElementById("scale").append(logY, logX);
    setMetric(state.metric);
  }

  const chips = new Map();
  function toggle(index) {
    show(state.shown.has(index) ? [...state.shown].filter((i) => i !== index) : [...state.shown, index]);
  }
  // From a map: the chip may be folded away.
  function reveal(index) {
    const folded = chips.get(index).closest("details");
    if (folded) folded.open = true;
    toggle(index);
  }
  function show(indices) {
    state.shown = new Set(indices);
    chips.forEach((chip, i) => chip.setAttribute("aria-pressed", String(state.shown.has(i))));
    redraw();
  }
  function chip(index) {
    const curve = data.curves[index];
    const node = element("button", { type: "button", className: "chip", onclick: () => toggle(index) }, swatch(curve), curve.label);
    node.setAttribute("aria-pressed", String(curve.shown));
    chips.set(index, node);
    return node;
  }

  function legend() {
    const place = document.getElementById("legend");
    const every = data.curves.map((_, i) => i);
    const first = every.filter((i) => data.curves[i].shown);
    place.append(...first.map(chip));
    const button = (text, indices) => element("button", { type: "button", className: "small", textContent: text, onclick: () => show(indices) });
    if (every.length > 1) place.append(button("All", every), button("None", []));
    if (first.length < every.length) place.append(button("The best", first));
    for (const name of new Set(data.curves.map((curve) => curve.algorithm))) {
      const others = every.filter((i) => data.curves[i].algorithm === name && !data.curves[i].shown);
      if (!others.length) continue;
      const summary = element("summary", { textContent: `${others.length} more of ${name}` });
      place.append(element("details", {}, summary, element("div", {}, ...others.map(chip))));
    }
    const several = data.curves.some((curve) => curve.traces.length > 1);
    const lost = data.curves.some((curve) => curve.lost);
    const said = [several ? "Line: mean over the seeds; band: their range." : "", lost ? "A cross: the run diverged there." : ""];
    if (data.targets.length) said.push("Dotted: the accuracies of the table.");
    document.getElementById("marks").textContent = said.filter(Boolean).join(" ");
  }

  function panel(place, title, about, draw, height) {
    const chart = element("div", { className: "chart" });
    if (height) chart.style.height = height;
    const texts = [element("h3", { textContent: title })];
    if (about) texts.push(element("p", { textContent: about }));
    chart.setAttribute("aria-label", title);
    place.append(element("div", { className: "panel" }, ...texts, chart));
    plan(chart, draw);
  }

  function sections() {
    const section = (id, used) => {
      const node = document.getElementById(id);
      node.hidden = !used;
      return node;
    };
    if (section("curves", data.metrics.length)) {
      controls();
      legend();
      plan(document.getElementById("chart"), drawChart);
    }
    const maps = section("maps", data.maps.length).querySelector(".panels");
    if (data.maps.length) {
      const change = (value) => () => { state.judged = value; redraw(); };
      data.targets.forEach((target, i) =>
        choice("judged", "judged", `rounds to ${target}`, String(i) === state.judged, change(String(i))));
      choice("judged", "judged", data.final, state.judged === "final", change("final"));
      data.maps.forEach((map) => panel(maps, map.title, "", (node) => drawMap(node, map), `${5 + 1.9 * map.rows.length}rem`));
    }
    const seen = section("diagnostics", data.diagnostics.length).querySelector(".panels");
    data.diagnostics.forEach((one) => panel(seen, one.name, one.about, (node) => drawDiagnostic(node, one)));
    const holdings = section("holdings", data.holdings.length);
    data.holdings.forEach((one) =>
      panel(holdings, one.title, one.note, (node) => drawHolding(node, one), `${Math.min(34, 7 + 1.1 * one.clients.length)}rem`));
  }

  function sorting() {
    for (const header of document.querySelectorAll("thead th")) {
      header.querySelector("button").addEventListener("click", () => {
        const table = header.closest("table");
        const before = header.getAttribute("aria-sort");
        const first = header.dataset.first;
        const other = first === "ascending" ? "descending" : "ascending";
        const order = before === first ? other : first;
        table.querySelectorAll("th[aria-sort]").forEach((th) => th.setAttribute("aria-sort", "none"));
        header.setAttribute("aria-sort", order);
        sort(table.tBodies[0], header.cellIndex, order === "ascending" ? 1 : -1);
      });
    }
  }

  function sort(body, column, sign) {
    const value = (row) => row.cells[column].dataset.value;
    const compare = (a, b) => {
      if (a === "" || b === "") return Number(a === "") - Number(b === ""); // what was not reached stays last
      const numbers = [Number(a), Number(b)];
      const difference = numbers.some(Number.isNaN) ? a.localeCompare(b, "en", { numeric: true }) : numbers[0] - numbers[1];
      return sign * difference;
    };
    body.append(...[...body.rows].sort((a, b) => compare(value(a), value(b))));
  }

  // A hint stands above a table for as long as it is wider than its place.
  function sideways() {
    for (const place of document.querySelectorAll(".table")) {
      const hint = element("p", { className: "hint sideways", textContent: "The table goes on to the right: scroll it sideways →" });
      place.before(hint);
      const fits = () => { hint.hidden = place.scrollWidth <= place.clientWidth; };
      new ResizeObserver(fits).observe(place);
      fits();
    }
  }

  function printing() {
    let closed = [];
    window.addEventListener("beforeprint", () => {
      document.documentElement.dataset.print = "";
      closed = [...document.querySelectorAll("details:not([open])")];
      closed.forEach((node) => { node.open = true; });
      drawings.forEach(render);
      recolor();
    });
    window.addEventListener("afterprint", () => {
      delete document.documentElement.dataset.print;
      closed.forEach((node) => { node.open = false; });
      redraw();
    });
  }

  sections();
  sorting();
  sideways();
  printing();
  fit();
  recolor();
  const chart = drawings.find((drawing) => drawing.node.id === "chart");
  if (chart) {
    render(chart);
    performance.mark("first-chart");
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
})();
