"""Makes an SVG element for an HTML page of what is drawn on one pair of axes. Decides nothing about what is drawn.

Colours are names of the page's CSS variables (`ink`, `s0` to `s7` for numbers in order, `c0` to `c7` for words), so
that one figure serves light, dark and paper. Every text is a text: nothing in it is mathematics or markup.
"""

from __future__ import annotations

import io
import logging
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from orchestrator.trial import shown

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NUM_SHADES = 8
_NAMES = ("ink", "faint", *(f"{kind}{index}" for kind in "sc" for index in range(NUM_SHADES)))
HEX = {name: f"#0101{place:02x}" for place, name in enumerate(_NAMES)}  # stand for CSS variables while we draw
_NAME_OF = {code: name for name, code in HEX.items()}

WIDTH = 4.8  # inches of 72 CSS pixels
_NO_XML = re.compile("[^\t\n\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_DRAWN: Any = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.size": 10.0,
    "text.color": HEX["ink"],
    "axes.labelcolor": HEX["ink"],
    "xtick.labelcolor": HEX["ink"],
    "ytick.labelcolor": HEX["ink"],
    "axes.edgecolor": HEX["faint"],
    "xtick.color": HEX["faint"],
    "ytick.color": HEX["faint"],
    "grid.color": HEX["faint"],
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.unicode_minus": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.8,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
}


def label(text: str, length: int) -> str:
    """One line of at most `length` characters that an SVG can hold; of a longer text both ends."""
    some = text if len(text) <= 8 * length else text[: 4 * length] + text[-4 * length :]
    line = _NO_XML.sub("\ufffd", shown(" ".join(some.split())))
    num_last = (length - 1) // 2
    return line if len(line) <= length else f"{line[: length - 1 - num_last]}…{line[-num_last:]}"


def svg(draw: Callable[[Axes], None], height: float, about: str) -> str:
    """What `draw` leaves on one pair of axes. The same input gives the same text, whatever the user's matplotlibrc."""
    with _silent("matplotlib"):  # that a font cache is being built helps nobody here
        return _inlined(_document(draw, height, about), about)


@contextmanager
def _silent(library: str) -> Iterator[None]:
    """Nothing but errors from the library's logger."""
    logger = logging.getLogger(library)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _document(draw: Callable[[Axes], None], height: float, about: str) -> str:
    import matplotlib
    from matplotlib.figure import Figure

    written = io.StringIO()
    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # the reader's browser has it, or has it not
        matplotlib.rcdefaults()
        matplotlib.rcParams.update({**_DRAWN, "svg.hashsalt": about})
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        axes = figure.subplots()
        axes.set_autoscale_on(False)  # it computes with values far outside of what is shown
        draw(axes)
        _plain_ticks(axes)
        figure.savefig(written, format="svg", metadata={"Date": None})
    return written.getvalue()


def _plain_ticks(axes: Axes) -> None:
    """Few ticks, and numbers as people write them: `0.001`, `1e-05`."""
    from matplotlib.ticker import (
        FixedLocator,
        FuncFormatter,
        LogLocator,
        MaxNLocator,
        NullFormatter,
        SymmetricalLogLocator,
    )

    for axis in (axes.xaxis, axes.yaxis):
        locator = axis.get_major_locator()
        if isinstance(locator, FixedLocator):  # these were named
            continue
        if isinstance(locator, LogLocator | SymmetricalLogLocator):
            locator.set_params(numticks=6)
        else:
            axis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.6g}"))
        axis.set_minor_formatter(NullFormatter())


def _inlined(document: str, about: str) -> str:
    """An SVG document as an element of an HTML page: our colours, the page's font, no rule or name that leaks out."""
    root = ElementTree.fromstring(document)
    used = set(re.findall(r"(?:url\(#|href=\"#)([^)\"]+)", document))
    for parent in root.iter():
        parent.tag = parent.tag.rpartition("}")[2]
        for child in list(parent):
            if child.tag.rpartition("}")[2] in ("metadata", "style"):
                parent.remove(child)
        for name, value in list(parent.attrib.items()):
            del parent.attrib[name]
            if name != "id" or value in used:
                parent.set(name.rpartition("}")[2], _attribute(name, value))
        parent.tail = None
    _, _, width, height = root.attrib["viewBox"].split()
    root.attrib.clear()
    root.attrib |= {"viewBox": f"0 0 {width} {height}", "role": "img", "aria-label": label(about, 200)}
    return ElementTree.tostring(root, encoding="unicode")


def _attribute(name: str, value: str) -> str:
    if name == "style":
        value = re.sub(r"#0101[0-9a-f]{2}", lambda found: f"var(--{_NAME_OF[found[0]]})", value)
        return re.sub(r" ?font-family: [^;]*;?", "", value)
    if name in ("d", "x", "y", "transform", "width", "height"):
        return re.sub(r"-?\d+\.\d+", lambda found: f"{float(found[0]):.1f}".removesuffix(".0"), value).replace("\n", "")
    return value
