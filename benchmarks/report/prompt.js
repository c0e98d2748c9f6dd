// A prompt through the model: its recorded numbers are the JSON text of "prompt-data" (see prompt.py). The page
// computes the softmax of attention with or without the mask, and of the logits with a temperature and the top k.

const root = document.getElementById("prompt-view");
const { tokens, vocabulary, scores, norms, logits } = JSON.parse(document.getElementById("prompt-data").textContent);
const TOP_K = [1, 2, 3, 5, 10, 20, 50, 100, vocabulary.length];

const layers = scores.length, heads = scores[0].length, count = tokens.length;
const state = { token: count - 1, layer: layers - 1, head: 0, mask: true, temperature: 1, k: TOP_K.length - 1 };

function softmax(values, temperature = 1) {
  const most = Math.max(...values), terms = values.map((each) => Math.exp((each - most) / temperature));
  const sum = terms.reduce((a, b) => a + b, 0);
  return terms.map((each) => each / sum);
}
// The weights of one query; with the mask, keys after it have the score -infinity.
const weights = (layer, head, query) =>
  softmax(scores[layer][head][query].map((each, key) => (state.mask && key > query ? -Infinity : each)));
const order = (values) => values.map((_, index) => index).sort((a, b) => values[b] - values[a]);
const percent = (share) => (share >= 0.0995 ? `${Math.round(100 * share)} %` : `${(100 * share).toPrecision(2)} %`);
const shown = (token) => token.replaceAll(" ", "·").replaceAll("\n", "↵");
const range = (length) => Array.from({ length }, (_, index) => index);
const shade = (share) => `--share: ${Math.round(40 * share)}%`; // of the background

// The squares of the weights of a head from `least` on. Their sides are 1.
const squares = (layer, head, least) => range(count).map((query) => weights(layer, head, query).map((weight, key) => {
  const tip = `${shown(tokens[query])} attends to ${shown(tokens[key])}: ${percent(weight)}`;
  return weight < least ? "" : html`<rect x="${key}" y="${query}" width="1" height="1"
    fill-opacity="${weight.toFixed(2)}" data-tip="${tip}"/>`;
}));

const drawn = { // {data-part of an element: its content}
  tokens() {
    const seen = weights(state.layer, state.head, state.token);
    return tokens.map((token, index) => html`<button type="button" data-token="${index}"
      aria-pressed="${index === state.token}" style="${shade(seen[index])}">${shown(token)}</button>`);
  },
  heads() {
    const button = (layer, head) => html`<button type="button" data-head="${layer},${head}"
      aria-pressed="${layer === state.layer && head === state.head}" aria-label="layer ${layer + 1}, head ${head + 1}">
      <svg viewBox="0 0 ${count} ${count}" aria-hidden="true">${squares(layer, head, 0.02)}</svg></button>`;
    const row = (layer) => [html`<span>layer ${layer + 1}</span>`, range(heads).map((head) => button(layer, head))];
    const names = range(heads).map((head) => html`<span>${head + 1}</span>`);
    return [html`<span>head</span>`, names, range(layers).map(row)];
  },
  "head-title": () => `layer ${state.layer + 1}, head ${state.head + 1}`,
  head() {
    const size = 22, left = 66, top = 62, whole = count * size;
    const labels = tokens.map((token, index) => {
      const middle = index * size + size / 2 + 4, style = index === state.token ? "chosen" : "";
      return html`<text x="${left - 6}" y="${top + middle}" text-anchor="end" class="${style}">${shown(token)}</text>
        <text transform="translate(${left + middle} ${top - 6}) rotate(-60)">${shown(token)}</text>`;
    });
    const label = "attention of the head: a row is the token that attends, a column the token that it attends to";
    return html`<svg viewBox="0 0 ${left + whole + 26} ${top + whole + 2}" role="img" aria-label="${label}">${labels}
      <g transform="translate(${left} ${top}) scale(${size})"><rect class="frame" width="${count}" height="${count}"/>
      ${squares(state.layer, state.head, 0)}
      <rect class="row" y="${state.token}" width="${count}" height="1"/></g></svg>`;
  },
  stream() {
    const lengths = norms.map((each) => each[state.token]), most = Math.max(...lengths);
    return lengths.map((length, index) => {
      const name = !index ? "embed" : `${index % 2 ? "attn" : "MLP"} ${Math.ceil(index / 2)}`;
      return html`<div data-tip="after ${name}: ${length.toFixed(1)}"><b>${length.toFixed(1)}</b>
        <span style="height: ${(70 * length) / most}px"></span>${name}</div>`;
    });
  },
  layers: () => range(layers + 1).map((layer) => {
    const shares = softmax(logits[layer][state.token]);
    const best = order(shares).slice(0, 3).map((id) => html`<td style="${shade(shares[id])}">
      ${shown(vocabulary[id])} <small>${percent(shares[id])}</small></td>`);
    return html`<tr><th scope="row">${layer ? `layer ${layer}` : "embedding"}</th>${best}</tr>`;
  }),
  next() {
    const values = logits[layers][state.token], kept = order(values).slice(0, TOP_K[state.k]);
    const shares = softmax(kept.map((id) => values[id]), state.temperature);
    return kept.slice(0, 10).map((id, index) => html`<li><span>${shown(vocabulary[id])}</span>
      <progress value="${shares[index]}" aria-hidden="true"></progress><span>${percent(shares[index])}</span></li>`);
  },
  question: () => `What follows “${tokens.slice(Math.max(0, state.token - 3), state.token + 1).join("").trim()}”?`,
  temperature: () => state.temperature.toFixed(2),
  k: () => TOP_K[state.k],
};

function draw(names = Object.keys(drawn)) {
  const { token, head } = document.activeElement.dataset; // the button with the focus is drawn again
  for (const name of names) root.querySelector(`[data-part="${name}"]`).innerHTML = html`${drawn[name]()}`;
  const again = token ? `[data-token="${token}"]` : head && `[data-head="${head}"]`;
  if (again) root.querySelector(again).focus({ preventScroll: true });
}

root.addEventListener("click", (event) => {
  const { token, head } = event.target.closest("button")?.dataset ?? {};
  if (token) state.token = Number(token);
  else if (head) [state.layer, state.head] = head.split(",").map(Number);
  else return;
  draw();
});
root.addEventListener("input", ({ target: { name, checked, value } }) => {
  state[name] = name === "mask" ? checked : Number(value);
  draw(name === "mask" ? undefined : ["next", "temperature", "k"]);
});
root.hidden = false;
draw();
