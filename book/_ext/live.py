"""Directive `live`: a live figure on a page, alive without kernel and without network.

The JavaScript file that is the widget's module in a notebook is put into the page, once, with a small model that
holds the state. Without script the reader sees the words of `:alt:`.
"""

import html
import json
from pathlib import Path
from typing import ClassVar

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.util.docutils import SphinxDirective

from course_llm import live

# What a module needs of anywidget's model: get, set, on, off, save_changes. Names of events may be separated by spaces.
_MOUNT = """
const model = (state) => {
  const heard = {};
  const each = (names, f) => names.split(/\\s+/).forEach(f);
  const tell = (name) => [...(heard[name] ?? [])].forEach((f) => f());
  return {
    get: (key) => state[key],
    set: (key, value) => {
      if (JSON.stringify(state[key]) === JSON.stringify(value)) return;
      state[key] = value;
      tell(`change:${key}`);
      tell("change");
    },
    on: (names, f) => each(names, (name) => (heard[name] ??= []).push(f)),
    off: (names, f) => each(names, (name) => (heard[name] = (heard[name] ?? []).filter((g) => f && g !== f))),
    save_changes: () => {},
  };
};
for (const el of document.querySelectorAll(`[data-live="${name}"]`)) {
  const words = [...el.childNodes];
  el.replaceChildren();
  try {
    figure.render({ model: model(JSON.parse(el.dataset.state)), el });
    // the corner of a table is no header
    el.querySelectorAll("th:empty").forEach((th) => th.replaceWith(document.createElement("td")));
    el.querySelectorAll("label").forEach((label) => {
      // an output inside a label takes the label from the control
      const control = label.querySelector("input, select, textarea");
      if (!control || label.control === control) return;
      control.id ||= `live-${name}-${Math.random().toString(36).slice(2)}`;
      label.htmlFor = control.id;
    });
  } catch (error) {
    el.replaceChildren(...words);
    throw error;
  }
}
"""


class live_figure(nodes.General, nodes.Element):
    """A live figure; its child is the paragraph of words for readers without script."""


class Live(SphinxDirective):
    required_arguments = 1
    option_spec: ClassVar = {
        "alt": directives.unchanged_required,
        "state": directives.unchanged,
        "height": directives.unchanged,
    }

    def run(self):
        name = self.arguments[0]
        try:
            state = live.defaults(name)
            given = json.loads(self.options.get("state", "{}"))
        except ValueError as error:
            raise self.error(f"live: {error}") from error
        if unknown := set(given) - set(state):
            raise self.error(f"live {name}: the figure has no state {', '.join(sorted(unknown))}")
        if not self.options.get("alt", "").strip():
            raise self.error(f"live {name}: say in :alt: what the figure shows")
        for path in (Path(live.__file__).parent / f"{name}.js", Path(live.__file__)):
            self.env.note_dependency(str(path))
        alt = " ".join(self.options["alt"].split())
        node = live_figure(
            "", figure=name, state=json.dumps({**state, **given}), height=self.options.get("height", "")
        )
        node["alt"] = alt
        node += nodes.paragraph("", alt)
        self.set_source_info(node)
        return [node]


def script(name):
    """Returns the script element that brings every figure of that name on the page to life."""
    source = live.source(name)
    if source.count("\nexport default ") != 1 or "</script" in source or "\nimport " in source:
        raise ValueError(
            f"{name}.js needs one `export default` at the start of a line, no import and no script tag"
        )
    body = source.replace("\nexport default ", "\nreturn ")
    return (
        f'<script type="module">\nconst name = {json.dumps(name)};\nconst figure = (() => {{\n{body}\n}})();'
        f"{_MOUNT}</script>\n"
    )


def visit_html(self, node):
    height = f' style="min-height:{html.escape(node["height"])}"' if node["height"] else ""
    self.body.append(
        f'<div class="live-figure" role="group" aria-label="Live figure: {html.escape(node["figure"].replace("_", " "))}" '
        f'data-live="{node["figure"]}" data-state="{html.escape(node["state"])}"{height}>\n'
    )


def depart_html(self, node):
    self.body.append("</div>\n")
    seen = self.__dict__.setdefault("_live_seen", set())  # one visitor serves one page
    if node["figure"] not in seen:
        seen.add(node["figure"])
        self.body.append(script(node["figure"]))


def ignore(self, node):
    """Other builders show the words alone."""


def write_style_sheet(app):
    if app.builder.format == "html":
        folder = Path(app.outdir, "_static")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "live.css").write_text(live.style_sheet(), encoding="utf-8")


def setup(app):
    app.add_node(
        live_figure,
        html=(visit_html, depart_html),
        latex=(ignore, ignore),
        text=(ignore, ignore),
        man=(ignore, ignore),
        texinfo=(ignore, ignore),
    )
    app.add_directive("live", Live)
    app.connect("builder-inited", write_style_sheet)
    app.add_css_file("live.css")
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
