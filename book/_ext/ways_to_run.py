"""What a page can be run in: a notebook to download, and services that open it from the repository.

Every chapter becomes a notebook in the built site. Colab, Binder and a JupyterHub (by nbgitpuller) open notebooks of
the repository, so their links need `repository.url`; the hub's needs `course_jupyterhub_url` as well. A chapter's
notebook is not in the main branch, which holds its Markdown: `.github/workflows/pages.yml` puts it into the branch
that `course_notebooks_branch` names.
"""

import re
from pathlib import Path
from urllib.parse import quote, urlencode

import nbformat
import page_notebook
from docutils import nodes

SHEET = re.compile(r"^```\{exercise-sheet\} (\w+)\n```$", re.MULTILINE)
GITHUB = re.compile(r"https://github\.com/([\w.-]+)/([\w.-]+?)(?:\.git)?/?")


def repository(config):
    """The repository's address and branch; the address is empty while the project has none."""
    options = config.html_theme_options
    return (options.get("repository_url") or "").rstrip("/"), options.get("repository_branch") or "main"


def run_links(config, path, branch=None):
    """Names and addresses of the services that open a notebook of the repository.

    Args:
        config: of Sphinx.
        path: the notebook's, in the repository.
        branch: where it is, if not in the branch that the repository's links lead to.
    """
    url, main = repository(config)
    branch = branch or main
    found = GITHUB.fullmatch(url)
    links = []
    if found:
        owner, name = found.groups()
        colab = f"https://colab.research.google.com/github/{owner}/{name}/blob/{branch}/{quote(path)}"
        binder = (
            f"https://mybinder.org/v2/gh/{owner}/{name}/{branch}?{urlencode({'urlpath': f'lab/tree/{path}'})}"
        )
        links = [("Open in Colab", colab), ("Open on Binder", binder)]
    hub = (config.course_jupyterhub_url or "").rstrip("/")
    if url and hub:
        folder = url.removesuffix(".git").rpartition("/")[2]
        query = {"repo": url, "branch": branch, "urlpath": f"lab/tree/{folder}/{path}"}
        links.append(("Open on the JupyterHub", f"{hub}/hub/user-redirect/git-pull?{urlencode(query)}"))
    return links


def notebook_path(app, page):
    """Where a page's notebook is, in the built site and in the branch of notebooks; None for a page without cells."""
    source = page_source(app, page)
    return f"{page}.ipynb" if page_notebook.is_notebook(source) else None


def page_source(app, page):
    path = Path(app.env.doc2path(page))
    return path.read_text(encoding="utf-8") if path.suffix == ".md" else ""


def page_links(app, page):
    """Names and addresses of all ways to run a page; the first leads to a file of the site, if it has no host."""
    if path := notebook_path(app, page):
        services = run_links(app.config, path, app.config.course_notebooks_branch)
        return [("Download as notebook", Path(path).name), *services]
    if sheet := SHEET.search(page_source(app, page)):  # the page itself has the link to download
        return run_links(app.config, f"exercises/{sheet[1]}/{sheet[1]}.ipynb")
    return []


def add_links(app, doctree, page):
    """Puts the ways to run a page under its title."""
    titles = [title for title in doctree.findall(nodes.title) if isinstance(title.parent, nodes.section)]
    links = page_links(app, page) if app.builder.name in ("html", "dirhtml") and titles else []
    if not links:
        return
    line = nodes.paragraph("", classes=["run-links"])
    for number, (words, address) in enumerate(links):
        line += nodes.Text(" · " if number else "")
        line += nodes.reference("", words, refuri=address, internal="://" not in address)
    section = titles[0].parent
    section.insert(section.index(titles[0]) + 1, line)


def write_notebooks(app, error):
    """Writes the pages' notebooks beside the pages."""
    if error is not None or app.builder.name != "html":
        return
    url = repository(app.config)[0]
    setup = ""
    if url:
        from autograder.sync import COLAB

        setup = COLAB.format(url=url).rstrip("\n")
    for page in sorted(app.env.found_docs):
        if path := notebook_path(app, page):
            chapter = ".".join(map(str, app.env.toc_secnumbers.get(page, {}).get("", ())))
            source = app.env.doc2path(page)
            notebook = page_notebook.notebook_of(source, app.config.html_baseurl, setup, chapter)
            nbformat.write(notebook, Path(app.outdir, path))


def setup(app):
    app.add_config_value("course_jupyterhub_url", "", "html")
    app.add_config_value("course_notebooks_branch", "notebooks", "html")
    app.connect("doctree-resolved", add_links)
    app.connect("build-finished", write_notebooks)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
