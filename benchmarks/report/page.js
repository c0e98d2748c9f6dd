// The side navigation and the tooltips of the page.
"use strict";

(() => {
  // -- the link of the section in view is marked -----------------------------------------------------------------------

  const links = new Map([...document.querySelectorAll("nav a")].map((link) => [link.hash.slice(1), link]));
  const sections = [...document.querySelectorAll("main > section")];
  function mark() {
    const here = sections.filter((each) => each.getBoundingClientRect().top < innerHeight / 3).pop() || sections[0];
    for (const link of links.values()) link.removeAttribute("aria-current");
    links.get(here.id).setAttribute("aria-current", "true");
  }
  addEventListener("scroll", mark, { passive: true });
  mark();
  for (const link of links.values()) link.addEventListener("click", () => link.closest("details")?.removeAttribute("open"));
  const contents = document.querySelector("nav details"), wide = matchMedia("(min-width: 64rem)");
  const unfold = () => { contents.open = wide.matches; };
  wide.addEventListener("change", unfold);
  unfold();

  // -- tooltips: of elements with data-tip, and of the nearest point of a chart ------------------------------------------

  const tip = document.body.appendChild(document.createElement("div"));
  tip.className = "tip";
  tip.setAttribute("aria-live", "polite");
  function tell(text, x, y) {
    tip.textContent = text;
    tip.style.left = `${Math.max(4, Math.min(x + 12, innerWidth - tip.offsetWidth - 6))}px`;
    tip.style.top = `${y + 18 + tip.offsetHeight > innerHeight ? y - tip.offsetHeight - 8 : y + 18}px`;
    tip.classList.add("shown");
  }
  const hide = () => tip.classList.remove("shown");
  function tellPoint(chart, [x, y, text]) {
    const box = chart.getBoundingClientRect();
    tell(text, box.x + x * box.width, box.y + y * box.height);
  }
  for (const kind of ["pointermove", "pointerdown"]) {
    document.addEventListener(kind, (event) => {
      const element = event.target.closest?.("[data-tip]"), chart = event.target.closest?.(".chart");
      if (element) return tell(element.dataset.tip, event.clientX, event.clientY);
      if (!chart) return hide();
      const box = chart.getBoundingClientRect(), points = JSON.parse(chart.dataset.points);
      const away = ([x, y]) => Math.hypot(box.x + x * box.width - event.clientX, box.y + y * box.height - event.clientY);
      const nearest = points.reduce((best, point) => (away(point) < away(best) ? point : best));
      return away(nearest) < 60 ? tellPoint(chart, nearest) : hide();
    });
  }
  for (const chart of document.querySelectorAll(".chart")) {
    const points = JSON.parse(chart.dataset.points);
    let place = -1;
    chart.tabIndex = 0;
    chart.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      event.preventDefault();
      place = (place + step + points.length) % points.length;
      tellPoint(chart, points[place]);
    });
    chart.addEventListener("blur", hide);
  }
})();
