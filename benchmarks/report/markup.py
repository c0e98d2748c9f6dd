"""HTML of the report's elements. Texts are escaped; Markup is text that is HTML already."""

from html import escape


class Markup(str):
    """Text that is HTML already."""


def text_of(content):
    """`content` as HTML."""
    return content if isinstance(content, Markup) else Markup(escape(str(content)))


def element(tag, *contents, **attributes):
    """<tag ...>contents</tag>; in the names of attributes "_" stands for "-", and "class_" for "class"."""
    names = {name: name.rstrip("_").replace("_", "-") for name in attributes}
    words = "".join(f' {names[name]}="{escape(str(value))}"' for name, value in attributes.items())
    return Markup(f"<{tag}{words}>" + "".join(map(text_of, contents)) + f"</{tag}>")


def paragraph(*contents):
    return element("p", *contents)


def section(identifier, title, *contents):
    """A section with a heading, to which the table of contents links."""
    return element("section", element("h2", title), *contents, id=identifier)


def figure(svg, caption, **attributes):
    """A picture with its caption below. svg: inline SVG with an aria-label."""
    return element("figure", Markup(svg), element("figcaption", caption), **attributes)


def table(caption, rows, grey=(), cards=True):
    """A table; rows: dictionaries {column title: cell} with equal keys. grey: indices of rows that were not measured.

    Cells of the first column are row headings. On a narrow screen, with `cards`, each row is shown as a list of its
    cells; a table without `cards` scrolls inside its own frame.
    """
    header = list(rows[0])
    titles = {title: title if len(header) > 2 else "" for title in header}  # shown in front of a cell of a list
    head = element("tr", *(element("th", title, scope="col") for title in header))
    lines = []
    for number, row in enumerate(rows):
        first, *rest = row.items()
        cells = [
            element("th", first[1], scope="row"),
            *(element("td", cell, data_title=titles[title]) for title, cell in rest),
        ]
        lines.append(element("tr", *cells, **({"class_": "grey"} if number in grey else {})))
    caption_text = element("caption", element("span", caption))
    whole = element("table", caption_text, element("thead", head), element("tbody", *lines))
    return element(
        "div", whole, class_="scroll cards" if cards else "scroll", tabindex="0", role="region", aria_label=caption
    )


def listing(pairs):
    """A list of (term, text)."""
    return element("dl", *(part for term, text in pairs for part in (element("dt", term), element("dd", text))))


def details(summary, *contents):
    return element("details", element("summary", summary), *contents)


def seconds(value):
    """A time as text with three significant digits: 95.2 s, 1.87 s, 16.7 ms."""
    if value >= 100:
        return f"{value:,.0f} s"
    return f"{value:#.3g} s" if value >= 0.1 else f"{1e3 * value:#.3g} ms"


def amount(count):
    """Bytes as text: 40 B, 43.6 MB."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"


def times_as_fast(slow, fast):
    """The ratio of two times as text."""
    ratio = slow / fast
    return f"{ratio:,.0f}" if ratio >= 100 else f"{ratio:.3g}"
