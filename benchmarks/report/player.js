// The step player. It shows one frame of a view: a training step from a trace, or a recorded collective.
// Its data is the JSON text of the element "player-data"; see views() in machine_sections.py.
"use strict";

(() => {
  const TRACE_FRAMES = 200; // frames of a training step; a recorded collective has one frame per round
  const MILLISECONDS = { trace: 60, slices: 1200 }; // time of a frame while playing
  const UNITS = [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]];
  const CATEGORIES = ["forward", "backward", "optimizer", "GPU", "wait", "collective"];

  const data = JSON.parse(document.getElementById("player-data").textContent);
  const root = document.getElementById("step-player");
  const views = [
    ...data.traces.map((view) => ({ ...view, kind: "trace", count: TRACE_FRAMES + 1 })),
    ...data.slices.map((view) => ({ ...view, kind: "slices", count: view.frames.length })),
  ];

  // An element with attributes and children; a child is an element or a text.
  function make(tag, attributes = {}, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    node.append(...children);
    return node;
  }

  function amount(bytes) {
    const [unit, size] = UNITS.find((each) => bytes >= each[1]) || ["B", 1];
    return `${Number((bytes / size).toPrecision(4))} ${unit}`;
  }

  function duration(microseconds) {
    const [value, unit] = microseconds >= 1e6 ? [microseconds / 1e6, "s"]
      : microseconds >= 1e3 ? [microseconds / 1e3, "ms"] : [microseconds, "us"];
    return `${Number(value.toPrecision(3))} ${unit}`;
  }

  // -- the controls --------------------------------------------------------------------------------------------------

  const choice = make("select", { id: "player-view" });
  views.forEach((view, number) => choice.append(make("option", { value: number }, view.title)));
  const slider = make("input", { type: "range", min: 0, value: 0, "aria-label": "frame" });
  const position = make("output", { class: "position" });
  const about = make("p");
  const drawing = make("div", { class: "drawing" });
  const now = make("div", { class: "now" });
  const buttons = {};
  for (const [name, sign, label] of [
    ["first", "|<", "first frame"], ["previous", "<", "previous frame"], ["play", "Play", "play"],
    ["next", ">", "next frame"], ["last", ">|", "last frame"],
  ]) {
    buttons[name] = make("button", { type: "button", "aria-label": label, "data-action": name }, sign);
  }
  const controls = make("div", { class: "controls" }, ...Object.values(buttons), slider, position);
  root.replaceChildren(
    make("label", { for: "player-view" }, "View "), choice, about, controls, drawing, now);
  root.setAttribute("role", "group");
  root.setAttribute("aria-label", "Step player");
  root.tabIndex = 0;

  let view = null, frame = 0, timer = null, draw = null;

  function open(number) {
    stop();
    view = views[number];
    slider.max = view.count - 1;
    draw = view.kind === "trace" ? openTrace(view) : openSlices(view);
    show(0);
  }

  function show(number) {
    frame = Math.min(Math.max(number, 0), view.count - 1);
    slider.value = frame;
    now.setAttribute("aria-live", timer ? "off" : "polite"); // a screen reader cannot follow a playing step
    position.textContent = draw(frame);
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
    first: () => show(0),
    previous: () => show(frame - 1),
    next: () => show(frame + 1),
    last: () => show(view.count - 1),
    play: () => (timer ? stop() : play()),
  };
  const keys = { ArrowLeft: "previous", ArrowRight: "next", Home: "first", End: "last", " ": "play" };

  function act(action) {
    if (action !== "play") stop();
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

  // -- a training step: a lane of bars for each thread, group and stream ------------------------------------------------

  function openTrace(trace) {
    const length = Math.max(...trace.lanes.flatMap((lane) => lane.events.map((event) => event[1] + event[2])));
    const ranks = new Set(trace.lanes.map((lane) => lane.rank)).size;
    about.textContent = `${ranks === 1 ? "One rank" : `${ranks} ranks`}, ${trace.lanes.length} lanes. The step takes ` +
      `${duration(length)}. Bars that have not begun are pale.`;
    const lanes = trace.lanes.map((lane) => ({ ...lane, ...bars(lane.events, length) }));
    const used = new Set(trace.lanes.flatMap((lane) => lane.events.map((event) => event[3])));
    const legend = make("p", { class: "legend" });
    for (const category of CATEGORIES.filter((each) => used.has(each))) {
      legend.append(make("span", { class: `key ${category}` }), ` ${category} `);
    }
    const rows = lanes.map((lane) => {
      lane.text = make("span", { class: "event" });
      lane.head = make("div", { class: "head" });
      lane.track = make("div", { class: "track" }, lane.picture, lane.head);
      const title = make("div", { class: "lane-title" }, make("b", {}, `rank ${lane.rank}, ${lane.name}: `), lane.text);
      return make("div", { class: "lane" }, title, lane.track);
    });
    drawing.className = "drawing";
    drawing.replaceChildren(legend, ...rows);
    return (number) => {
      const time = (number / TRACE_FRAMES) * length;
      const complete = new Map(); // rank: bytes of the arrays of its finished collectives
      for (const lane of lanes) {
        lane.head.style.left = `${(100 * number) / TRACE_FRAMES}%`;
        for (const [rectangle, start] of lane.rectangles) rectangle.classList.toggle("later", start > time);
        const running = lane.events.filter((event) => event[1] <= time && time < event[1] + event[2]);
        const inner = running.filter((event) => event[3] !== "phase").pop() || running.pop();
        lane.text.textContent = inner ? describe(inner) : "idle";
        for (const [, start, span, category, , bytes] of lane.events) {
          if (category === "collective" && start + span <= time) {
            complete.set(lane.rank, (complete.get(lane.rank) || 0) + bytes);
          }
        }
      }
      now.textContent = [...complete].filter(([, bytes]) => bytes).map(([rank, bytes]) =>
        `Rank ${rank} has completed collectives of ${amount(bytes)}.`).join(" ");
      return `${duration(time)} of ${duration(length)}`;
    };
  }

  function describe([name, , span, , module, bytes]) {
    return name + (module ? ` (${module})` : "") + (bytes ? `, ${amount(bytes)}` : "") + `, ${duration(span)}`;
  }

  // The picture of a lane, 1000 units wide, and its [rectangle, start]. Nested bars are drawn inside their outer bar.
  function bars(events, length) {
    const namespace = "http://www.w3.org/2000/svg";
    const picture = document.createElementNS(namespace, "svg");
    picture.setAttribute("viewBox", "0 0 1000 24");
    picture.setAttribute("preserveAspectRatio", "none");
    picture.setAttribute("aria-hidden", "true");
    const rectangles = [], ends = [];
    for (const event of events) {
      const [, start, span, category] = event;
      while (ends.length && ends[ends.length - 1] <= start + 0.05) ends.pop();
      const inset = Math.min(3 * ends.length, 9);
      ends.push(start + span);
      const rectangle = document.createElementNS(namespace, "rect");
      const box = { x: (1000 * start) / length, y: inset, width: Math.max((1000 * span) / length, 0.4),
        height: 24 - 2 * inset };
      for (const [name, value] of Object.entries(box)) rectangle.setAttribute(name, value.toFixed(2));
      rectangle.setAttribute("class", category);
      picture.append(rectangle);
      rectangles.push([rectangle, start]);
    }
    return { picture, rectangles };
  }

  // -- a recorded collective: the slices that each rank has, and what it holds in memory --------------------------------

  function openSlices(recording) {
    const { ranks, bytes } = recording;
    about.textContent = `${recording.text} Recorded from ${ranks} ranks with arrays of ${amount(bytes)} (all ` +
      `parameters of preset ${recording.preset}) in ${ranks} slices of ${amount(bytes / ranks)}. The cell "2: 0+3" is ` +
      `slice 2 with the sum of ranks 0 and 3; green: all ranks. An outlined cell is sent in this frame.`;
    drawing.className = "drawing ranks";
    return (number) => {
      const { phase, messages, ranks: states } = recording.frames[number];
      drawing.replaceChildren(...states.map((state, rank) => rankState(state, rank, recording, messages)));
      const list = messages.map((message) => make("li", {},
        `rank ${message.from} to rank ${message.to}: slice ${message.slice} of ${ranksText(message.ranks)}, ` +
        amount(message.bytes)));
      now.replaceChildren(
        make("p", {}, make("b", {}, `${phase}: `), list.length ? `${list.length} messages of this round` : "no messages"),
        make("ul", {}, ...list));
      return `frame ${number + 1} of ${recording.frames.length}`;
    };
  }

  function rankState(state, rank, { ranks, bytes }, messages) {
    const sent = messages.filter((message) => message.from === rank);
    const found = new Set(); // the messages whose slice is in a named array; the others come from a temporary buffer
    const arrays = Object.entries(state.cells).map(([name, cells]) => arrayRow(name, cells.map(([slice, members]) => {
      const message = sent.find((each) => each.slice === slice && String(each.ranks) === String(members));
      if (message) found.add(message);
      const updated = name === "parameters";
      const text = !members.length ? (updated ? "old" : "empty") : updated ? "new" : members.join("+");
      const full = members.length === ranks || (updated && members.length);
      return cell(slice, text, members.length / ranks, full, message);
    })));
    const buffered = sent.filter((message) => !found.has(message)).map((message) =>
      cell(message.slice, message.ranks.join("+"), message.ranks.length / ranks, false, true));
    const buffers = Math.round(((state.bytes["temporary buffers"] || 0) * ranks) / bytes); // a buffer has one slice
    while (buffered.length < buffers) buffered.push(cell(null, "not sent", 0, false, false));
    if (buffered.length) arrays.push(arrayRow("temporary buffers", buffered));
    const held = Object.entries(state.bytes).filter(([, size]) => size);
    const total = held.reduce((sum, [, size]) => sum + size, 0);
    const memory = held.map(([name, size]) => `${name} ${amount(size)}`).join(", ");
    return make("div", { class: "rank" }, make("b", {}, `rank ${rank}`), ...arrays,
      make("div", { class: "memory" }, `in memory: ${amount(total)} (${memory})`));
  }

  function arrayRow(name, cells) {
    return make("div", { class: "array" }, make("span", { class: "name" }, name),
      make("span", { class: "cells" }, ...cells));
  }

  // share: the part of the ranks that the slice contains; full: all of them, or an updated parameter.
  function cell(slice, text, share, full, sent) {
    const style = `cell ${share ? "some" : "none"}${full ? " full" : ""}${sent ? " sent" : ""}`;
    const label = slice === null ? text : `${slice}: ${text}`;
    return make("span", { class: style, style: `--share: ${Math.round(45 * share)}%` }, label);
  }

  function ranksText(ranks) {
    return ranks.length === 1 ? `rank ${ranks[0]}` : `ranks ${ranks.join(" + ")}`;
  }

  open(0);
})();
