"use strict";
(() => {
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const made = [];
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const faded = (name) => color(name) + "40";
  const text = (value) => value == null ? "–" : value.toLocaleString("en", {maximumFractionDigits: value < 10 ? 2 : 0});
  const utc = (seconds) => uPlot.tzDate(new Date(seconds * 1000), "Etc/UTC");
  const paper = matchMedia("print");
  const DAY = 86400;
  const steps = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9].flatMap((zeros) => [1, 2, 5].map((first) => first * 10 ** zeros)); // of whole things
  const paperWidth = 690; // of A4 with the margins of browsers

  // Incidents are marked over the whole height, so that a short one is seen too.
  const marks = (chart) => ({hooks: {draw: [(u) => {
    u.ctx.save();
    u.ctx.fillStyle = faded("--c2");
    for (const [from, to] of chart.marks || []) {
      const left = u.valToPos(from, "x", true), right = u.valToPos(to, "x", true);
      u.ctx.fillRect(left, u.bbox.top, Math.max(2 * devicePixelRatio, right - left), u.bbox.height);
    }
    u.ctx.restore();
  }]}});

  const axis = (more) => ({stroke: color("--soft"), grid: {stroke: color("--line"), width: 0.5},
    ticks: {stroke: color("--line"), width: 0.5}, ...more});

  const draw = (box, chart) => {
    const alone = chart.x.length < 2;
    const series = [{value: (u, v) => v == null ? "–" : utc(v).toLocaleString("en-GB", {dateStyle: "medium", timeStyle: "short"})}];
    for (const line of chart.series) {
      series.push({label: line.label, stroke: color(line.color), width: 2, dash: line.dash,
        paths: chart.stepped ? uPlot.paths.stepped({align: 1}) : undefined, points: {show: alone || chart.x.length < 40, size: 5}, value: (u, v) => text(v)});
    }
    const bands = (chart.bands || []).map(([upper, lower, name]) => ({series: [upper, lower], fill: faded(name)}));
    const options = {width: paper.matches ? paperWidth : box.clientWidth - 12, height: 240, tzDate: utc, series, bands, plugins: [marks(chart)],
      cursor: {drag: {x: true, y: false}, sync: {key: "time"}}, scales: {x: {time: true}, y: {range: (u, low, high) =>
        [Math.min(0, low || 0), (high || 1) * 1.05]}},
      axes: [axis({values: (u, all) => all.map((v) => utc(v).toLocaleString("en-GB",
        v % 86400 === 0 ? {day: "numeric", month: "short"} : {hour: "2-digit", minute: "2-digit"})),
        space: box.clientWidth < 500 ? 55 : 90, size: 34}), axis({size: 64, incrs: steps, values: (u, all) => all.map((v) => text(v))})]};
    if (alone) options.scales.x.range = () => [chart.x[0] - 1800, chart.x[0] + 1800];
    made.push(new uPlot(options, [chart.x, ...chart.series.map((line) => line.y)], box));
  };

  // One day of every plot that knows hours; plots by day stay as they are.
  const days = document.createElement("select");
  const isHourly = (x) => x.length > 1 && x[1] - x[0] < DAY;
  const zoom = () => {
    const from = +days.value;
    for (const plot of made) {
      const x = plot.data[0];
      if (isHourly(x)) plot.setScale("x", from ? {min: from, max: from + DAY} : {min: x[0], max: x[x.length - 1]});
    }
  };
  const offerDays = () => {
    const times = Object.values(charts).map((chart) => chart.x).filter(isHourly).flat();
    const known = [...new Set(times.map((at) => at - at % DAY))].sort((a, b) => a - b);
    if (known.length < 2) return;
    days.add(new Option("entire period", ""));
    for (const day of known) days.add(new Option(utc(day).toLocaleDateString("en-GB", {dateStyle: "full"}), day));
    days.addEventListener("change", zoom);
    const label = document.createElement("label");
    label.append("Plots by hour show ", days);
    document.querySelector("nav").append(label);
  };

  const redraw = () => {
    while (made.length) made.pop().destroy();
    for (const box of document.querySelectorAll(".chart")) draw(box, charts[box.dataset.chart]);
    if (days.value) zoom();
  };
  offerDays();
  redraw();
  paper.addEventListener("change", redraw); // other colours, another width
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  let width = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; redraw(); } });

  for (const head of document.querySelectorAll("table.data th")) {
    const button = document.createElement("button");
    button.textContent = head.textContent;
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const body = head.closest("table").tBodies[0], at = head.cellIndex;
      const rising = head.getAttribute("aria-sort") !== "ascending";
      const value = (row) => { const cell = row.cells[at]; return cell.dataset.v !== undefined ? +cell.dataset.v : cell.textContent; };
      const rows = [...body.rows].sort((a, b) => { const x = value(a), y = value(b); return (x > y) - (x < y); });
      if (!rising) rows.reverse();
      for (const other of head.parentNode.cells) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", rising ? "ascending" : "descending");
      body.append(...rows);
    });
  }
})();
