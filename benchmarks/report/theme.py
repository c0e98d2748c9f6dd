"""The colours of figures as variables of CSS, for light and dark screens."""

import re

from gpt2core.app.output.theme import COLOURS, DARK, LIGHT


def variables(theme):
    """The CSS declarations of all colours; theme: LIGHT or DARK."""
    return "; ".join(f"--{name}: {pair[theme]}" for name, pair in COLOURS.items())


def style_sheet():
    """CSS that defines the colours for light and dark screens. A printed page is light."""
    light, dark = variables(LIGHT), variables(DARK)
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
