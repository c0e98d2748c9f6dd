// The step player: it shows one frame of a view, a recorded collective or a training step. Its data is the JSON text of
// the element "player-data"; see views.py. An element with data-tip has a tooltip; see page.js.

const TRACE_FRAMES = 200; // frames of a training step; a recorded collective has one frame per round
const PRODUCT = /nvjet|gemm|cutlass|splitK|product/i; // names of kernels of cuBLASLt
const ROWS = 14; // of the table of a training step
const CATEGORIES = { // of the bars: colour, and name in the legend
  forward: ["c0", "forward"], backward: ["c3", "backward"], weights: ["c2", "gradients of the parameters"],
  optimizer: ["c4", "optimizer"], collective: ["c1", "communication"], wait: ["line", "wait"], GPU: ["c2", "GPU"],
  phase: ["host", "phase, around other bars"],
};
const CORNERS = [[1, 1], [1, 3], [3, 3], [3, 1]]; // grid places of ranks: clockwise, each beside its two neighbours
const colour = (category) => `--kind: var(--${(CATEGORIES[category] ?? CATEGORIES.GPU)[0]})`;
const colourOf = (rank) => `var(--c${rank % 4})`;

const root = document.getElementById("step-player"), totals = document.getElementById("step-totals");
const views = JSON.parse(document.getElementById("player-data").textContent);

// A value as text in the first of the units [[name, size]] that is not larger.
function quantity(value, units, digits) {
  const [unit, size] = units.find((each) => value >= each[1]) ?? units.at(-1);
  return `${Number((value / size).toPrecision(digits))} ${unit}`;
}
const amount = (bytes) => quantity(bytes, [["GB", 1e9], ["MB", 1e6], ["kB", 1e3], ["B", 1]], 4);
const duration = (time, unit) =>
  quantity(time, unit ? [[unit + (time === 1 ? "" : "s"), 1]] : [["s", 1e6], ["ms", 1e3], ["µs", 1]], 3);

// -- the controls --------------------------------------------------------------------------------------------------

const parts = ["select", ".drawing", ".controls", ".controls input", "output", ".now", ".about"];
const [choice, drawing, controls, slider, position, now, about] = parts.map((part) => root.querySelector(part));
const button = (action) => controls.querySelector(`[data-action="${action}"]`);
let view = null, last = 0, frame = 0, timer = null, draw = null, zoom = null;

function open(number) {
  play(false);
  view = views[number];
  slider.max = last = view.lanes ? TRACE_FRAMES : view.frames.length - 1;
  button("in").hidden = button("out").hidden = !view.lanes;
  about.textContent = view.text;
  now.textContent = totals.textContent = "";
  draw = view.lanes ? openTrace(view) : openSlices(view);
  show(0);
}

function show(number) {
  const before = frame;
  slider.value = root.dataset.frame = frame = Math.min(Math.max(number, 0), last);
  now.setAttribute("aria-live", timer ? "off" : "polite"); // a screen reader cannot follow a playing step
  position.textContent = draw(frame, frame === before + 1 && !matchMedia("(prefers-reduced-motion: reduce)").matches);
  slider.setAttribute("aria-valuetext", position.textContent);
  if (timer && frame === last) play(false);
}

function play(on) {
  clearInterval(timer);
  timer = on ? setInterval(moves.next, Number(root.dataset.milliseconds) || (view.lanes ? 60 : 1500)) : null;
  button("play").textContent = on ? "Pause" : "Play";
}

const moves = {
  first: () => show(0), previous: () => show(frame - 1), next: () => show(frame + 1), last: () => show(last),
  in: () => zoom(0.5), out: () => zoom(2),
};
const keys = { ArrowLeft: "previous", ArrowRight: "next", Home: "first", End: "last", " ": "play" };

function act(action) {
  const playing = timer;
  play(false);
  if (action !== "play") return moves[action]();
  if (!playing && frame === last) show(0);
  play(!playing);
}

controls.addEventListener("click", ({ target, detail }) => {
  if (!target.dataset.action) return;
  if (detail) root.focus({ preventScroll: true }); // by a pointer: the space bar must not press it again
  act(target.dataset.action);
});
slider.addEventListener("input", () => {
  play(false);
  show(Number(slider.value));
});
choice.addEventListener("change", () => {
  open(Number(choice.value));
  root.scrollIntoView({ block: "nearest" }); // the new view may be higher than the last one
});

// The keys work with the focus in the player or, while the player covers the middle of the window or is inside it, on
// no element of the page. A key that the browser itself uses on the element with the focus is not ours.
document.addEventListener("keydown", (event) => {
  const { key, target } = event, { top, bottom } = root.getBoundingClientRect(), height = innerHeight;
  const inView = (top < height / 2 && bottom > height / 2) || (top > -1 && bottom < height + 1); // in whole pixels
  const opened = target === choice && CSS.supports("selector(:open)") && choice.matches(":open");
  const native = opened || (key === " " ? target.tagName === "BUTTON" : target === slider);
  const ours = root.contains(target) ? !native : target === document.body && inView;
  const modified = event.ctrlKey || event.altKey || event.metaKey || event.shiftKey || event.isComposing;
  if (!keys[key] || modified || event.defaultPrevented || !ours) return;
  event.preventDefault();
  if (key !== " " || !event.repeat) act(keys[key]);
});

// -- a training step or a pipeline: a lane of bars for each thread, group and stream --------------------------------

function openTrace({ lanes, length, unit }) {
  const used = new Set(lanes.flatMap(({ events }) => events.map((event) => event[3])));
  const percent = (time) => `${(100 * time) / length}%`;
  let from = 0, span = length; // the part of the step that is shown
  const legend = Object.entries(CATEGORIES).filter(([category]) => used.has(category));
  drawing.innerHTML = html`
    <p class="legend">${legend.map(([category, [, name]]) =>
      html`<span><span class="key" style="${colour(category)}"></span>${name}</span>`)}</p>
    ${lanes.map(({ rank, name, events, live }) => html`<div class="lane">
      <div class="lane-title"><b>rank ${rank}${name && ", "}${name} </b><span></span></div>
      <div class="track${live ? " high" : ""}"><div>
      ${barsOf(events, unit, percent)}${live ? curveOf(live, length) : ""}<div class="later"></div>
      </div></div></div>`)}
    <div class="axis" aria-hidden="true"></div>`;
  const [texts, axis] = [drawing.querySelectorAll(".lane-title span"), drawing.querySelector(".axis")];

  function place(time) { // the shown part has this time in its middle, if it can
    from = Math.min(Math.max(0, time - span / 2), length - span);
    drawing.style.setProperty("--left", `${(-100 * from) / span}%`);
    drawing.style.setProperty("--width", `${(100 * length) / span}%`);
    axis.innerHTML = html`${[0, 1, 2, 3].map((k) => html`<span>${duration(from + (span * k) / 4, unit)}</span>`)}`;
  }
  zoom = (factor) => {
    span = Math.min(length, Math.max(length / 256, span * factor));
    place((frame / TRACE_FRAMES) * length);
  };
  place(0);
  if (!unit) totals.innerHTML = tableOf(lanes, length, used);
  return (number) => {
    const time = (number / TRACE_FRAMES) * length;
    if (time < from || time > from + span) place(time);
    drawing.style.setProperty("--now", percent(time));
    lanes.forEach(({ events, live }, k) => {
      const running = events.filter(([, start, taken]) => start <= time && time < start + taken);
      const inner = running.filter((event) => event[3] !== "phase").pop() || running.pop();
      const count = live ? `; live activations: ${live.filter(([start]) => start <= time).pop()[1]}` : "";
      texts[k].textContent = (inner ? describe(inner, unit) : "idle") + count;
    });
    return `${duration(time, unit)} of ${duration(length, unit)}`;
  };
}

const describe = ([name, , taken, , module, bytes], unit) =>
  name + (module && ` (${module})`) + (bytes ? `, ${amount(bytes)}` : "") + `, ${duration(taken, unit)}`;

// [[event, the events that contain it]] of a lane.
function nested(events) {
  let outer = [];
  return events.map((event) => {
    outer = outer.filter(([, start, taken]) => start + taken > event[1] + 0.05);
    return [event, outer, outer.push(event)];
  });
}

// The bars of a lane. A nested bar is drawn inside its outer bar.
const barsOf = (events, unit, percent) => nested(events).map(([event, , depth]) => {
  const [, start, taken, category, , , mark = ""] = event, inset = Math.min(3 * (depth - 1), 9);
  const style = `left: ${percent(start)}; width: ${percent(taken)}; --inset: ${inset}px; ${colour(category)}`;
  return html`<div class="event" style="${style}" data-tip="${describe(event, unit)}">${mark}</div>`;
});

// The table of the kernels and collectives of a step. A time is without the bars inside. On a GPU, the other events
// are the launches of its kernels. The waits are inside the collectives, so only one of the two is counted.
function tableOf(lanes, length, used) {
  const found = {}, ranks = new Set(lanes.map(({ rank }) => rank)).size;
  function rowOf([name, , , category]) {
    const op = PRODUCT.test(name) ? "matrix products" : name.split("<")[0].replaceAll("_", "_\u200b"); // may wrap
    return (found[`${category} ${op}`] ??= { op, category, calls: 0, bytes: 0, time: 0 });
  }
  for (const [event, outer] of lanes.flatMap(({ events }) => nested(events))) {
    const row = rowOf(event), time = event[2] / ranks;
    row.time += time;
    row.bytes += event[5] / ranks;
    row.calls += 1 / ranks;
    if (outer.length > 1) rowOf(outer.at(-2)).time -= time;
  }
  const kernels = used.has("GPU") ? ["GPU"] : ["forward", "backward", "optimizer"];
  const shown = [...kernels, used.has("wait") ? "wait" : "collective"];
  const rows = Object.values(found).filter(({ category }) => shown.includes(category));
  const number = (value) => (value < 100 ? value.toPrecision(3) : Math.round(value).toLocaleString("en"));
  const cells = (values, tag) => values.map((value) => html`<${tag} class="number">${value}</${tag}>`);
  return html`<div class="scroll" tabindex="0" role="region" aria-label="Time by kernel"><table>
    <caption><span>Time by kernel, wait or collective: sum over the threads, mean of the ranks.</span></caption>
    <thead><tr><th scope="col">name</th>${cells(["time (ms)", "of the step (%)", "calls", "bytes"], "th")}</tr></thead>
    <tbody>${rows.sort((a, b) => b.time - a.time).slice(0, ROWS).map(({ op, category, calls, bytes, time }) =>
      html`<tr><th scope="row"><span class="key" style="${colour(category)}"></span>${op}</th>
      ${cells([time / 1e3, (100 * time) / length].map(number), "td")}
      ${cells([calls, bytes].map((count) => (count ? count.toLocaleString("en") : "")), "td")}</tr>`
    )}</tbody></table></div>`;
}

// The curve of the live activations, [[time, count]], below the bars of a pipeline.
function curveOf(live, length) {
  const most = Math.max(...live.map(([, count]) => count));
  const path = live.map(([time, count], k) => `${k ? `H${time}V` : `M${time} `}${most - count}`).join("");
  return html`<svg viewBox="0 0 ${length} ${most}" preserveAspectRatio="none" aria-hidden="true">
    <path d="${path}"/></svg>`;
}

// -- a recorded collective: the slices of each rank, coloured by origin, and the slices that move -------------------

function openSlices({ frames }) {
  const most = Math.max(...frames.flatMap(({ ranks }) => ranks.map(held)));
  return (number, moves) => {
    const { phase, messages, ranks } = frames[number], many = messages.length > ranks.length; // between all
    const count = `${messages.length || "no"} messages`;
    drawing.innerHTML = html`<div class="ranks${many ? " many" : ""}" role="img" aria-label="${phase}: ${count}">
      ${ranks.map((state, rank) => card(state, rank, most))}${messages.map((message) => way(message, many))}</div>`;
    const list = many ? [] : messages.map((message) => html`<li>${told(message)}</li>`);
    now.innerHTML = html`<p><b>${phase}: </b>${count}</p><ul>${list}</ul>`;
    messages.forEach(({ from, slice, ranks, array }, k) => {
      const place = `[data-slice="${from} ${slice} ${ranks}"]${array ? `[data-array="${array}"]` : ""}`;
      const cells = drawing.querySelectorAll(place);
      for (const cell of cells) cell.classList.add("sent");
      if (moves && cells.length) move(drawing.querySelectorAll(".packet")[k], cells[0]);
    });
    return `frame ${number + 1} of ${frames.length}`;
  };
}

const held = ({ bytes }) => Object.values(bytes).reduce((sum, size) => sum + size, 0);
const ranksText = (ranks) => `rank${ranks.length === 1 ? "" : "s"} ${ranks.join(" + ")}`;
const told = ({ from, to, slice, ranks, bytes }) =>
  `rank ${from} to rank ${to}: slice ${slice} of ${ranksText(ranks)}, ${amount(bytes)}`;

// A background with stripes in the colours of the ranks that a slice contains. part: the rank whose part it is, of
// `count` ranks, or null for all.
function stripes(members, part = null, count = 1) {
  const [first, whole] = part === null ? [0, 100] : [(100 * part) / count, 100 / count];
  const width = whole / members.length;
  const stops = members.map((rank, k) => `${colourOf(rank)} ${first + k * width}% ${first + (k + 1) * width}%`);
  return `background-image: linear-gradient(90deg, ${["#0000 0", `#0000 ${first}%`, ...stops, "#0000 0"]})`;
}

// The card of a rank, with a cell for each slice of its arrays.
function card(state, rank, most) {
  const [row, column] = CORNERS[rank], total = held(state);
  const parts = Object.entries(state.bytes).filter(([, size]) => size).map(([name, size]) => `${name} ${amount(size)}`);
  const cell = (name, [slice, members, part = null]) => {
    const whole = members.length ? ranksText(members) : "empty or old";
    const origin = part === null ? whole : `only the part of rank ${part}`;
    return html`<div class="cell" style="${stripes(members, part, CORNERS.length)}" data-array="${name}"
      data-tip="rank ${rank}, ${name}, ${slice ?? "no slice"}: ${origin}"
      data-slice="${rank} ${slice} ${members.join()}">${slice ?? ""}</div>`;
  };
  const arrays = Object.entries(state.cells).map(([name, cells]) =>
    html`<div>${name}</div><div class="cells">${cells.map((each) => cell(name, each))}</div>`);
  return html`<div class="rank" style="grid-area: ${row} / ${column}; --own: ${colourOf(rank)}">
    <div><b>rank ${rank}</b><span class="wide">in memory: </span>${amount(total)}</div>${arrays}
    <progress value="${total}" max="${most}" aria-label="memory"
      data-tip="in memory: ${amount(total)} (${parts.join(", ")})"></progress></div>`;
}

// The arrow of a message in the gap between two cards, and its slice, which rests there.
function way(message, many) {
  const [[row, column], [toRow, toColumn]] = [CORNERS[message.from], CORNERS[message.to]];
  const angle = Math.atan2(toRow - row, toColumn - column), side = many ? 14 : 0; // beside the opposite message
  const diagonal = row !== toRow && column !== toColumn, across = diagonal ? (message.from % 2 ? 26 : -26) : 0;
  const place = `grid-area: ${(row + toRow) / 2} / ${(column + toColumn) / 2}; ` +
    `translate: ${across - side * Math.sin(angle)}px ${side * Math.cos(angle)}px`;
  return html`<div class="arrow${row === toRow ? " level" : ""}" style="${place}; rotate: ${angle}rad"></div>
    <div class="packet" style="${place}; ${stripes(message.ranks)}" data-tip="${told(message)}">
    ${many ? "" : message.slice}</div>`;
}

function move(packet, cell) {
  const [from, to] = [cell, packet].map((node) => node.getBoundingClientRect());
  const shift = `translate(${from.x - to.x}px, ${from.y - to.y}px)`;
  packet.animate([{ transform: shift }, { transform: "none" }], { duration: 700, easing: "ease-in-out" });
}

root.hidden = false;
open(0);
