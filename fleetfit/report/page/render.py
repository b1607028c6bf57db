"""Render a page as one HTML file. The template escapes all text, and scripts are allowed by checksum.

The content security policy allows only the two scripts of the file, and no loading. So text that evades the escaping
has no effect.
"""

import base64
import functools
import hashlib
import importlib.metadata
import json
from importlib import resources
from typing import Any

from fleetfit.errors import escape_controls
from fleetfit.report.page.blocks import Block, Fold, Page, Plot, Plots

PLOTLY = "plotly-basic-4.1.1.min.js"
"""The library for plots, in its authors' build with lines, bars and dots."""


def to_html(page: Page) -> str:
    """Return a page as one file of HTML."""
    plotly, script, style = read_asset(PLOTLY), read_asset("page.js"), read_asset("page.css")
    plots = [plot for section in page.sections for block in section.blocks for plot in _list_plots(block)]
    data = {plot.name: {"data": plot.traces, "layout": plot.layout, "height": plot.height} for plot in plots}
    return _load_template().render(
        page=page,
        version=importlib.metadata.version("fleetfit"),
        library=PLOTLY.removesuffix(".min.js"),
        plots=dump_for_script(data),
        plotly=plotly if plots else "",
        script=script,
        style=style,
        policy=make_policy(plotly, script),
    )


def _list_plots(block: Block) -> list[Plot]:
    if isinstance(block, Plots):
        return list(block.plots)
    return [plot for inner in block.blocks for plot in _list_plots(inner)] if isinstance(block, Fold) else []


def dump_for_script(value: Any) -> str:
    """Return JSON for a script element, escaped so that text cannot end the element or begin a comment."""
    text = json.dumps(value, allow_nan=False, ensure_ascii=True, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def make_policy(*scripts: str) -> str:
    """Return the content security policy of a page with these scripts."""
    hashes = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'" for s in scripts)
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )


@functools.cache
def read_asset(name: str) -> str:
    """Return a file of `assets/`."""
    return resources.files("fleetfit.report.page").joinpath("assets", name).read_text(encoding="utf-8")


@functools.cache
def _load_template() -> Any:
    import jinja2

    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: escape_controls(value.expandtabs(4)) if type(value) is str else value,
    )
    return environment.from_string(read_asset("page.html"))
