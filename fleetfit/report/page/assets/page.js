"use strict";
// Draws the plots of the page in the colors of its scheme, again when the scheme changes, and narrower for printing.
(() => {
  const plots = JSON.parse(document.getElementById("plots").textContent);
  const root = document.documentElement;
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const touched = window.matchMedia("(pointer: coarse)").matches;
  const PRINTED = 330;

  const variable = (name) => getComputedStyle(root).getPropertyValue(name).trim();

  // "@2" is the third color of the scheme, "@2/0.15" the same and nearly transparent.
  function color(text) {
    const [name, opacity] = text.slice(1).split("/");
    const hex = variable("--c" + name);
    if (opacity === undefined) return hex;
    const [r, g, b] = [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
    return `rgba(${r},${g},${b},${opacity})`;
  }

  function painted(value, key) {
    if (Array.isArray(value)) return value.map((inner) => painted(inner, ""));
    if (value !== null && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([name, inner]) => [name, painted(inner, name)]));
    }
    return typeof value === "string" && /color$/i.test(key) && value.startsWith("@") ? color(value) : value;
  }

  function axis(own) {
    const grid = variable("--grid");
    return { gridcolor: grid, linecolor: variable("--line"), zerolinecolor: grid, automargin: true, ...own };
  }

  function layout(plot, width) {
    const small = (width || 1000) < 420;
    const own = painted(plot.layout, "");
    return {
      ...own,
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: "system-ui, sans-serif", size: small ? 11 : 12, color: variable("--ink") },
      margin: { l: 52, r: 12, t: 26, b: 44 },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: variable("--quiet"), activecolor: variable("--ink") },
      xaxis: axis(own.xaxis),
      yaxis: axis(own.yaxis),
      legend: { orientation: "h", x: 0, xanchor: "left", y: 0, yanchor: "bottom", yref: "container", traceorder: "normal", bgcolor: "rgba(0,0,0,0)" },
      hoverlabel: { namelength: -1, bgcolor: variable("--soft"), bordercolor: variable("--line"), font: { color: variable("--ink") } },
      hovermode: "closest",
      dragmode: touched ? false : "zoom",
      showlegend: plot.data.filter((trace) => trace.showlegend !== false).length > 1,
      height: plot.height,
      ...(width ? { width: width } : { autosize: true }),
    };
  }

  const settings = {
    displaylogo: false,
    responsive: true,
    displayModeBar: "hover",
    // Named one by one: the usual bar has a button that sends the data to a server.
    modeBarButtons: [["zoom2d", "pan2d", "resetScale2d", "toImage"]],
    plotlyServerURL: "",
    toImageButtonOptions: { format: "svg" },
  };

  function draw(place, width) {
    const plot = plots[place.dataset.plot];
    return Plotly.react(place, painted(plot.data, ""), layout(plot, width), settings);
  }

  const places = [...document.querySelectorAll("[data-plot]")];
  const all = (width) => Promise.all(places.map((place) => draw(place, width)));

  // What is in sight first, and the rest one by one, so that a page with many plots can be read at once.
  async function begin() {
    for (const place of places) {
      await draw(place);
      await new Promise((done) => setTimeout(done, 0));
    }
    root.dataset.drawn = String(places.length);
  }

  dark.addEventListener("change", () => all());
  window.addEventListener("beforeprint", () => {
    root.classList.add("printing");
    all(PRINTED);
  });
  window.addEventListener("afterprint", () => {
    root.classList.remove("printing");
    all();
  });
  document.querySelectorAll("details").forEach((one) => one.addEventListener("toggle", () => {
    one.querySelectorAll("[data-plot]").forEach((place) => draw(place));
  }));
  begin();
})();
