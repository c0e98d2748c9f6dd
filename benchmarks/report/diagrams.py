"""Figures 1 to 5 of the paper for this program: the architecture and the data flows of the stages, drawn as SVG.

MODEL describes the architecture, STEP the data flow of all four stages. The layout is computed: each entry is a row.
"""

from dataclasses import dataclass, field
from html import escape
from textwrap import wrap

ALL, RANKS, GPUS = (0, 1, 2, 3), (1, 3), (2, 3)  # stages: all, those with many ranks, those on GPUs
LINE, PAD, GAP, LANE, LOOP = 16, 8, 18, 204, 26  # units: line of text, padding, space between rows, lane, loop arrow
CHARACTER = 7.1  # units: width of a character of FONT, on average
FONT = "13px system-ui, sans-serif"
STAGE_NAMES = ("stage 0, NumPy", "stage 1, NumPy and MPI", "stage 2, CUDA", "stage 3, CUDA, MPI and NCCL")


@dataclass(frozen=True)
class Work:
    """One row of a data flow. text: the same in all stages, or {stage: text}.

    kind: "host", "gpu" (on a GPU in stages 2 and 3, else on the host) or "net", a collective of all ranks. root_only:
    whether only rank 0 does it. loop: whether it is part of every step.
    """

    text: str | dict
    kind: str = "host"
    stages: tuple = ALL
    root_only: bool = False
    loop: bool = True

    def text_in(self, stage):
        return self.text if isinstance(self.text, str) else self.text[stage]


STEP = [
    Work("read the corpus and encode it as tokens", root_only=True, loop=False),
    Work("broadcast of the tokens", "net", RANKS, loop=False),
    Work("initial parameters from the seed", root_only=True, loop=False),
    Work("broadcast of the parameters", "net", RANKS, loop=False),
    Work(dict.fromkeys((0, 2), "batch: B x T tokens") | dict.fromkeys(RANKS, "own rows: B/p x T tokens")),
    Work("divide the batch into micro-batches", stages=(0, 1)),
    Work("sort the tokens for the gradient of the embedding", stages=GPUS),
    Work("copy to static input buffers", "gpu", GPUS),
    Work("forward: losses of the micro-batches, which the threads divide", stages=(0, 1)),
    Work("backward: gradients, added over micro-batches in a fixed order", stages=(0, 1)),
    Work("forward: loss", "gpu", GPUS),
    Work("backward: gradients", "gpu", GPUS),
    Work("all-reduce of the gradients by MPI messages, added in a fixed order", "net", (1,)),
    Work("reduce-scatter of the gradients by NCCL: rank r receives slice r of the sum", "net", (3,)),
    Work("norm, clipping, AdamW", "gpu", (0, 1, 2)),
    Work("norm, clipping, AdamW on the own slice (ZeRO-1)", "gpu", (3,)),
    Work("all-gather of the updated slices by NCCL", "net", (3,)),
    Work("all-gather of losses and signals", "net", RANKS),
    Work("print and log the loss, save checkpoints", root_only=True),
]  # fmt: skip

MODEL = [
    Work("token ids (B, T)"),
    Work("token embedding wte (V, C) + position embedding wpe (T, C)"),
    Work("x (B, T, C)", "data"),
    Work("LayerNorm ln_1", "block"),
    Work("causal attention of H heads: q, k, v from c_attn, softmax(q k' / sqrt(D)) v, c_proj", "block"),
    Work("+ x (residual)", "sum"),
    Work("LayerNorm ln_2", "block"),
    Work("MLP: c_fc, tanh GELU, c_proj", "block"),
    Work("+ x (residual)", "sum"),
    Work("LayerNorm ln_f"),
    Work("lm_head (C, V): logits (B, T, V)"),
    Work("cross-entropy with the next tokens: loss"),
]
TITLES = {
    "architecture": "Figure 1: the architecture of GPT-2, equal in all stages",
    **{f"stage{n}": f"Figure {n + 2}: data flow of {name}" for n, name in enumerate(STAGE_NAMES)},
}


# -- drawing ----------------------------------------------------------------------------------------------------------


@dataclass
class Canvas:
    """The parts of an SVG, and the height used so far."""

    width: float
    y: float = PAD
    parts: list = field(default_factory=list)

    def rectangle(self, x, y, width, height, fill, dashed=False):
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        style = f"fill: {fill}; stroke: var(--soft)"
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5" style="{style}"{dash}/>'
        )

    def text(self, x, y, text, colour="ink", anchor="middle"):
        style = f"font: {FONT}; fill: var(--{colour}); text-anchor: {anchor}"
        self.parts.append(f'<text x="{x:g}" y="{y:g}" style="{style}">{escape(text)}</text>')

    def arrow(self, *points, head=True):
        """A line through the points (x, y), with an arrow head at its end."""
        path = "M" + " L".join(f"{x:g} {y:g}" for x, y in points)
        self.parts.append(f'<path d="{path}" style="fill: none; stroke: var(--soft); stroke-width: 1.5"/>')
        if head:
            (x0, y0), (x, y) = points[-2:]
            dx, dy = (x > x0) - (x < x0), (y > y0) - (y < y0)  # the direction of the last part
            corners = [(x, y), *((x - 7 * dx + side * dy, y - 7 * dy + side * dx) for side in (4, -4))]
            tip = " ".join(f"{x:g},{y:g}" for x, y in corners)
            self.parts.append(f'<polygon points="{tip}" style="fill: var(--soft)"/>')

    def box(self, x, y, width, text, fill):
        """A box with centred lines of text. Returns its height."""
        lines = wrap(text, int((width - PAD) / CHARACTER))
        height = len(lines) * LINE + 2 * PAD
        self.rectangle(x, y, width, height, fill)
        for number, line in enumerate(lines):
            self.text(x + width / 2, y + PAD + LINE * (number + 0.78), line)
        return height

    def legend(self, entries):
        """Rows with a coloured square and a text, below the drawing. entries: [(fill, text)]."""
        for fill, text in entries:
            self.rectangle(PAD, self.y, 14, 14, fill)
            self.text(PAD + 22, self.y + 12, text, "soft", "start")
            self.y += 20

    def svg(self, title):
        size = f'viewBox="0 0 {self.width:g} {self.y + PAD:g}" width="{self.width:g}" height="{self.y + PAD:g}"'
        label = f'<svg role="img" aria-label="{escape(title)}" {size}>'
        return "\n".join([label, f"<title>{escape(title)}</title>", *self.parts, "</svg>"])


def flow(stage):
    """The SVG of the data flow of a stage."""
    lanes = ["rank 0", "ranks 1 to p - 1"] if stage in RANKS else ["one process"]
    canvas = Canvas(2 * PAD + LOOP + len(lanes) * (LANE + GAP) - GAP, y=PAD + LINE)
    left = [PAD + number * (LANE + GAP) for number in range(len(lanes))]
    for x, name in zip(left, lanes, strict=True):
        canvas.text(x + LANE / 2, canvas.y, name, "soft")
    canvas.y += PAD
    rows = [work for work in STEP if stage in work.stages]
    fill_gpu = "var(--gpu)" if stage in GPUS else "var(--host)"
    fills = {"host": "var(--host)", "gpu": fill_gpu, "net": "var(--net)"}
    ends, loop_top = [None] * len(lanes), None  # ends: the bottom of the last box in each lane
    for work in rows:
        text, y = work.text_in(stage), canvas.y
        if work.loop and loop_top is None:
            loop_top = y
        columns = range(1) if work.root_only else range(len(lanes))
        for lane in columns:
            if ends[lane] is not None:
                canvas.arrow((left[lane] + LANE / 2, ends[lane]), (left[lane] + LANE / 2, y))
        if work.kind == "net":
            height = canvas.box(left[0], y, left[-1] + LANE - left[0], text, fills["net"])
        else:
            height = max(canvas.box(left[lane], y, LANE, text, fills[work.kind]) for lane in columns)
        for lane in columns:
            ends[lane] = y + height
        canvas.y = y + height + GAP
    right, bottom = left[-1] + LANE, ends[0] - LINE
    loop_x = right + LOOP - 8
    canvas.arrow((left[0] + LANE, bottom), (loop_x, bottom), (loop_x, loop_top + LINE), (right, loop_top + LINE))
    canvas.text(right, loop_top - 5, "next step", "soft", "end")
    entries = [("var(--host)", "on the CPU")]
    entries += [("var(--gpu)", "on the GPU, in a CUDA graph")] * (stage in GPUS)
    entries += [("var(--net)", "between ranks")] * (stage in RANKS)
    canvas.legend(entries)
    return canvas.svg(TITLES[f"stage{stage}"])


def architecture():
    """The SVG of the model. The rows of kind "block" and "sum" are repeated in every layer."""
    width = LANE + 110
    canvas = Canvas(width + 2 * PAD + 60)
    block_top = skip_from = None
    for number, work in enumerate(MODEL):
        y = canvas.y
        if number:
            canvas.arrow((PAD + width / 2, y - GAP), (PAD + width / 2, y))
        in_block = work.kind in ("block", "sum")
        if in_block and block_top is None:
            block_top, skip_from = y - GAP / 2, y - GAP
        fill = {"block": "var(--gpu)", "sum": "var(--net)", "data": "var(--panel)"}.get(work.kind, "var(--host)")
        height = canvas.box(PAD, y, width, work.text, fill)
        if work.kind == "sum":
            side = PAD + width + 22
            canvas.arrow(
                (PAD + width / 2, skip_from + 4), (side, skip_from + 4), (side, y + height / 2),
                (PAD + width, y + height / 2),
            )  # fmt: skip
            skip_from, block_bottom = y + height, y + height + GAP / 2
        canvas.y = y + height + GAP
    x = PAD + width + 34
    canvas.arrow((x, block_top), (x + 8, block_top), (x + 8, block_bottom), (x, block_bottom), head=False)
    middle = (block_top + block_bottom) / 2
    canvas.parts.append(
        f'<text transform="translate({x + 24:g} {middle:g}) rotate(90)" style="font: {FONT}; fill: var(--soft); '
        f'text-anchor: middle">repeated for n_layer layers</text>'
    )
    canvas.legend([("var(--gpu)", "LayerNorm, attention and MLP of a layer"), ("var(--net)", "residual connections")])
    return canvas.svg(TITLES["architecture"])


def diagrams():
    """{name: SVG} of Figures 1 to 5."""
    return {"architecture": architecture(), **{f"stage{number}": flow(number) for number in ALL}}
