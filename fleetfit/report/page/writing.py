"""A page as one file of HTML: the template escapes all text, scripts are named by their checksums, nothing is loaded.

The content security policy lets the browser run the two scripts of the file and no other, and load nothing at all, so
that text which got past the escaping could still do nothing.
"""

import base64
import functools
import hashlib
import importlib.metadata
import json
from importlib import resources
from typing import Any

from fleetfit.errors import escape_controls
from fleetfit.report.page.parts import Fold, Page, Part, Plots

PLOTLY = "plotly-basic-4.1.1.min.js"
"""The library of the plots, as its authors build it: the parts for lines, bars and dots."""


def to_html(page: Page) -> str:
    """Return a page as one file of HTML."""
    plotly, script, style = asset(PLOTLY), asset("page.js"), asset("page.css")
    plots = [plot for section in page.sections for part in section.parts for plot in _plots_in(part)]
    nest = {one.name: {"data": one.traces, "layout": one.layout, "height": one.height} for one in plots}
    return _template().render(
        page=page,
        version=importlib.metadata.version("fleetfit"),
        library=PLOTLY.removesuffix(".min.js"),
        plots=for_script(nest),
        plotly=plotly if plots else "",
        script=script,
        style=style,
        policy=policy(plotly, script),
    )


def _plots_in(part: Part) -> list[Any]:
    if isinstance(part, Plots):
        return list(part.plots)
    return [plot for inner in part.parts for plot in _plots_in(inner)] if isinstance(part, Fold) else []


def for_script(value: Any) -> str:
    """Return JSON that may stand in a script element: no text in it can end the element or begin a comment."""
    text = json.dumps(value, allow_nan=False, ensure_ascii=True, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def policy(*scripts: str) -> str:
    """Return the content security policy of a page with these scripts."""
    allowed = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'" for s in scripts)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )


@functools.cache
def asset(name: str) -> str:
    """Return a file of `assets/`."""
    return resources.files("fleetfit.report.page").joinpath("assets", name).read_text(encoding="utf-8")


@functools.cache
def _template() -> Any:
    import jinja2

    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: escape_controls(value.expandtabs(4)) if type(value) is str else value,
    )
    return environment.from_string(asset("page.html"))
