// Markup for all scripts of the page; its side navigation; its tooltips.

class Markup extends String {}

// A template literal as Markup. Its values are escaped if they are not Markup; the items of an array are joined.
globalThis.html = (texts, ...values) => {
  function inserted(value) {
    if (Array.isArray(value)) return value.map(inserted).join("");
    return value instanceof Markup ? value : `${value}`.replace(/[&<>"]/g, (each) => `&#${each.charCodeAt(0)};`);
  }
  return new Markup(String.raw({ raw: texts }, ...values.map(inserted)));
};

// -- the link of the section in view is marked ----------------------------------------------------------------------

const links = [...document.querySelectorAll("nav a")], sections = [...document.querySelectorAll("main > section")];
function mark() {
  const here = sections.findLast((each) => each.getBoundingClientRect().top < innerHeight / 3) ?? sections[0];
  for (const link of links) link.ariaCurrent = link.hash === `#${here.id}` ? "true" : null;
}
addEventListener("scroll", mark, { passive: true });
mark();

// -- tooltips: of elements with data-tip, and of the points of a chart, also by the arrow keys -----------------------

document.body.insertAdjacentHTML("beforeend", '<div class="tip" aria-live="polite"></div>');
const tip = document.body.lastChild;
function tell(text, x, y) {
  tip.textContent = text;
  tip.style.left = `${Math.max(4, Math.min(x + 12, innerWidth - tip.offsetWidth - 6))}px`;
  tip.style.top = `${y + 18 + tip.offsetHeight > innerHeight ? y - tip.offsetHeight - 8 : y + 18}px`;
  tip.classList.add("shown");
}
const hide = () => tip.classList.remove("shown");

// [[text, x, y]] of the points of a chart, in pixels of the window.
function pointsOf(chart) {
  const box = chart.getBoundingClientRect();
  return JSON.parse(chart.dataset.points).map(([x, y, text]) => [text, box.x + x * box.width, box.y + y * box.height]);
}

function point({ target, clientX, clientY }) {
  const element = target.closest?.("[data-tip]"), chart = target.closest?.(".chart");
  if (element) return tell(element.dataset.tip, clientX, clientY);
  const away = ([, x, y]) => Math.hypot(x - clientX, y - clientY);
  const [nearest] = chart ? pointsOf(chart).sort((a, b) => away(a) - away(b)) : [];
  return nearest && away(nearest) < 60 ? tell(...nearest) : hide();
}
for (const kind of ["pointermove", "pointerdown"]) document.addEventListener(kind, point);

for (const chart of document.querySelectorAll(".chart")) {
  let place = -1;
  chart.tabIndex = 0;
  chart.addEventListener("blur", hide);
  chart.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key], points = pointsOf(chart);
    if (!step) return;
    event.preventDefault();
    place = (place + step + points.length) % points.length;
    tell(...points[place]);
  });
}
