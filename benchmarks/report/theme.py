"""The colours of figures as variables of CSS, for light and dark screens."""

import re

from gpt2core.app.output.theme import COLOURS, DARK, LIGHT


def style_sheet():
    """CSS that defines the colours for light and dark screens. A printed page is light."""
    light, dark = ("; ".join(f"--{name}: {pair[theme]}" for name, pair in COLOURS.items()) for theme in (LIGHT, DARK))
    return f":root {{ {light} }}\n@media screen and (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n"


def standalone(svg):
    """An inline SVG as a file of its own, with the definitions of its colours and with a background."""
    return svg.replace(">", f">\n<style>\n{style_sheet()}svg {{ background: var(--page); }}\n</style>", 1)


def with_variables(svg):
    """Replace each light colour in an SVG by its variable, so that the colour follows the theme of the page."""
    names = {pair[0]: name for name, pair in COLOURS.items()}
    return re.sub(r"#[0-9a-f]{6}\b", lambda found: f"var(--{names[found[0]]})" if found[0] in names else found[0], svg)
