// The step player: it shows one frame of a view, a recorded collective or a training step. Its data is the JSON text of
// the element "player-data"; see views.py. An element with data-tip has a tooltip; see page.js.
"use strict";

(() => {
  const TRACE_FRAMES = 200; // frames of a training step; a recorded collective has one frame per round
  const MILLISECONDS = { trace: 60, slices: 1500 }; // time of a frame while playing
  const COLOURS = ["var(--c0)", "var(--c1)", "var(--c2)", "var(--c3)"]; // of ranks
  const CATEGORIES = { forward: "forward", backward: "backward", weights: "gradients of the parameters",
    optimizer: "optimizer", collective: "communication", wait: "wait", GPU: "GPU" };
  const UNITS = [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]];
  const BUFFERS = "temporary buffers";

  const root = document.getElementById("step-player");
  const views = JSON.parse(document.getElementById("player-data").textContent).map((view) =>
    ({ ...view, count: view.kind === "trace" ? TRACE_FRAMES + 1 : view.frames.length }));
  const still = matchMedia("(prefers-reduced-motion: reduce)");

  // An element with attributes and children; a child is an element or a text.
  function make(tag, attributes = {}, ...children) {
    const svg = ["svg", "rect", "text", "path", "g"].includes(tag);
    const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) if (value !== null) node.setAttribute(name, value);
    node.append(...children);
    return node;
  }

  function amount(bytes) {
    const [unit, size] = UNITS.find((each) => bytes >= each[1]) || ["B", 1];
    return `${Number((bytes / size).toPrecision(4))} ${unit}`;
  }

  function duration(time, unit) {
    if (unit) return `${Number(time.toPrecision(3))} ${unit}${time === 1 ? "" : "s"}`;
    const [value, name] = time >= 1e6 ? [time / 1e6, "s"] : time >= 1e3 ? [time / 1e3, "ms"] : [time, "us"];
    return `${Number(value.toPrecision(3))} ${name}`;
  }

  // -- the controls --------------------------------------------------------------------------------------------------

  const choice = make("select", { id: "player-view" });
  views.forEach((view, number) => {
    const groups = [...choice.children];
    const group = groups.find((each) => each.label === view.group) || make("optgroup", { label: view.group });
    group.append(make("option", { value: number }, view.title));
    if (!groups.includes(group)) choice.append(group);
  });
  const slider = make("input", { type: "range", min: 0, value: 0, "aria-label": "frame" });
  const position = make("output", { class: "position" });
  const about = make("p"), drawing = make("div", { class: "drawing" }), now = make("div", { class: "now" });
  const buttons = {};
  for (const [name, sign, label] of [
    ["first", "|<", "first frame"], ["previous", "<", "previous frame"], ["play", "Play", "play"],
    ["next", ">", "next frame"], ["last", ">|", "last frame"], ["out", "−", "zoom out"], ["in", "+", "zoom in"],
  ]) {
    buttons[name] = make("button", { type: "button", "aria-label": label, "data-action": name }, sign);
  }
  const controls = make("div", { class: "controls" }, ...Object.values(buttons), slider, position);
  root.replaceChildren(make("label", { for: "player-view" }, "View "), choice, drawing, controls, now, about);
  root.setAttribute("role", "group");
  root.setAttribute("aria-label", "Step player");
  root.tabIndex = 0;

  let view = null, frame = 0, timer = null, draw = null, zoom = () => {};

  function open(number) {
    stop();
    view = views[number];
    slider.max = view.count - 1;
    buttons.in.hidden = buttons.out.hidden = view.kind !== "trace";
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

  function stop() {
    clearInterval(timer);
    timer = null;
    buttons.play.textContent = "Play";
    buttons.play.setAttribute("aria-label", "play");
  }

  function play() {
    if (frame === view.count - 1) show(0);
    buttons.play.textContent = "Pause";
    buttons.play.setAttribute("aria-label", "pause");
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
  let width = 0;
  new ResizeObserver(() => { // the player draws in pixels
    if (view && drawing.clientWidth !== width) show(frame);
    width = drawing.clientWidth;
  }).observe(drawing);

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

  function openTrace(trace) {
    const { lanes, unit } = trace, length = Math.max(...lanes.flatMap((lane) => lane.events.map((e) => e[1] + e[2])));
    let from = 0, span = length; // the part of the step that is shown
    about.textContent = trace.text;
    const used = new Set(lanes.flatMap((lane) => lane.events.map((event) => event[3])));
    const legend = make("p", { class: "legend" });
    for (const [category, name] of Object.entries(CATEGORIES)) {
      if (used.has(category)) legend.append(make("span", { class: "entry" }, make("span", { class: `key ${category}` }), name));
    }
    const axis = make("div", { class: "axis", "aria-hidden": "true" });
    const rows = lanes.map((lane) => {
      const row = { lane, ...bars(lane, unit), text: make("span"), head: make("div", { class: "head" }) };
      const name = `rank ${lane.rank}${lane.name && ", "}${lane.name} `, marks = row.labels.map(([label]) => label);
      const title = make("div", { class: "lane-title" }, make("b", {}, name), row.text);
      row.track = make("div", { class: `track${lane.live ? " high" : ""}` }, row.picture, ...marks, row.head);
      row.node = make("div", { class: "lane" }, title, row.track);
      return row;
    });
    drawing.className = "drawing";
    drawing.replaceChildren(legend, ...rows.map((row) => row.node), axis);
    const percent = (time) => `${(100 * (time - from)) / span}%`;

    function place() { // the bars of the part that is shown
      for (const { picture, labels, height } of rows) {
        picture.setAttribute("viewBox", `${from} 0 ${span} ${height}`);
        for (const [label, start, time] of labels) {
          label.style.left = percent(start);
          label.style.width = `${(100 * time) / span}%`;
        }
      }
      axis.replaceChildren(...[0, 1, 2, 3, 4].map((k) =>
        make("span", { style: `left: ${25 * k}%` }, duration(from + (span * k) / 4, unit))));
    }
    zoom = (factor) => {
      const time = (frame / TRACE_FRAMES) * length;
      span = Math.min(length, Math.max(length / 256, span * factor));
      from = Math.min(Math.max(0, time - span / 2), length - span);
      place();
      show(frame);
    };
    place();
    return (number) => {
      const time = (number / TRACE_FRAMES) * length;
      if (time < from || time > from + span) {
        from = Math.min(Math.max(0, time - span / 2), length - span);
        place();
      }
      const complete = new Map(); // rank: bytes of the arrays of its finished collectives
      for (const { lane, rectangles, labels, head, text } of rows) {
        head.style.left = percent(time);
        for (const [node, start] of [...rectangles, ...labels]) node.classList.toggle("later", start > time);
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

  // The picture of a lane in units of time, its [rectangle, start], and its [label, start, time]. Nested bars are drawn
  // inside their outer bar; below the bars of a pipeline is the curve of its live activations.
  function bars({ events, live }, unit) {
    const height = live ? 44 : 24, rectangles = [], labels = [], ends = [];
    const picture = make("svg", { preserveAspectRatio: "none", "aria-hidden": "true" });
    for (const event of events) {
      const [name, start, taken, category, , , mark] = event;
      while (ends.length && ends[ends.length - 1] <= start + 0.05) ends.pop();
      const inset = Math.min(3 * ends.length, 9);
      ends.push(start + taken);
      const rectangle = make("rect", { x: start, y: inset, width: taken, height: 24 - 2 * inset, class: category,
        "data-tip": describe(event, unit) });
      picture.append(rectangle);
      rectangles.push([rectangle, start]);
      if (mark) labels.push([make("span", { class: "mark", "aria-hidden": "true" }, mark), start, taken]);
    }
    if (live) {
      const most = Math.max(...live.map(([, count]) => count)), y = (count) => 44 - (16 * count) / most;
      const path = live.map(([time, count], k) => `${k ? `H${time}V` : `M${time} `}${y(count)}`).join("");
      picture.append(make("path", { d: path, class: "live" }));
    }
    return { picture, rectangles, labels, height };
  }

  // -- a recorded collective: the slices of each rank, coloured by origin, and the slices that move ----------------------

  function openSlices(recording) {
    zoom = () => {};
    about.textContent = recording.text;
    drawing.className = "drawing";
    const names = [...new Set(recording.frames.flatMap((each) => Object.keys(each.ranks[0].cells)))];
    const most = Math.max(...recording.frames.flatMap((each) => each.ranks.map(held)));
    const buffered = recording.frames.some((each) => each.ranks.some((state) => state.bytes[BUFFERS]));
    const rows = buffered ? [...names, BUFFERS] : names;
    return (number, moves) => {
      const { phase, messages, ranks } = recording.frames[number];
      const layout = ring(drawing.clientWidth || 320, rows.length);
      const picture = make("svg", { width: layout.width, height: layout.height, role: "img",
        "aria-label": `${phase}: the arrays of ${ranks.length} ranks and ${messages.length} messages` });
      const places = ranks.map((state, rank) => card(picture, layout, state, rank, recording, rows, messages, most));
      const many = messages.length > ranks.length; // an all-gather or a reduce-scatter between all ranks
      for (const message of messages) packet(picture, layout, message, places[message.from], moves, many);
      drawing.replaceChildren(picture);
      const list = many ? [] : messages.map((message) => make("li", {},
        `rank ${message.from} to rank ${message.to}: slice ${message.slice} of ${ranksText(message.ranks)}, ` +
        amount(message.bytes)));
      const count = messages.length ? `${messages.length} messages` : "no messages";
      now.replaceChildren(make("p", {}, make("b", {}, `${phase}: `), count), make("ul", {}, ...list));
      return `frame ${number + 1} of ${recording.frames.length}`;
    };
  }

  const held = (state) => Object.values(state.bytes).reduce((sum, size) => sum + size, 0);
  const ranksText = (ranks) => (ranks.length === 1 ? `rank ${ranks[0]}` : `ranks ${ranks.join(" + ")}`);

  // Four cards clockwise, so that each rank is beside its two neighbours in the ring.
  function ring(width, rows) {
    const large = width >= 560, gap = large ? 120 : 44, rise = 42, cell = large ? 22 : 18, pitch = cell + 19;
    const card = { width: (width - gap) / 2, height: 46 + pitch * rows, cell, pitch };
    const right = card.width + gap, low = card.height + rise;
    return { width, height: low + card.height, card, gap, rise,
      corner: (rank) => [[0, 0], [right, 0], [right, low], [0, low]][rank % 4] };
  }

  // Stripes in the colours of the ranks that a slice contains. part: the quarter that a rank has, or null for all.
  function stripes(parent, x, y, width, height, members, part, count) {
    parent.append(make("rect", { x, y, width, height, rx: 2, class: "empty" }));
    const left = part === null ? x : x + (part * width) / count, whole = part === null ? width : width / count;
    members.forEach((rank, number) => parent.append(make("rect", { x: left + (number * whole) / members.length, y,
      width: whole / members.length, height, style: `fill: ${COLOURS[rank % 4]}` })));
  }

  // Draws the card of a rank; returns {"slice of ranks": [x, y] of its cell}.
  function card(picture, layout, state, rank, recording, rows, messages, most) {
    const { width, height, cell: high, pitch: step } = layout.card, narrow = width < 220;
    const [left, top] = layout.corner(rank), places = {};
    const node = make("g", { class: "rank" });
    node.append(make("rect", { x: left + 0.5, y: top + 0.5, width: width - 1, height: height - 1, rx: 6, class: "card" }),
      make("rect", { x: left + 8, y: top + 8, width: 12, height: 12, rx: 2, style: `fill: ${COLOURS[rank % 4]}` }),
      make("text", { x: left + 26, y: top + 18, class: "name" }, `rank ${rank}`));
    rows.forEach((name, row) => {
      const y = top + 28 + step * row;
      const cells = state.cells[name] || buffers(state, rank, recording, messages, places);
      node.append(make("text", { x: left + 8, y: y + 11 }, name));
      const pitch = (width - 16) / Math.max(4, cells.length);
      cells.forEach(([slice, members, part = null], number) => {
        const x = left + 8 + number * pitch, label = slice === null ? "" : `${slice}`;
        const sent = messages.some((each) => each.from === rank && (each.array || name) === name &&
          key(each.slice, each.ranks) === key(slice, members));
        const size = narrow ? 5 : 12, short = label.length > size ? label.slice(0, size - 1) + "." : label;
        const tip = `rank ${rank}, ${name}${slice === null ? "" : `, ${slice}`}: ${!members.length ? "empty or old" :
          part !== null ? `only the part of rank ${part}` : ranksText(members)}`;
        const full = members.length === recording.ranks;
        const cell = make("g", { class: `cell${full ? " full" : ""}${sent ? " sent" : ""}`, "data-tip": tip });
        stripes(cell, x, y + 15, pitch - 4, high, members, part, recording.ranks);
        cell.append(make("text", { x: x + (pitch - 4) / 2, y: y + 19 + high / 2, class: "number" }, short));
        node.append(cell);
        places[key(slice, members)] ||= [x, y + 15];
        places[name + key(slice, members)] = [x, y + 15];
      });
    });
    const total = held(state), y = top + height - 8;
    const parts = Object.entries(state.bytes).filter(([, size]) => size).map(([name, size]) => `${name} ${amount(size)}`);
    const bar = make("g", { class: "memory", "data-tip": `in memory: ${amount(total)} (${parts.join(", ")})` });
    bar.append(make("rect", { x: left + 8, y: y - 9, width: width - 16, height: 9, class: "empty" }),
      make("rect", { x: left + 8, y: y - 9, width: ((width - 16) * total) / most, height: 9, class: "bytes" }),
      make("text", { x: left + width - 8, y: top + 18, class: "end" }, `${narrow ? "" : "in memory: "}${amount(total)}`));
    node.append(bar);
    picture.append(node);
    return places;
  }

  const key = (slice, members) => `${slice} of ${members}`;

  // The cells of the temporary buffers: the slices that are sent and are in no other array, then the other buffers.
  function buffers(state, rank, recording, messages, places) {
    const cells = messages.filter((each) => each.from === rank && !places[key(each.slice, each.ranks)])
      .map((each) => [each.slice, each.ranks]);
    const count = Math.round(((state.bytes[BUFFERS] || 0) * recording.ranks) / recording.bytes); // one slice each
    while (cells.length < count) cells.push([null, []]);
    return cells;
  }

  // A slice on its way from its cell to the gap between two ranks, where it rests. side: beside the middle of the gap.
  function packet(picture, layout, message, places, moves, both) {
    const centre = (rank) => layout.corner(rank).map((x, axis) => x + (axis ? layout.card.height : layout.card.width) / 2);
    const [x0, y0] = centre(message.from), [x1, y1] = centre(message.to), far = Math.hypot(x1 - x0, y1 - y0);
    const [dx, dy] = [(x1 - x0) / far, (y1 - y0) / far], side = both ? 14 : 0;
    const across = Math.abs(dx * dy) > 0.01 ? (message.from % 2 ? 26 : -26) : 0; // the two diagonals cross
    const x = (x0 + x1) / 2 - dy * side + across, y = (y0 + y1) / 2 + dx * side;
    const reach = (Math.abs(dx) > 0.99 ? layout.gap : layout.rise) / 2 - 3;
    const [ax, ay, bx, by] = [x - dx * reach, y - dy * reach, x + dx * reach, y + dy * reach];
    const wing = (turn) => `L${bx - 7 * dx + turn * dy} ${by - 7 * dy - turn * dx}`;
    picture.append(make("path", { class: "arrow", d: `M${ax} ${ay}L${bx} ${by}${wing(5)}M${bx} ${by}${wing(-5)}` }));
    const node = make("g", { class: "packet", "data-tip": `rank ${message.from} to rank ${message.to}: slice ` +
      `${message.slice} of ${ranksText(message.ranks)}, ${amount(message.bytes)}` });
    const wide = both ? 16 : 28, high = both ? 10 : 18;
    stripes(node, x - wide / 2, y - high / 2, wide, high, message.ranks, null, 1);
    if (!both) node.append(make("text", { x, y: y + 4, class: "number" }, `${message.slice}`));
    picture.append(node);
    const start = places[(message.array || "") + key(message.slice, message.ranks)];
    if (moves && start) {
      const shift = `translate(${start[0] - x + wide / 2}px, ${start[1] - y + high / 2}px)`;
      node.animate([{ transform: shift }, { transform: "none" }], { duration: 700, easing: "ease-in-out" });
    }
  }

  open(0);
})();
