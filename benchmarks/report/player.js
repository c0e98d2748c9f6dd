// The step player: it shows one frame of a view, a recorded collective or a training step. Its data is the JSON text of
// the element "player-data"; see views.py. An element with data-tip has a tooltip; see page.js.
"use strict";

(() => {
  const TRACE_FRAMES = 200; // frames of a training step; a recorded collective has one frame per round
  const MILLISECONDS = { trace: 60, slices: 1500 }; // time of a frame while playing
  const COLOURS = ["var(--c0)", "var(--c1)", "var(--c2)", "var(--c3)"]; // of ranks
  const CATEGORIES = { // of the bars: colour, and name in the legend
    forward: ["c0", "forward"], backward: ["c3", "backward"], weights: ["c2", "gradients of the parameters"],
    optimizer: ["c4", "optimizer"], collective: ["c1", "communication"], wait: ["line", "wait"], GPU: ["c2", "GPU"],
    phase: ["host", ""], // around the other bars
  };
  const colour = (category) => `--kind: var(--${(CATEGORIES[category] ?? CATEGORIES.GPU)[0]})`;
  const UNITS = [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]];
  const BUFFERS = "temporary buffers";
  const CORNERS = [[1, 1], [1, 3], [3, 3], [3, 1]]; // grid places of ranks: clockwise, each beside its two neighbours

  const root = document.getElementById("step-player");
  const views = JSON.parse(document.getElementById("player-data").textContent).map((view) =>
    ({ ...view, count: view.kind === "trace" ? TRACE_FRAMES + 1 : view.frames.length }));
  const still = matchMedia("(prefers-reduced-motion: reduce)");

  // An element with attributes and children; a child is an element or a text.
  function make(tag, attributes = {}, ...children) {
    const svg = ["svg", "path"].includes(tag);
    const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    node.append(...children);
    return node;
  }

  function amount(bytes) {
    const [unit, size] = UNITS.find((each) => bytes >= each[1]) || ["B", 1];
    return `${Number((bytes / size).toPrecision(4))} ${unit}`;
  }

  function duration(time, unit) {
    if (!time) return "0";
    if (unit) return `${Number(time.toPrecision(3))} ${unit}${time === 1 ? "" : "s"}`;
    const [value, name] = time >= 1e6 ? [time / 1e6, "s"] : time >= 1e3 ? [time / 1e3, "ms"] : [time, "µs"];
    return `${Number(value.toPrecision(3))} ${name}`;
  }

  // -- the controls --------------------------------------------------------------------------------------------------

  const parts = ["select", ".drawing", ".controls", ".controls input", "output", ".now", ".about"];
  const [choice, drawing, controls, slider, position, now, about] = parts.map((part) => root.querySelector(part));
  const button = (action) => controls.querySelector(`[data-action="${action}"]`);
  let view = null, frame = 0, timer = null, draw = null, zoom = null;

  function open(number) {
    stop();
    view = views[number];
    zoom = () => {};
    slider.max = view.count - 1;
    button("in").hidden = button("out").hidden = view.kind !== "trace";
    draw = view.kind === "trace" ? openTrace(view) : openSlices(view);
    show(0);
  }

  function show(number) {
    const before = frame;
    frame = Math.min(Math.max(number, 0), view.count - 1);
    slider.value = frame;
    now.setAttribute("aria-live", timer ? "off" : "polite"); // a screen reader cannot follow a playing step
    position.textContent = draw(frame, frame === before + 1 && !still.matches);
    slider.setAttribute("aria-valuetext", position.textContent);
    root.dataset.frame = frame;
  }

  function label(text) { // the button that plays and pauses
    button("play").textContent = text;
    button("play").setAttribute("aria-label", text.toLowerCase());
  }

  function stop() {
    clearInterval(timer);
    timer = null;
    label("Play");
  }

  function play() {
    if (frame === view.count - 1) show(0);
    label("Pause");
    timer = setInterval(() => {
      show(frame + 1);
      if (frame === view.count - 1) stop();
    }, Number(root.dataset.milliseconds) || MILLISECONDS[view.kind]);
  }

  const actions = {
    first: () => show(0), previous: () => show(frame - 1), next: () => show(frame + 1), last: () => show(view.count - 1),
    play: () => (timer ? stop() : play()), in: () => zoom(0.5), out: () => zoom(2),
  };
  const keys = { ArrowLeft: "previous", ArrowRight: "next", Home: "first", End: "last", " ": "play" };

  function act(action) {
    if (!["play", "in", "out"].includes(action)) stop();
    actions[action]();
  }

  controls.addEventListener("click", (event) => {
    const action = event.target.dataset.action;
    if (!action) return;
    if (event.detail) root.focus({ preventScroll: true }); // by a pointer: the space bar must not press it again
    act(action);
  });
  slider.addEventListener("input", () => {
    stop();
    show(Number(slider.value));
  });
  drawing.addEventListener("wheel", (event) => {
    if (!event.ctrlKey) return; // also two fingers on a touchpad
    event.preventDefault();
    zoom(event.deltaY < 0 ? 0.8 : 1.25);
  }, { passive: false });

  // -- the keys: with the focus in the player or, while the player is in view, on no element of the page -----------------

  let chosen = false; // whether a view was chosen since the list got the focus
  choice.addEventListener("focus", () => { chosen = false; });
  choice.addEventListener("change", () => {
    chosen = true;
    open(Number(choice.value));
    root.scrollIntoView({ block: "nearest" }); // the new view may be higher than the last one
  });

  // Whether the browser itself uses this key on this element of the player.
  function native(key, element) {
    if (element === choice) { // up, down, Enter and letters are never keys of the player
      return (key === " " && !chosen) || (CSS.supports("selector(:open)") && choice.matches(":open"));
    }
    return key === " " ? element.tagName === "BUTTON" : element === slider;
  }

  // Whether the player covers the middle of the window or is inside it; elsewhere the keys scroll the page.
  function inView() {
    const { top, bottom } = root.getBoundingClientRect(), height = window.innerHeight;
    return (top < height / 2 && bottom > height / 2) || (top > -1 && bottom < height + 1); // scrolling rounds to pixels
  }

  document.addEventListener("keydown", (event) => {
    const { key, target } = event, action = keys[key];
    const modified = event.ctrlKey || event.altKey || event.metaKey || event.shiftKey || event.isComposing;
    if (!action || modified || event.defaultPrevented) return;
    const ours = root.contains(target) ? !native(key, target) :
      (target === document.body || target === document.documentElement) && inView();
    if (!ours) return;
    event.preventDefault();
    if (action !== "play" || !event.repeat) act(action);
  });

  // -- a training step or a pipeline: a lane of bars for each thread, group and stream ----------------------------------

  function openTrace({ lanes, unit, text }) {
    const length = Math.max(...lanes.flatMap((lane) => lane.events.map((event) => event[1] + event[2])));
    const percent = (time) => `${(100 * time) / length}%`;
    let from = 0, span = length; // the part of the step that is shown
    about.textContent = text;
    const used = new Set(lanes.flatMap((lane) => lane.events.map((event) => event[3])));
    const legend = Object.entries(CATEGORIES).filter(([category, [, name]]) => used.has(category) && name);
    const entries = legend.map(([category, [, name]]) =>
      make("span", { class: "entry" }, make("span", { class: "key", style: colour(category) }), name));
    const axis = make("div", { class: "axis", "aria-hidden": "true" });
    const rows = lanes.map((lane) => {
      const text = make("span"), head = make("div", { class: "head" }), bars = barsOf(lane, unit, percent);
      const curve = lane.live ? [curveOf(lane.live, length)] : [];
      const name = make("b", {}, `rank ${lane.rank}${lane.name && ", "}${lane.name} `);
      const title = make("div", { class: "lane-title" }, name, text), inside = make("div", {}, ...bars, ...curve, head);
      const track = make("div", { class: `track${lane.live ? " high" : ""}` }, inside);
      return { lane, text, head, bars, node: make("div", { class: "lane" }, title, track) };
    });
    drawing.replaceChildren(make("p", { class: "legend" }, ...entries), ...rows.map((row) => row.node), axis);

    function place(time) { // the shown part has this time in its middle, if it can
      from = Math.min(Math.max(0, time - span / 2), length - span);
      drawing.style.setProperty("--left", `${(-100 * from) / span}%`);
      drawing.style.setProperty("--width", `${(100 * length) / span}%`);
      axis.replaceChildren(...[0, 1, 2, 3, 4].map((k) =>
        make("span", { style: `left: ${25 * k}%` }, duration(from + (span * k) / 4, unit))));
    }
    zoom = (factor) => {
      span = Math.min(length, Math.max(length / 256, span * factor));
      place((frame / TRACE_FRAMES) * length);
    };
    place(0);
    return (number) => {
      const time = (number / TRACE_FRAMES) * length;
      if (time < from || time > from + span) place(time);
      const complete = new Map(); // rank: bytes of the arrays of its finished collectives
      for (const { lane, text, head, bars } of rows) {
        head.style.left = percent(time);
        lane.events.forEach(([, start], k) => bars[k].classList.toggle("later", start > time));
        const running = lane.events.filter((event) => event[1] <= time && time < event[1] + event[2]);
        const inner = running.filter((event) => event[3] !== "phase").pop() || running.pop();
        const live = lane.live ? `; live activations: ${lane.live.filter(([start]) => start <= time).pop()[1]}` : "";
        text.textContent = (inner ? describe(inner, unit) : "idle") + live;
        for (const [, start, taken, category, , bytes] of lane.events) {
          if (category === "collective" && start + taken <= time) {
            complete.set(lane.rank, (complete.get(lane.rank) || 0) + bytes);
          }
        }
      }
      now.textContent = [...complete].filter(([, bytes]) => bytes).map(([rank, bytes]) =>
        `Rank ${rank} has completed collectives of ${amount(bytes)}.`).join(" ");
      return `${duration(time, unit)} of ${duration(length, unit)}`;
    };
  }

  function describe([name, , taken, , module, bytes], unit) {
    return name + (module ? ` (${module})` : "") + (bytes ? `, ${amount(bytes)}` : "") + `, ${duration(taken, unit)}`;
  }

  // The bars of a lane. A nested bar is drawn inside its outer bar.
  function barsOf({ events }, unit, percent) {
    const ends = []; // of the bars that contain the next one
    return events.map((event) => {
      const [, start, taken, category, , , mark = ""] = event;
      while (ends.at(-1) <= start + 0.05) ends.pop();
      const place = `left: ${percent(start)}; width: ${percent(taken)}; --inset: ${Math.min(3 * ends.length, 9)}px; `;
      ends.push(start + taken);
      return make("div", { class: "event", style: place + colour(category), "data-tip": describe(event, unit) }, mark);
    });
  }

  // The curve of the live activations, [[time, count]], below the bars of a pipeline.
  function curveOf(live, length) {
    const most = Math.max(...live.map(([, count]) => count));
    const path = live.map(([time, count], k) => `${k ? `H${time}V` : `M${time} `}${most - count}`).join("");
    return make("svg", { viewBox: `0 0 ${length} ${most}`, preserveAspectRatio: "none", "aria-hidden": "true" },
      make("path", { d: path }));
  }

  // -- a recorded collective: the slices of each rank, coloured by origin, and the slices that move ----------------------

  function openSlices(recording) {
    about.textContent = recording.text;
    const states = recording.frames.flatMap((each) => each.ranks), most = Math.max(...states.map(held));
    const listed = recording.frames.some(({ messages, ranks }) => messages.length && messages.length <= ranks.length);
    const names = Object.keys(states[0].cells).concat(states.some((state) => state.bytes[BUFFERS]) ? BUFFERS : []);
    return (number, moves) => {
      const { phase, messages, ranks } = recording.frames[number];
      const cards = ranks.map((state, rank) => card(recording, names, state, rank, messages, most));
      const many = messages.length > ranks.length; // an all-gather or a reduce-scatter between all ranks
      const ways = messages.map((message) => way(message, many));
      drawing.replaceChildren(make("div", { class: `ranks${many ? " many" : ""}`, role: "img",
        "aria-label": `${phase}: the arrays of ${ranks.length} ranks and ${messages.length} messages` },
        ...cards.map((each) => each.node), ...ways.flat()));
      if (moves) messages.forEach((message, k) => move(ways[k][1], cards[message.from].cells.find(isIn(message))));
      const list = many ? [] : messages.map((message) => make("li", {}, told(message)));
      const count = messages.length ? `${messages.length} messages` : "no messages";
      now.replaceChildren(make("p", {}, make("b", {}, `${phase}: `), count), ...(listed ? [make("ul", {}, ...list)] : []));
      return `frame ${number + 1} of ${recording.frames.length}`;
    };
  }

  const held = (state) => Object.values(state.bytes).reduce((sum, size) => sum + size, 0);
  const ranksText = (ranks) => (ranks.length === 1 ? `rank ${ranks[0]}` : `ranks ${ranks.join(" + ")}`);
  const told = (message) => `rank ${message.from} to rank ${message.to}: slice ${message.slice} of ` +
    `${ranksText(message.ranks)}, ${amount(message.bytes)}`;
  // A function: whether a cell of the sender has the slice of this message.
  const isIn = ({ array, slice, ranks }) => (cell) =>
    (array || cell.name) === cell.name && slice === cell.slice && `${ranks}` === `${cell.members}`;

  // A background with stripes in the colours of the ranks that a slice contains. part: the rank whose part it is, of
  // `count` ranks, or null for all.
  function stripes(members, part, count) {
    const [first, whole] = part === null ? [0, 100] : [(100 * part) / count, 100 / count];
    const width = whole / members.length;
    const stops = members.map((rank, k) => `${COLOURS[rank % 4]} ${first + k * width}% ${first + (k + 1) * width}%`);
    return `background-image: linear-gradient(90deg, ${["#0000 0", `#0000 ${first}%`, ...stops, "#0000 0"]})`;
  }

  // The card of a rank: its element, and its cells with their elements.
  function card(recording, names, state, rank, messages, most) {
    const cells = names.flatMap((name) => (state.cells[name] || buffers(recording, state, rank, messages)).map(
      ([slice, members, part = null]) => ({ name, slice, members, part })));
    for (const cell of cells) {
      const { name, slice, members, part } = cell, full = members.length === recording.ranks;
      const whole = members.length ? ranksText(members) : "empty or old";
      const origin = part === null ? whole : `only the part of rank ${part}`;
      const sent = messages.some((message) => message.from === rank && isIn(message)(cell));
      cell.node = make("div", { class: `cell${full ? " full" : ""}${sent ? " sent" : ""}`,
        style: stripes(members, part, recording.ranks),
        "data-tip": `rank ${rank}, ${name}${slice === null ? "" : `, ${slice}`}: ${origin}` }, `${slice ?? ""}`);
    }
    const rows = names.flatMap((name) => [make("div", {}, name),
      make("div", { class: "cells" }, ...cells.filter((cell) => cell.name === name).map((cell) => cell.node))]);
    const total = held(state), [row, column] = CORNERS[rank % 4], sizes = Object.entries(state.bytes);
    const parts = sizes.filter(([, size]) => size).map(([name, size]) => `${name} ${amount(size)}`);
    const node = make("div", { class: "rank", style: `grid-area: ${row} / ${column}; --own: ${COLOURS[rank % 4]}` },
      make("div", {}, make("b", {}, `rank ${rank}`), make("span", { class: "wide" }, "in memory: "), amount(total)),
      ...rows, make("div", { class: "memory", "data-tip": `in memory: ${amount(total)} (${parts.join(", ")})` },
        make("div", { class: "bytes", style: `width: ${(100 * total) / most}%` })));
    return { node, cells };
  }

  // The cells of the temporary buffers: the slices that are sent and are in no other array, then the other buffers.
  function buffers(recording, state, rank, messages) {
    const arrays = Object.entries(state.cells).flatMap(([name, cells]) =>
      cells.map(([slice, members]) => ({ name, slice, members })));
    const cells = messages.filter((message) => message.from === rank && !arrays.some(isIn(message)))
      .map((message) => [message.slice, message.ranks]);
    const count = Math.round(((state.bytes[BUFFERS] || 0) * recording.ranks) / recording.bytes); // one slice each
    while (cells.length < count) cells.push([null, []]);
    return cells;
  }

  // The arrow of a message in the gap between two cards, and its slice, which rests there.
  function way(message, many) {
    const [[row, column], [toRow, toColumn]] = [message.from, message.to].map((rank) => CORNERS[rank % 4]);
    const angle = Math.atan2(toRow - row, toColumn - column), side = many ? 14 : 0; // beside the opposite message
    const diagonal = row !== toRow && column !== toColumn, across = diagonal ? (message.from % 2 ? 26 : -26) : 0;
    const place = `grid-area: ${(row + toRow) / 2} / ${(column + toColumn) / 2}; ` +
      `translate: ${across - side * Math.sin(angle)}px ${side * Math.cos(angle)}px; `;
    return [make("div", { class: `arrow${row === toRow ? " level" : ""}`, style: `${place} rotate: ${angle}rad` }),
      make("div", { class: "packet", style: place + stripes(message.ranks, null, 1), "data-tip": told(message) },
        many ? "" : `${message.slice}`)];
  }

  function move(packet, cell) {
    if (!cell) return;
    const [from, to] = [cell.node, packet].map((node) => node.getBoundingClientRect());
    const shift = `translate(${from.x - to.x}px, ${from.y - to.y}px)`;
    packet.animate([{ transform: shift }, { transform: "none" }], { duration: 700, easing: "ease-in-out" });
  }

  root.hidden = false;
  open(0);
})();
