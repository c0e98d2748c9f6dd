// A prompt through the model: its recorded numbers are the JSON text of "prompt-data" (see prompt.py). The page computes
// the softmax of attention with or without the mask, and of the logits with a temperature and the k most probable tokens.
"use strict";

(() => {
  const root = document.getElementById("prompt-view"), text = document.getElementById("prompt-data");
  if (!text) return;
  const data = JSON.parse(text.textContent), { tokens, vocabulary } = data;
  const TOP_K = [1, 2, 3, 5, 10, 20, 50, 100, vocabulary.length];

  // The part of a packed array at these first indices, as numbers.
  function unpack({ shape, step, data: packed }) {
    const bytes = Uint8Array.from(atob(packed), (each) => each.charCodeAt(0));
    const values = Array.from(new Int16Array(bytes.buffer), (each) => each * step);
    return (...indices) => {
      const size = shape.slice(indices.length).reduce((a, b) => a * b, 1);
      const place = indices.reduce((sum, index, axis) => sum * shape[axis] + index, 0);
      return values.slice(place * size, (place + 1) * size);
    };
  }
  const scores = unpack(data.scores), norms = unpack(data.norms), logits = unpack(data.logits);
  const [layers, heads, count] = data.scores.shape;
  const state = { token: count - 1, layer: layers - 1, head: 0, mask: true, temperature: 1, k: TOP_K.length - 1 };

  function softmax(values, temperature = 1) {
    const most = Math.max(...values), terms = values.map((each) => Math.exp((each - most) / temperature));
    const sum = terms.reduce((a, b) => a + b, 0);
    return terms.map((each) => each / sum);
  }
  // The weights of one query; with the mask, keys after it have the score -infinity.
  const weights = (layer, head, query) =>
    softmax(scores(layer, head, query).map((each, key) => (state.mask && key > query ? -Infinity : each)));
  const order = (values) => values.map((_, index) => index).sort((a, b) => values[b] - values[a]);
  const percent = (share) => (share >= 0.0995 ? `${Math.round(100 * share)} %` : `${(100 * share).toPrecision(2)} %`);
  const escaped = (text) => text.replace(/[&<>"]/g, (each) => `&#${each.charCodeAt(0)};`);
  const shown = (token) => escaped(token.replaceAll(" ", "·").replaceAll("\n", "↵"));
  const part = (name) => root.querySelector(`[data-part="${name}"]`);

  function heatmap(layer, head, size, tips) {
    let cells = "";
    for (let query = 0; query < count; query++) {
      weights(layer, head, query).forEach((weight, key) => {
        const tip = tips ? ` data-tip="${shown(tokens[query])} attends to ${shown(tokens[key])}: ${percent(weight)}"` : "";
        if (tips || weight > 0.02) {
          cells += `<rect x="${key * size}" y="${query * size}" width="${size}" height="${size}" ` +
            `fill-opacity="${weight.toFixed(2)}"${tip}/>`;
        }
      });
    }
    return cells;
  }

  function drawTokens() {
    const seen = weights(state.layer, state.head, state.token);
    part("tokens").innerHTML = tokens.map((token, index) => {
      const share = Math.round(40 * seen[index]);
      return `<button type="button" data-token="${index}" aria-pressed="${index === state.token}" style="--share: ${share}%">` +
        `${shown(token)}</button>`;
    }).join("");
  }

  function drawHeads() {
    let grid = "<span>head</span>" + Array.from({ length: heads }, (_, head) => `<span class="name">${head + 1}</span>`).join("");
    for (let layer = 0; layer < layers; layer++) {
      grid += `<span>layer ${layer + 1}</span>`;
      for (let head = 0; head < heads; head++) {
        const pressed = layer === state.layer && head === state.head;
        grid += `<button type="button" data-head="${layer},${head}" aria-pressed="${pressed}" aria-label="layer ${layer + 1}, ` +
          `head ${head + 1}"><svg viewBox="0 0 ${count} ${count}" aria-hidden="true">${heatmap(layer, head, 1, false)}</svg></button>`;
      }
    }
    part("heads").innerHTML = grid;
  }

  function drawHead() {
    const { layer, head, token: chosen } = state, size = 22, left = 66, top = 62, whole = count * size;
    const labels = tokens.map((token, index) => {
      const style = index === chosen ? ' class="chosen"' : "", middle = index * size + size / 2;
      return `<text x="${left - 6}" y="${top + middle + 4}" text-anchor="end"${style}>${shown(token)}</text>` +
        `<text transform="translate(${left + middle + 4} ${top - 6}) rotate(-60)">${shown(token)}</text>`;
    }).join("");
    const name = `layer ${layer + 1}, head ${head + 1}`;
    part("head").innerHTML = `<svg viewBox="0 0 ${left + whole + 26} ${top + whole + 2}" role="img" aria-label="attention ` +
      `of ${name}: a row is the token that attends, a column the token that it attends to">${labels}` +
      `<g transform="translate(${left} ${top})"><rect class="frame" width="${whole}" height="${whole}"/>` +
      heatmap(layer, head, size, true) +
      `<rect class="row" y="${chosen * size}" width="${whole}" height="${size}"/></g></svg>`;
    part("head-title").textContent = name;
  }

  function drawStream() {
    const lengths = norms().filter((_, index) => index % count === state.token), most = Math.max(...lengths);
    part("stream").innerHTML = lengths.map((length, index) => {
      const name = !index ? "embed" : `${index % 2 ? "attn" : "MLP"} ${Math.ceil(index / 2)}`;
      return `<div data-tip="after ${name}: ${length.toFixed(1)}">` +
        `<b>${length.toFixed(1)}</b><span style="height: ${(70 * length) / most}px"></span>${name}</div>`;
    }).join("");
    let rows = "";
    for (let layer = 0; layer <= layers; layer++) {
      const shares = softmax(logits(layer, state.token));
      const best = order(shares).slice(0, 3).map((id) =>
        `<td style="--share: ${Math.round(40 * shares[id])}%">${shown(vocabulary[id])} <small>${percent(shares[id])}</small></td>`);
      rows += `<tr><th scope="row">${layer ? `layer ${layer}` : "embedding"}</th>${best.join("")}</tr>`;
    }
    part("layers").innerHTML = rows;
  }

  function drawNext() {
    const values = logits(layers, state.token), ranked = order(values), kept = ranked.slice(0, TOP_K[state.k]);
    const shares = softmax(kept.map((id) => values[id]), state.temperature);
    part("next").innerHTML = kept.slice(0, 10).map((id, index) =>
      `<li><span>${shown(vocabulary[id])}</span><span class="bar" style="--length: ${(100 * shares[index]).toFixed(1)}%"></span>` +
      `<span>${percent(shares[index])}</span></li>`).join("");
    const last = tokens.slice(Math.max(0, state.token - 3), state.token + 1).join("");
    part("question").textContent = `What follows “${last.trim()}”?`;
    part("temperature").textContent = state.temperature.toFixed(2);
    part("k").textContent = TOP_K[state.k];
  }

  function draw() {
    const { token, head } = document.activeElement?.dataset ?? {}; // the button with the focus is drawn again
    for (const each of [drawTokens, drawHeads, drawHead, drawStream, drawNext]) each();
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
  root.addEventListener("input", ({ target }) => {
    if (target.name === "mask") state.mask = target.checked;
    else state[target.name] = Number(target.value);
    target.name === "mask" ? draw() : drawNext();
  });
  root.querySelector('[name="k"]').max = root.querySelector('[name="k"]').value = state.k;
  root.hidden = false;
  draw();
})();
