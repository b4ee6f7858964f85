"""Runs Lighthouse over the built site, on a simulated desktop and a simulated phone, and says which page falls short.

The pages come gzipped from a local server, as from any web host. A page whose performance falls short is measured two
more times and judged by the median, for other work on the machine slows a run down and nothing speeds it up.
"""

import argparse
import functools
import gzip
import http.server
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "lighthouse@12.2.3"
FOLDER = ROOT / "_build" / "node"
COMMAND = FOLDER / "node_modules" / ".bin" / "lighthouse"
CATEGORIES = ("performance", "accessibility", "best-practices", "seo")
BARS = {
    "desktop": {"performance": 0.98, "accessibility": 1, "best-practices": 1, "seo": 1},
    "mobile": {"performance": 0.90, "accessibility": 1, "best-practices": 1, "seo": 1},
}
LIMIT_SHIFT = 0.005  # zero to two decimals; up to 0.1 counts as good
LIMIT_BYTES = 600_000  # of a page's first load, compressed
TIMINGS = {
    "first paint": "first-contentful-paint",
    "largest paint": "largest-contentful-paint",
    "blocked": "total-blocking-time",
    "speed index": "speed-index",
}
TEXT = {".html", ".css", ".js", ".svg", ".json", ".ipynb", ".txt", ".xml"}


class GzipHandler(http.server.SimpleHTTPRequestHandler):
    """Serves a folder with compressed text over connections that stay open, as a web host does."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        """Says nothing."""

    def do_GET(self):
        path = Path(self.translate_path(self.path))
        if path.is_dir():
            path = path / "index.html"
        found = path.is_file()
        if not found:
            path = Path(self.directory) / "404.html"
        body, encoding = compressed(path, path.stat().st_mtime_ns) if path.is_file() else (b"", None)
        self.send_response(200 if found else 404)
        self.send_header("Content-Type", self.guess_type(str(path)))
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "max-age=31536000" if "_static" in path.parts else "max-age=600")
        if encoding:
            self.send_header("Content-Encoding", encoding)
        self.end_headers()
        self.wfile.write(body)


@functools.cache
def compressed(path, changed):
    """A file's bytes as they are sent, and their encoding."""
    body = path.read_bytes()
    return (gzip.compress(body, 6), "gzip") if path.suffix in TEXT else (body, None)


def serve(folder):
    """Starts a server of the folder on a free port; returns it with its address."""
    handler = functools.partial(GzipHandler, directory=str(folder))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.handle_error = lambda *_: None  # a browser that leaves a page breaks its connections
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server, f"http://127.0.0.1:{server.server_address[1]}/"


def install():
    """Installs Lighthouse from npm, once, into an ignored folder."""
    installed = FOLDER / "node_modules" / "lighthouse" / "package.json"
    wanted = PACKAGE.rpartition("@")[2]
    if installed.exists() and json.loads(installed.read_text())["version"] == wanted and COMMAND.exists():
        return
    if shutil.which("npm") is None:
        sys.exit("npm is missing. Install it: apt-get install npm (Node 18 or newer)")
    FOLDER.mkdir(parents=True, exist_ok=True)
    print(f"Installing {PACKAGE} into {FOLDER.relative_to(ROOT)}", file=sys.stderr)
    command = ["npm", "install", "--silent", "--no-audit", "--no-fund", "--no-package-lock"]
    command += ["--ignore-scripts", "--prefix", str(FOLDER), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"npm could not install {PACKAGE}: {done.stderr.strip() or done.stdout.strip()}")


def browser():
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if found := shutil.which(name):
            return found
    sys.exit("Chromium is missing. Run: make browser")


def audit(address, device, categories):
    """Lighthouse's report of one run over one address."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        command = [str(COMMAND), address, "--quiet", "--output=json", f"--output-path={report}"]
        command += [f"--only-categories={','.join(categories)}", "--chrome-flags=--headless=new --no-sandbox"]
        command += ["--preset=desktop"] if device == "desktop" else []
        environment = os.environ | {"CHROME_PATH": browser(), "TMPDIR": folder}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180)
        if not report.exists():
            sys.exit(f"Lighthouse gave no report of {address}: {done.stderr.strip()[-500:]}")
        found = json.loads(report.read_text(encoding="utf-8"))
    if error := found.get("runtimeError"):
        sys.exit(f"Lighthouse could not load {address}: {error['message']}")
    return found


def measured(report):
    """The numbers of one report: scores, layout shift, bytes, times in milliseconds, and the audits that failed."""
    audits, categories = report["audits"], report["categories"]
    row = {name: category["score"] for name, category in categories.items()}
    failed = {
        ref["id"]
        for name, category in categories.items()
        if name != "performance"
        for ref in category["auditRefs"]
        if ref["weight"] and (audits[ref["id"]]["score"] or 0) < 1 and applies(audits[ref["id"]])
    }
    if "performance" in categories:
        row["layout_shift"] = audits["cumulative-layout-shift"]["numericValue"]
        row["transfer_bytes"] = int(audits["total-byte-weight"]["numericValue"])
        row["times_ms"] = {words: round(audits[key]["numericValue"]) for words, key in TIMINGS.items()}
    row["failed"] = sorted(failed)
    return row


def applies(audit):
    return audit["scoreDisplayMode"] not in ("notApplicable", "informative", "manual", "error")


def page_row(address, device, categories):
    """A page's numbers on a device; a performance that falls short is measured again."""
    rows = [measured(audit(address, device, categories))]
    bar = BARS[device]["performance"]
    while "performance" in categories and rows[0]["performance"] < bar and len(rows) < 3:
        rows.append(measured(audit(address, device, categories)))
    if len(rows) == 1:
        return rows[0] | {"runs": 1}
    median = statistics.median(row["performance"] for row in rows)
    chosen = next(row for row in rows if row["performance"] == median)
    return chosen | {"runs": len(rows)}


def shortfalls(row, device):
    """What of a row misses its bar, in words."""
    short = [
        f"{name} {row[name]:.2f} < {bar}"
        for name, bar in BARS[device].items()
        if name in row and (row[name] or 0) < bar
    ]
    if row.get("layout_shift", 0) >= LIMIT_SHIFT:
        short.append(f"layout shift {row['layout_shift']:.4f}")
    if row.get("transfer_bytes", 0) > LIMIT_BYTES:
        short.append(f"{row['transfer_bytes']:,} bytes > {LIMIT_BYTES:,}")
    return short + row["failed"]


def site_pages(site):
    return sorted(path.relative_to(site).as_posix() for path in (site / "book").rglob("*.html"))


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pages", nargs="*", help="pages such as book/decoding.html (default: all)")
    parser.add_argument(
        "--site", type=Path, default=ROOT / "_build" / "html", help="folder of the built site"
    )
    parser.add_argument("--device", choices=list(BARS), action="append", help="one device alone")
    parser.add_argument("--category", choices=CATEGORIES, action="append", help="one category alone")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers to a file")
    return parser.parse_args()


def main():
    given = arguments()
    if not (given.site / "index.html").exists():
        print(f"{given.site} has no built book. Run: make book", file=sys.stderr)
        return 2
    pages = given.pages or site_pages(given.site)
    if missing := [page for page in pages if not (given.site / page).is_file()]:
        print(f"{given.site} has no page {missing[0]}; pages look like book/decoding.html", file=sys.stderr)
        return 2
    install()
    server, base = serve(given.site)
    categories = tuple(given.category or CATEGORIES)
    rows, all_short = [], 0
    print(f"{'page':36} {'device':8} perf  acc  best  seo  shift     kB  falls short")
    for page in pages:
        for device in given.device or BARS:
            row = {"page": page, "device": device} | page_row(base + page, device, categories)
            short = shortfalls(row, device)
            scores = " ".join(f"{row[name]:4.2f}" if name in row else "   -" for name in CATEGORIES)
            weight = f"{row['transfer_bytes'] / 1000:6.0f}" if "transfer_bytes" in row else "     -"
            shift = f"{row['layout_shift']:6.3f}" if "layout_shift" in row else "     -"
            print(f"{page:36} {device:8} {scores} {shift} {weight}  {', '.join(short)}", flush=True)
            rows.append(row)
            all_short += bool(short)
    server.shutdown()
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    print(f"{len(rows)} audits, {all_short} fall short")
    return 1 if all_short else 0


if __name__ == "__main__":
    sys.exit(main())
