"""The colours of the report for light and dark screens, and SVG text that uses them as variables."""

import re

# {name: (light, dark)}. Text on each of `host`, `gpu`, `net` and `page` has a contrast of 4.5 or more (WCAG AA).
COLOURS = {
    "page": ("#ffffff", "#14171c"),
    "ink": ("#1b1f24", "#e6e8eb"),
    "soft": ("#57606a", "#a3abb5"),  # captions, axes, the paper's curves
    "line": ("#d0d7de", "#3a424d"),
    "panel": ("#f6f8fa", "#1d2229"),
    "host": ("#dbe9ff", "#1f3a5f"),  # work of the CPU
    "gpu": ("#d7f0dc", "#1d4a2d"),  # work of a GPU
    "net": ("#ffe2c2", "#5e3a12"),  # messages between ranks
    "c0": ("#0b62c4", "#6cb2ff"),
    "c1": ("#c2410c", "#ff9d5c"),
    "c2": ("#1a7f37", "#57c777"),
    "c3": ("#8250df", "#c297ff"),
    "c4": ("#9a6700", "#e0b040"),
}
DARK = 1


def variables(theme):
    """The CSS declarations of all colours; theme: 0 light, 1 dark."""
    return "; ".join(f"--{name}: {pair[theme]}" for name, pair in COLOURS.items())


def style_sheet():
    """CSS that defines the colours for light and dark screens. A printed page is light."""
    light, dark = variables(0), variables(DARK)
    return f":root {{ {light} }}\n@media screen and (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n"


def standalone(svg):
    """An inline SVG as a file of its own, with the definitions of its colours and with a background.

    It has no width and height, so a browser shows it as large as the window.
    """
    head, rest = svg.split(">", 1)
    head = re.sub(r' (width|height)="[^"]*"', "", head)
    head = head if "xmlns=" in head else head.replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"', 1)
    background = '<rect width="100%" height="100%" style="fill: var(--page)"/>'
    style = f"{style_sheet()}svg {{ background: var(--page); }}"  # in a window of another shape
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{head}>\n<style>\n{style}\n</style>\n{background}{rest}\n'


def with_variables(svg):
    """Replace each light colour in an SVG by its variable, so that the colour follows the theme of the page."""
    names = {pair[0]: name for name, pair in COLOURS.items()}
    return re.sub(r"#[0-9a-f]{6}\b", lambda found: f"var(--{names[found[0]]})" if found[0] in names else found[0], svg)
