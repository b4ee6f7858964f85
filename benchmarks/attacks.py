"""What hostile submissions get from stock nbgrader and from this grader: `python -m benchmarks.attacks [stock|ours] [--only WORD ...] [--json FILE]`.

Attacks of `tests/attacks`, some of every kind, between two honest students: ada has been graded before, zoe comes after.

- `stock`: a class for each attack, for some spoil what follows. `nbgrader autograde` with its own `Execute` and the same checks in the cells.
- `ours`: all attackers in one class, by `nbgrader autograde` with this project's line in `nbgrader_config.py`, and again by `course-llm grade`.

Stock nbgrader really runs the attacks, so everything happens in throwaway bubbles (`benchmarks/bubble.py`) with canaries in them: a secret in the home folder
and in the environment, a listener on loopback, start-up files, others' submissions, the gradebook. What is counted: the points beside those honestly
earned, what was read or changed, whether the others' grades changed, whether the run ended by itself, and what the report says.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from autograder import catalog
from benchmarks import bubble
from benchmarks.bubble import HOME, LOGS, SECRET, TMP
from benchmarks.grading import STOCK_CONFIG
from tests.attacks import ATTACKED, BESIDE, STEM, Attack, honest, load

WALL_S = 180
LINK = "link"
CHOSEN = (
    "replaced check", "replaced comparison", "patched torch", "cells that follow", "equal to everything", "NaN", "printed score",
    "imports the reference", "opens the solutions", "copies a fellow student", "reads the gradebook", "reads the canary", "environment", "loopback",
    "endless loop", "loop that swallows interrupts", "fork bomb", "memory", "disk", "segmentation fault", "kills its parent", "daemon",
    "start-up file", "changes the gradebook", "spoils the others' notebooks",
    "test cells skipped", "points in the metadata", "test cell deleted", "ids renamed", "another kernel", "cell magics", LINK,
)  # fmt: skip
# what Jupyter and nbgrader write by themselves
USUAL = (
    "course/autograded/",
    "course/gradebook.db",
    ".local/share/",
    ".ipython/",
    ".cache/",
    ".jupyter/migrated",
    ".config/",
)
COURSE = HOME / "course"
SECRETS = {
    "a secret file": HOME / "secret.txt",
    "ada's notebook": COURSE / f"submitted/ada/{STEM}/{STEM}.ipynb",
}
STARTUP = HOME / ".ipython/profile_default/startup"


# inside the outer bubble


def lay(side: str, handed_in: dict[str, bytes | None]) -> None:
    """Lays out a home folder with a class, in which ada has been graded; who hands in nothing hands in a link to her notebook."""
    for place in (HOME, TMP):
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
    shutil.copytree(bubble.DISK / side, COURSE)
    for student, notebook in {**handed_in, "zoe": SECRETS["ada's notebook"].read_bytes()}.items():
        path = COURSE / "submitted" / student / STEM / f"{STEM}.ipynb"
        path.parent.mkdir(parents=True)
        if notebook is None:
            path.symlink_to(SECRETS["ada's notebook"])
        else:
            path.write_bytes(notebook)
    STARTUP.mkdir(parents=True)
    (STARTUP / "README").write_text("")
    (HOME / ".bashrc").write_text("# empty\n")
    SECRETS["a secret file"].write_text(SECRET)
    for path in SECRETS.values():  # a file system notes the first reading after a change
        os.utime(path, (0, time.time()))


def state() -> dict[str, int]:
    """What the home folder holds besides what every run leaves: the contents' hash by path."""
    found = {}
    for path in HOME.rglob("*"):
        name = str(path.relative_to(HOME))
        mine = STARTUP in path.parents or name.startswith("course/autograded/ada/")
        if (
            path.is_file()
            and not path.is_symlink()
            and path not in SECRETS.values()
            and (mine or not name.startswith(USUAL))
        ):
            found[name] = hash(path.read_bytes())
    return found


def scores(students: Iterable[str]) -> dict[str, float | None]:
    """Each student's points in the gradebook; none where there is no grade."""
    from nbgrader.api import Gradebook, MissingEntry

    found: dict[str, float | None] = dict.fromkeys(students)
    with Gradebook(f"sqlite:///{COURSE}/gradebook.db") as gradebook:
        for student in found:
            if (COURSE / "autograded" / student / STEM / f"{STEM}.ipynb").exists():
                with contextlib.suppress(MissingEntry):
                    found[student] = gradebook.find_submission(STEM, student).score
    return found


def said(student: str, check: str) -> str:
    """What a student's graded notebook says below a check, or on top."""
    try:
        notebook = json.loads((COURSE / "autograded" / student / STEM / f"{STEM}.ipynb").read_text())
    except (OSError, ValueError):
        return ""
    report = notebook["metadata"].get("course_llm", {}).get("report")
    if report:
        exercise = next(e for e in report["exercises"] if f"check_{e['name']}" == check)
        message = report.get("error") or exercise["message"] or ""
        for group in exercise["groups"]:  # what the check is about is the same for every attack
            message = message.replace(group["says"], "")
        return " ".join(message.split())[:300]
    for cell in notebook["cells"]:
        if cell["metadata"].get("nbgrader", {}).get("grade_id") == check:
            for output in cell.get("outputs", []):
                if output["output_type"] == "error":
                    return f"{output['ename']}: {output['evalue']}"[:300]
    return ""


def graded(
    side: str, handed_in: dict[str, bytes | None], callers: list, wall_s: float = WALL_S
) -> dict[str, Any]:
    """Grades one class and says what came of it."""
    lay(side, handed_in)
    before, calls = state(), len(callers)
    done = bubble.run(f"nbgrader autograde {STEM}", COURSE, wall_s)
    read = [name for name, path in SECRETS.items() if path.exists() and path.stat().st_atime > 0]
    after = state()
    changed = sorted(n for n in {*before, *after} if before.get(n) != after.get(n))
    students = ("ada", *handed_in, "zoe")
    try:
        points = scores(students)
    except Exception as error:
        points, changed = dict.fromkeys(students), [*changed, f"gradebook.db ({type(error).__name__})"]
    return {
        "points": points,
        "read": read,
        "changed": changed,
        "connections": len(callers) - calls,
        "ended": done.ended,
        "code": done.code,
        "left": done.left,
        "log": " ".join(re.findall(r"\| ERROR\] (.*)", done.said))[-300:],
    }


def serve(callers: list) -> int:
    """A listener on loopback; returns its port."""
    server = socket.create_server(("127.0.0.1", 0))

    def accept() -> None:
        while True:
            callers.append(server.accept()[1])

    threading.Thread(target=accept, daemon=True).start()
    return server.getsockname()[1]


def prepare(side: str) -> None:
    """Makes a course folder in which ada is graded."""
    for place in (HOME, TMP):
        place.mkdir(exist_ok=True)
    folder = bubble.DISK / side
    subprocess.run(["course-llm", "release", STEM, "--course", str(folder)], check=True, stdout=sys.stderr)
    if side == "stock":
        (folder / "nbgrader_config.py").write_text(STOCK_CONFIG)
    path = folder / "submitted" / "ada" / STEM / f"{STEM}.ipynb"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(honest()))
    done = bubble.run(f"nbgrader autograde {STEM}", folder, WALL_S)
    if done.code:
        sys.exit(f"ada could not be graded ({side}):\n{done.said[-3000:]}")


def inside(side: str, only: list[str]) -> None:
    """Grades in the bubble and prints what came of it, a line of JSON for each thing found."""
    callers: list = []
    places = {"CANARY": str(SECRETS["a secret file"]), "FOLDER": str(COURSE), "HOME": str(HOME), "PORT": str(serve(callers)), "VARIABLE": "INSTRUCTOR_TOKEN"}  # fmt: skip
    attacks = {
        name: attack for name, attack in chosen().items() if not only or any(word in name for word in only)
    }
    handed_in = {name: attack.written(places) if attack else None for name, attack in attacks.items()}
    prepare(side)
    control = graded(side, {"eve": json.dumps(honest()).encode()}, callers)
    tell({"control": control})
    if side == "stock":
        for name, attack in attacks.items():
            check = f"check_{attack.exercise if attack else ATTACKED}"
            for _ in range(2):
                found = graded(side, {"eve": handed_in[name]}, callers)
                sound = found["points"]["zoe"] == control["points"]["zoe"]
                if sound or found["changed"] or found["ended"] != "by itself":
                    break  # else once more: was it the attack, or a busy machine?
            tell({"name": name, "found": {**found, "says": said("eve", check)}})
        return
    students = {f"eve{number:02}": name for number, name in enumerate(attacks)}
    found = graded(side, {s: handed_in[n] for s, n in students.items()}, callers, WALL_S * 6)
    for student, name in students.items():
        check = f"check_{attacks[name].exercise if attacks[name] else ATTACKED}"
        tell({"name": name, "found": {"points": found["points"].pop(student), "says": said(student, check)}})
    tell({"class": found})
    done = bubble.run(
        f"course-llm grade {STEM} submitted --json --workers 1 > {LOGS}/grades.json", COURSE, WALL_S * 6
    )
    rows = json.loads((LOGS / "grades.json").read_text()) if done.code == 0 else []
    tell({"command": {students.get(row["submission"], row["submission"]): row["points"] for row in rows}})


def tell(data: dict) -> None:
    print(json.dumps(data), flush=True)


# outside


def chosen() -> dict[str, Attack | None]:
    """The attacks by name; none for the one that hands in a link, which only a folder can show."""
    known = {attack.name: attack for attack in load()}
    return {name: known.get(name) if name != LINK else None for name in CHOSEN}


def described(name: str, attack: Attack | None) -> dict[str, Any]:
    """What an attack does, and what it earns honestly."""
    if attack is None:
        return {
            "name": name,
            "kind": "notebook",
            "words": "hands in a link to a fellow student's notebook",
            "honest": 0.0,
        }
    beside = sum(
        catalog.chapter(STEM).entry(n).points
        for n in (*BESIDE, *((ATTACKED,) if attack.exercise != ATTACKED else ()))
    )
    honestly = 0.0 if attack.error else beside + attack.points
    return {"name": name, "kind": attack.kind, "words": attack.words, "honest": honestly}


def problem(row: dict, found: dict) -> str:
    """What went wrong with a class of stock nbgrader, in a few words; empty if nothing did."""
    words, control = [], found["stock"]["points"]
    points = row["stock"]["points"]
    if points["eve"] != row["honest"]:
        words.append("no grade" if points["eve"] is None else f"{points['eve']:g} points")
    words += [f"{who}: {points[who]}" for who in ("ada", "zoe") if points[who] != control[who]]
    words += [f"read {what}" for what in row["stock"]["read"]] + [
        f"changed {what}" for what in row["stock"]["changed"]
    ]
    words += ["connected"] * bool(row["stock"]["connections"]) + [
        f"{row['stock']['left']} processes left"
    ] * bool(row["stock"]["left"])
    return "; ".join(words + [f"ended: {row['stock']['ended']}"] * (row["stock"]["ended"] != "by itself"))


def show(found: dict) -> None:
    """Prints the attacks as a table."""
    table = Table(
        "attack", "honest", "stock nbgrader", "ours", "ours says", title="points, and what else happened"
    )
    for row in found["attacks"]:
        ours = row.get("ours", {})
        table.add_row(
            row["name"],
            f"{row['honest']:g}",
            problem(row, found) if "stock" in row else "",
            str(ours.get("points")),
            ours.get("says"),
        )
    Console(width=160).print(table)


def outside(side: str, only: list[str], found: dict) -> Iterator[dict]:
    """Starts the bubble for one side and puts into `found` what it tells, after each thing told."""
    rows = {row["name"]: row for row in found.get("attacks", [])}
    rows = {
        name: described(name, attack)
        | {k: v for k, v in rows.get(name, {}).items() if k in ("stock", "ours")}
        for name, attack in chosen().items()
    }
    found |= {
        "max": sum(e.points for e in catalog.chapter(STEM).entries),
        "limits": {"wall_s": WALL_S, "memory_gb": bubble.ALL_BYTES >> 30, "processes": bubble.PROCESSES},
        "attacks": list(rows.values()),
    }
    command = bubble.outer_command(
        sys.executable, "-m", "benchmarks.attacks", side, "--inside", "--only", *only
    )
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            data = json.loads(line)
            if "name" in data:
                rows[data["name"]][side] = data["found"]
            elif "command" in data:
                found["command"] = data["command"]
            else:
                found[side] = data.get("class", data.get("control"))
            yield data
    if process.returncode:
        sys.exit(f"the bubble ended with {process.returncode}")


def main() -> None:
    """Measures in the bubble, prints and writes outside of it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("side", nargs="?", choices=("stock", "ours"), help="(default: both)")
    parser.add_argument(
        "--only", nargs="*", default=[], metavar="WORD", help="attacks whose names hold one of these"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write what was found, beside what the file has"
    )
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        return inside(arguments.side, arguments.only)
    if missing := [program for program in ("bwrap", "setpriv") if shutil.which(program) is None]:
        sys.exit(f"the attacks are kept in by {' and '.join(missing)}: apt install bubblewrap util-linux")
    found = json.loads(arguments.json.read_text()) if arguments.json and arguments.json.exists() else {}
    for side in (arguments.side,) if arguments.side else ("stock", "ours"):
        for told in outside(side, arguments.only, found):
            print(f"{side}: {json.dumps(told)[:600]}", flush=True)
            if arguments.json:
                arguments.json.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    show(found)


if __name__ == "__main__":
    main()
