"""The built book and a browser, shared by tests/test_book.py and tests/test_live.py."""

import fcntl
import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
HTML = ROOT / "_build" / "html"
STAMP = ROOT / "_build" / "tested-sources"
CHROMIUM = Path("/usr/bin/chromium")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def sources_digest():
    """A digest of all that the site is built from."""
    digest = hashlib.sha256()
    roots = [ROOT / "book", ROOT / "src" / "course_llm", ROOT / "exercises"]
    paths = [
        path
        for root in roots
        for path in root.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    ]
    for path in sorted([*paths, ROOT / "_config.yml", ROOT / "_toc.yml"]):
        digest.update(str(path.relative_to(ROOT)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def build_if_changed():
    """Builds the book unless it has been built from these sources."""
    digest = sources_digest()
    if not (STAMP.exists() and STAMP.read_text() == digest and (HTML / "index.html").exists()):
        command = [
            str(Path(sys.executable).parent / "jupyter-book"),
            "build",
            ".",
            "-W",
            "-n",
            "--keep-going",
        ]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        if done.returncode:
            lines = (done.stdout + done.stderr).splitlines()
            told = [line for line in lines if re.search("WARNING(?! \\|)|ERROR|Error", line)]
            pytest.fail("the book does not build:\n" + "\n".join(told[-30:] or lines[-30:]), pytrace=False)
        STAMP.write_text(digest)


@pytest.fixture(scope="session")
def site():
    """The folder of the built site; built once, and again only when its sources have changed."""
    pytest.importorskip("jupyter_book", reason="the book's packages are not installed: pip install '.[book]'")
    STAMP.parent.mkdir(exist_ok=True)
    with STAMP.with_suffix(".lock").open("w") as lock:  # one builds, the others wait for it
        fcntl.flock(lock, fcntl.LOCK_EX)
        build_if_changed()
    return HTML


@pytest.fixture(scope="module")
def browser():
    """A headless Chromium; it ends with its module, for its event loop would disturb other tests."""
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed: pip install '.[test]'"
    )
    if not CHROMIUM.exists():
        pytest.skip(f"{CHROMIUM} is missing: apt install chromium")
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=str(CHROMIUM), args=FLAGS)
        yield chromium
        chromium.close()


def site_pages(site):
    """All pages of the site, relative to it."""
    return sorted(
        path.relative_to(site).as_posix() for path in site.rglob("*.html") if "_static" not in path.parts
    )


def chapter_pages(site):
    """The pages with live figures or quizzes: the chapters."""
    return [page for page in site_pages(site) if 'class="quiz"' in (site / page).read_text(encoding="utf-8")]
