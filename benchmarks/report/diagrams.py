"""Figures 1 to 5 of the paper for this program: the architecture and the data flows of the stages, drawn as SVG.

MODEL describes the architecture, STEP the data flow of all four stages. The layout is computed: each entry is a row.
Each figure has two layouts: one column for the page, also on a phone, and several columns side by side for a projector.
"""

from dataclasses import dataclass, field
from html import escape
from textwrap import wrap

ALL, RANKS, GPUS = (0, 1, 2, 3), (1, 3), (2, 3)  # stages: all, those with many ranks, those on GPUs
LINE, PAD, GAP, LANE, LOOP = 16, 8, 18, 204, 26  # units: line of text, padding, space between rows, lane, loop arrow
CHARACTER = 7.1  # units: width of a character of FONT, on average
WIDE_LANE, WIDE_BOX = 300, 236  # units: a lane of one process and a box of the architecture, on a projector
MARGIN = 84  # units between the columns of the architecture
FONT = "13px system-ui, sans-serif"
HEADING = "600 16px system-ui, sans-serif"
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

    def text(self, x, y, text, colour="ink", anchor="middle", font=FONT):
        style = f"font: {font}; fill: var(--{colour}); text-anchor: {anchor}"
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
        lines = wrap(text, int((width - PAD) / CHARACTER), break_on_hyphens=False)
        height = len(lines) * LINE + 2 * PAD
        self.rectangle(x, y, width, height, fill)
        for number, line in enumerate(lines):
            self.text(x + width / 2, y + PAD + LINE * (number + 0.78), line)
        return height

    def heading(self, title):
        """The title above the drawing."""
        self.text(PAD, self.y + 2 * PAD, title, anchor="start", font=HEADING)
        self.y += 2 * PAD + GAP

    def next_column(self, starts, bottom, gutter, end):
        """An arrow from each x of `starts` at y = bottom; they join, follow the vertical x = gutter and reach `end`."""
        low, (x, y) = bottom + 0.75 * GAP, end
        for start in starts[1:]:
            self.arrow((start, bottom), (start, low), head=False)
        self.arrow((starts[0], bottom), (starts[0], low), (gutter, low), (gutter, y - GAP), (x, y - GAP), (x, y))

    def legend(self, entries, x=PAD):
        """Rows with a coloured square and a text, from self.y on. entries: [(fill, text)]."""
        for fill, text in entries:
            self.rectangle(x, self.y, 14, 14, fill)
            self.text(x + 22, self.y + 12, text, "soft", "start")
            self.y += 20

    def svg(self, title):
        size = f'viewBox="0 0 {self.width:g} {self.y + PAD:g}" width="{self.width:g}" height="{self.y + PAD:g}"'
        label = f'<svg role="img" aria-label="{escape(title)}" {size}>'
        return "\n".join([label, f"<title>{escape(title)}</title>", *self.parts, "</svg>"])


def flow(stage, wide=False):
    """The SVG of the data flow of a stage. wide: two columns with a heading, for a projector."""
    lanes = ["rank 0", "ranks 1 to p - 1"] if stage in RANKS else ["one process"]
    lane = WIDE_LANE if wide and len(lanes) == 1 else LANE
    rows = [work for work in STEP if stage in work.stages]
    columns, width = halves(rows) if wide else [rows], len(lanes) * (lane + GAP) - GAP
    pitch = width + 2 * LOOP  # from column to column
    first = PAD + (LOOP if wide else 0)  # the loop arrow is on the left of two columns, and on the right of one
    canvas = Canvas(2 * PAD + LOOP + pitch * (len(columns) - 1) + width)
    if wide:
        canvas.heading(TITLES[f"stage{stage}"])
    fill_gpu = "var(--gpu)" if stage in GPUS else "var(--host)"
    fills = {"host": "var(--host)", "gpu": fill_gpu, "net": "var(--net)"}
    top, loop_top, bottoms = canvas.y + LINE, None, []
    for number, column in enumerate(columns):
        left = [first + number * pitch + place * (lane + GAP) for place in range(len(lanes))]
        for x, name in zip(left, lanes, strict=True):
            canvas.text(x + lane / 2, top, name, "soft")
        if number:
            starts = [x - pitch + lane / 2 for x in left]
            canvas.next_column(starts, bottoms[-1], left[0] - LOOP, (left[0] + 10, top + PAD + GAP))
        canvas.y = top + PAD + (GAP if number else 0)
        ends = [None] * len(lanes)  # the bottom of the last box in each lane
        for work in column:
            text, y = work.text_in(stage), canvas.y
            if work.loop and loop_top is None:
                loop_top = y
            places = range(1) if work.root_only else range(len(lanes))
            for place in places:
                if ends[place] is not None:
                    canvas.arrow((left[place] + lane / 2, ends[place]), (left[place] + lane / 2, y))
            if work.kind == "net":
                height = canvas.box(left[0], y, width, text, fills["net"])
            else:
                height = max(canvas.box(left[place], y, lane, text, fills[work.kind]) for place in places)
            for place in places:
                ends[place] = y + height
            canvas.y = y + height + GAP
        bottoms.append(ends[0])
    entries = [("var(--host)", "on the CPU")]
    entries += [("var(--gpu)", "on the GPU, in a CUDA graph")] * (stage in GPUS)
    entries += [("var(--net)", "between ranks")] * (stage in RANKS)
    if wide:
        low, x = max(bottoms[0] + 2 * GAP, bottoms[1] + 20 * len(entries) + 3 * GAP), left[0] + 10
        canvas.arrow((x, bottoms[1]), (x, low), (PAD, low), (PAD, loop_top + LINE), (first, loop_top + LINE))
        canvas.text(x + 8, low - 5, "next step", "soft", "start")
        canvas.y = low - GAP - 20 * len(entries)
        canvas.legend(entries, x + 2 * GAP)
        canvas.y = low
    else:
        right, bottom = left[-1] + lane, ends[0] - LINE
        loop_x = right + LOOP - 8
        canvas.arrow((left[0] + lane, bottom), (loop_x, bottom), (loop_x, loop_top + LINE), (right, loop_top + LINE))
        canvas.text(right, loop_top - 5, "next step", "soft", "end")
        canvas.legend(entries)
    return canvas.svg(TITLES[f"stage{stage}"])


def halves(rows):
    """[rows until backward, rows after it]."""
    last = max(number for number, work in enumerate(rows) if str(work.text).startswith("backward"))
    return [rows[: last + 1], rows[last + 1 :]]


def architecture(wide=False):
    """The SVG of the model. The rows of kind "block" and "sum" are repeated in every layer.

    wide: three columns with a heading, for a projector; the second has the rows that are repeated.
    """
    width = WIDE_BOX if wide else LANE + 110
    in_block = [number for number, work in enumerate(MODEL) if work.kind in ("block", "sum")]
    begin, end = in_block[0], in_block[-1] + 1
    columns = [MODEL[:begin], MODEL[begin:end], MODEL[end:]] if wide else [MODEL]
    pitch = width + MARGIN
    canvas = Canvas(2 * PAD + pitch * (len(columns) - 1) + width + (0 if wide else 60))
    if wide:
        canvas.heading(TITLES["architecture"])
    top, bottoms, number = canvas.y + (GAP if wide else 0), [], 0
    for place, column in enumerate(columns):
        left = PAD + place * pitch
        middle = left + width / 2
        if place:
            canvas.next_column([middle - pitch], bottoms[-1], left - 12, (middle, top))
        canvas.y = top
        for work in column:
            y = canvas.y
            if y > top:
                canvas.arrow((middle, y - GAP), (middle, y))
            if number == begin:
                block_top, skip_from = y - GAP / 2, y - GAP
            fill = {"block": "var(--gpu)", "sum": "var(--net)", "data": "var(--panel)"}.get(work.kind, "var(--host)")
            height = canvas.box(left, y, width, work.text, fill)
            if work.kind == "sum":
                right, centre = left + width, y + height / 2
                start = skip_from + 4
                canvas.arrow((middle, start), (right + 22, start), (right + 22, centre), (right, centre))
                skip_from, block_bottom = y + height, y + height + GAP / 2
            canvas.y = y + height + GAP
            number += 1
        bottoms.append(canvas.y - GAP)
        if number == end or len(columns) == 1:
            bracket(canvas, left + width + 34, block_top, block_bottom)
    if wide:
        canvas.y = max(bottoms) - 40
    canvas.legend([("var(--gpu)", "LayerNorm, attention and MLP of a layer"), ("var(--net)", "residual connections")])
    canvas.y = max([canvas.y, *(bottom + GAP for bottom in bottoms)])
    return canvas.svg(TITLES["architecture"])


def bracket(canvas, x, top, bottom):
    """A bracket on the right of the rows that are repeated in every layer."""
    canvas.arrow((x, top), (x + 8, top), (x + 8, bottom), (x, bottom), head=False)
    canvas.parts.append(
        f'<text transform="translate({x + 24:g} {(top + bottom) / 2:g}) rotate(90)" style="font: {FONT}; '
        f'fill: var(--soft); text-anchor: middle">repeated for n_layer layers</text>'
    )


def diagrams(wide=False):
    """{name: SVG} of Figures 1 to 5. wide: for a projector."""
    return {"architecture": architecture(wide), **{f"stage{number}": flow(number, wide) for number in ALL}}
