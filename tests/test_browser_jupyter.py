"""A student in JupyterLab and an instructor in the formgrader, in a real browser on this machine."""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from autograder import catalog
from samples.build import answers, sample_class
from tests.book_site import browser  # noqa: F401
from tests.conftest import ROOT
from tests.test_nbgrader import command, entries

STEM = "decoding"
PROGRAMS = Path(sys.executable).parent
PATIENCE_MS = 240_000
DROPS_CROSSING = """\
def top_p_filter(probs, p):
    if not 0 < p <= 1:
        raise ValueError("p must lie in (0, 1]")
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    kept = torch.where(ordered.cumsum(-1) <= p, ordered, 0)
    kept = torch.zeros_like(probs).scatter(-1, order, kept)
    return kept / kept.sum(-1, keepdim=True)
"""
UNKNOWN_MISTAKE = "def top_p_filter(probs, p):\n    return probs\n"
CONTRAST = """cell => {
    const numbers = color => color.match(/[\\d.]+/g).map(Number);
    const light = ([r, g, b]) => [r, g, b].map(v => v / 255)
        .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
        .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
    let behind = cell, back = [0, 0, 0, 0];
    while (behind && back.length === 4 && back[3] === 0) {
        back = numbers(getComputedStyle(behind).backgroundColor);
        behind = behind.parentElement;
    }
    const [a, b] = [light(numbers(getComputedStyle(cell).color)), light(back)].sort((x, y) => y - x);
    return [(a + 0.05) / (b + 0.05), light(back)];
}"""


@contextlib.contextmanager
def jupyter(folder: Path, home: Path, **settings: dict) -> Iterator[str]:
    """A JupyterLab server on the loopback address with nbgrader's extensions; yields its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for name, value in settings.items():
        write_setting(home, name, value)
    command = [PROGRAMS / "jupyter-lab", "--no-browser", "--allow-root", "--ip=127.0.0.1", f"--port={port}",
               "--ServerApp.port_retries=0", "--IdentityProvider.token=", "--ServerApp.password="]  # fmt: skip
    env = os.environ | {
        "HOME": str(home),
        "JUPYTERLAB_SETTINGS_DIR": str(home / "settings"),
        "OMP_NUM_THREADS": "1",
    }
    address = f"http://127.0.0.1:{port}"
    with open(home / "log", "w") as log:
        server = subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + PATIENCE_MS / 1000
        while not answers_at(f"{address}/api/status"):
            assert server.poll() is None and time.monotonic() < deadline, (home / "log").read_text()[-3000:]
            time.sleep(0.3)
        yield address
    finally:
        server.terminate()
        server.wait(60)


def answers_at(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=5):
            return True
    except OSError:
        return False


def write_setting(home: Path, name: str, value: dict) -> None:
    path = (
        home / "settings" / "@jupyterlab" / f"{name.replace('__', '/').replace('_', '-')}.jupyterlab-settings"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


QUIET = {
    "notebook_extension__tracker": {"windowingMode": "none"},  # all cells stand in the page
    "apputils_extension__notification": {"fetchNews": "false", "checkForUpdates": False},
}


class Notebook:
    """A notebook in JupyterLab, used with mouse and keyboard."""

    def __init__(self, page, address: str):
        self.page = page
        page.goto(address, wait_until="domcontentloaded")
        page.locator(".jp-Notebook .jp-CodeCell").nth(3).wait_for(timeout=PATIENCE_MS)
        page.locator('.jp-Notebook-ExecutionIndicator[data-status="idle"]').wait_for(timeout=PATIENCE_MS)

    def run(self, words: str, source: str | None = None):
        """Runs the cell that holds these words, with another source if one is given, and waits for its end."""
        cell = self.page.locator(".jp-Notebook .jp-CodeCell").filter(has_text=words).first
        prompt = cell.locator(".jp-InputArea-prompt")
        before = prompt.inner_text()
        cell.locator(".cm-content").click()
        if source is not None:
            self.page.keyboard.press("Control+a")
            self.page.keyboard.insert_text(source)
        deadline = time.monotonic() + PATIENCE_MS / 1000
        while (now := prompt.inner_text()) in (before, "[*]:"):
            assert time.monotonic() < deadline, f"the cell does not end: {cell.inner_text()}"
            if now == before:  # JupyterLab takes no order while it connects to the kernel
                self.page.keyboard.press("Control+Enter")
            self.page.wait_for_timeout(500)
        return cell


def test_a_student_gets_top_p_wrong_and_then_right_in_jupyterlab(browser, tmp_path):  # noqa: F811
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    shutil.copytree(ROOT / "exercises" / STEM, work / "exercises" / STEM)
    hints = catalog.chapter(STEM).entry("top_p_filter").hints
    with jupyter(work, home, **QUIET) as address:
        page = browser.new_page(viewport={"width": 1200, "height": 1000})
        notebook = Notebook(page, f"{address}/lab/tree/exercises/{STEM}/{STEM}.ipynb")
        notebook.run("from autograder.check import check")

        blank = notebook.run('check("top_p_filter")').inner_text()
        assert "top_p_filter is not defined: run the cell with your answer first" in blank

        notebook.run("def top_p_filter", DROPS_CROSSING)
        wrong = notebook.run('check("top_p_filter")')
        told = wrong.inner_text()
        assert wrong.locator("table tr").count() > 3
        assert "✗ failed" in told and "✓ passed" in told
        assert "The token that crosses p is dropped" in told and f"{STEM}.html#top-p" in told
        assert "The first case that fails" in told and "top_p_filter(probs=float32 (4,), p=0.7)" in told
        assert "CheckFailed: top_p_filter fails" in told and "Traceback" not in told
        assert "Hint" not in told  # the mistake is known
        contrast, behind = wrong.locator("td").first.evaluate(CONTRAST)
        assert contrast > 4.5 and behind > 0.5

        notebook.run("def top_p_filter", UNKNOWN_MISTAKE)
        first = notebook.run('check("top_p_filter")').inner_text()
        again = notebook.run('check("top_p_filter")').inner_text()
        assert hints[0].split("`")[0] in first and hints[1].split("`")[0].split("*")[0] not in first
        assert hints[1].split("`")[0].split("*")[0] in again

        notebook.run("def top_p_filter", answers(STEM)["top_p_filter"])
        right = notebook.run('check("top_p_filter")').inner_text()
        assert "✗" not in right and right.count("✓ passed") == wrong_rows(told)
        assert "Hint" not in right and "CheckFailed" not in right
        page.keyboard.press("Control+s")
        page.wait_for_function("() => !document.querySelector('.jp-mod-dirty')", timeout=PATIENCE_MS)
        saved = json.loads((work / "exercises" / STEM / f"{STEM}.ipynb").read_text())
        assert answers(STEM)["top_p_filter"].strip() in ["".join(c["source"]).strip() for c in saved["cells"]]

        write_setting(home, "apputils_extension__themes", {"theme": "JupyterLab Dark"})
        page.reload(wait_until="domcontentloaded")
        cell = page.locator(".jp-Notebook td").first
        cell.wait_for(timeout=PATIENCE_MS)
        page.wait_for_function("() => document.body.dataset.jpThemeLight === 'false'", timeout=PATIENCE_MS)
        page.wait_for_timeout(1000)
        contrast, behind = cell.evaluate(CONTRAST)
        assert contrast > 4.5 and behind < 0.2
        page.close()


def wrong_rows(told: str) -> int:
    return told.count("✗ failed") + told.count("✓ passed")


def pressed(page, link) -> str:
    """Clicks a button of the formgrader, waits for the dialog that says that it worked, and closes it."""
    link.click(timeout=PATIENCE_MS)
    told = page.locator(".modal-dialog", has_text="Success").last
    told.wait_for(timeout=PATIENCE_MS)
    words = told.inner_text()
    told.locator("button.btn-primary, button.close").last.click()
    page.locator(".modal-backdrop").last.wait_for(state="detached", timeout=PATIENCE_MS)
    return words


def test_an_instructor_autogrades_in_the_formgrader_and_gets_the_grades_of_the_command(browser, tmp_path):  # noqa: F811
    students = ("ada", "emil", "ines", "jun", "liam", "mona", "quin")
    notebooks = sample_class(STEM)
    for place in ("clicked", "typed"):
        command("release", STEM, "--course", tmp_path / place)
        for student in students:
            folder = tmp_path / place / "submitted" / student / STEM
            folder.mkdir(parents=True)
            found = notebooks[student]
            (folder / f"{STEM}.ipynb").write_text(found if isinstance(found, str) else json.dumps(found))
    command("grade", STEM, tmp_path / "typed" / "submitted", "--course", tmp_path / "typed")

    home = tmp_path / "home"
    home.mkdir()
    with jupyter(tmp_path / "clicked", home) as address:
        page = browser.new_page(viewport={"width": 1200, "height": 900})
        page.goto(f"{address}/formgrader/manage_submissions/{STEM}", wait_until="domcontentloaded")
        for student in students:
            row = page.locator("tr").filter(has=page.locator("td.student-id", has_text=student))
            assert student in pressed(page, row.locator("td.autograde a"))
        page.close()
    clicked, typed = entries(tmp_path / "clicked"), entries(tmp_path / "typed")
    assert clicked == typed
    assert clicked["ada"]["score"][0] == catalog.chapter(STEM).points > clicked["emil"]["score"][0] > 0
