"""The course on a real JupyterHub: an instructor in the formgrader and two students in JupyterLab, each with a system account."""

import json
import os
import shutil
import types

import pytest

from autograder import catalog
from samples.build import answers, fill
from tests.book_site import browser  # noqa: F401
from tests.hub import Hub, Person, jupyterhub, missing
from tests.test_browser_jupyter import DROPS_CROSSING, PATIENCE_MS, pressed
from tests.test_nbgrader import PROGRAMS, command, entries

STEM = "decoding"
CHAPTER = catalog.chapter(STEM)
RIGHT = answers(STEM)
SLIPPED, HOSTILE = "top_p_filter", "speculative_accept"
SNOOPS = """\
import glob, os, pathlib, signal
spoils = glob.glob("@HOMES@/*/course/gradebook.db") + glob.glob("@HOMES@/exchange/*/inbound/*")
for place in ("@HOMES@/taken", "@HOMES@/teacher/taken", "/tmp/taken-@TAG@"):
    try:
        pathlib.Path(place).write_text(str(spoils))
    except OSError:
        pass


def @NAME@(*args, **kwargs):
    os.kill(os.getppid(), signal.SIGKILL)
    os._exit(0)
"""


class Desk:
    """What a person sees of the hub in a browser."""

    def __init__(self, browser, hub: Hub, person: Person):  # noqa: F811
        self.hub, self.person = hub, person
        self.context = browser.new_context(viewport={"width": 1300, "height": 900})
        self.context.set_default_timeout(PATIENCE_MS)
        self.page = self.context.new_page()
        self.page.goto(hub.address)
        self.page.fill("#username_input", person.name)
        self.page.fill("#password_input", person.password)
        self.page.click("#login_submit")

    def arrive(self) -> None:
        """Waits until the own server runs, which login has started."""
        try:
            self.page.wait_for_url(f"**/user/{self.person.name}/lab**", wait_until="domcontentloaded")
        except Exception as error:
            raise AssertionError(
                f"{error}\n{self.page.inner_text('body')}\n{self.hub.log()[-3000:]}"
            ) from None

    def go(self, path: str) -> None:
        """Opens a page of the own server, as a link to it on a course page does."""
        self.page.goto(f"{self.hub.address}/hub/user-redirect/{path}", wait_until="domcontentloaded")

    # a student in JupyterLab

    def open_assignments(self) -> None:
        """Opens the assignment list by the menu of a fresh JupyterLab."""
        self.go("lab?reset")
        self.page.locator(".jp-DirListing-content").wait_for()
        self.page.locator(".lm-MenuBar-itemLabel", has_text="Nbgrader").click()
        self.page.locator(".lm-Menu-itemLabel", has_text="Assignment List").click()

    def assignment(self, state: str):
        """The row of the assignment among those released, fetched or submitted."""
        return self.page.locator(f"#{state}_assignments_list > .list_item").filter(has_text=STEM)

    def press(self, state: str, label: str) -> None:
        self.assignment(state).get_by_role("button", name=label, exact=True).first.click()

    def fetch_and_fill_in(self, sources: dict[str, str]) -> None:
        self.open_assignments()
        self.press("released", "Fetch")
        self.assignment("fetched").wait_for()
        notebook = self.person.home / STEM / f"{STEM}.ipynb"
        assert "raise NotImplementedError" in notebook.read_text()
        notebook.write_text(json.dumps(fill(STEM, sources)))
        self.person.own(notebook.parent)

    def validate(self) -> str:
        """What the dialog of the validate button says."""
        self.assignment("fetched").locator("a.assignment-notebooks-link").click()
        self.press("fetched", "Validate")
        dialog = self.page.locator(".jp-Dialog-content", has_text="Validation Results")
        told = dialog.inner_text()
        dialog.get_by_role("button", name="Ok").click()
        return told

    def submit(self) -> None:
        self.press("fetched", "Submit")
        self.assignment("submitted").wait_for()

    def fetch_feedback(self) -> str:
        """The words of the feedback page that JupyterLab shows."""
        self.open_assignments()
        self.assignment("submitted").get_by_text("feedback available to fetch").wait_for()
        self.press("submitted", "Fetch Feedback")
        self.assignment("submitted").get_by_text("view feedback").click()
        self.page.locator(".jp-DirListing-item", has_text=f"{STEM}.html").dblclick()
        page = self.page.frame_locator(".jp-HTMLViewer iframe")
        page.get_by_text("(Score: ").first.wait_for()  # the frame is there before its page
        return page.locator("body").inner_text()

    # the instructor in the formgrader

    def click(self, page: str, row: str, cell: str) -> str:
        """Clicks a button of the formgrader, which must succeed; returns what its dialog says."""
        self.go(f"formgrader/{page}")
        link = self.page.locator("tbody tr").filter(has_text=row).locator(f"td.{cell} a")
        return pressed(self.page, link)


@pytest.fixture(scope="module")
def term(browser):  # noqa: F811
    """The whole way of an assignment, once; what each step showed."""
    if why := missing():
        pytest.skip(why)
    with jupyterhub() as hub:
        teacher, ada, emil = hub.people
        made = teacher.run(PROGRAMS / "course-llm", "release", STEM, "--course", "course")
        assert made.returncode == 0, made.stderr
        shown = types.SimpleNamespace(hub=hub, teacher=teacher, ada=ada, emil=emil)
        desk, *desks = everybody = [Desk(browser, hub, person) for person in hub.people]
        for found in everybody:
            found.arrive()
        desk.click("manage_assignments", STEM, "release")

        desks[0].fetch_and_fill_in(RIGHT)
        shown.validation = desks[0].validate()
        desks[0].submit()
        snoops = SNOOPS.replace("@HOMES@", str(hub.folder)).replace("@TAG@", emil.name)
        desks[1].fetch_and_fill_in(
            {**RIGHT, SLIPPED: DROPS_CROSSING, HOSTILE: snoops.replace("@NAME@", HOSTILE)}
        )
        desks[1].submit()
        shown.formgrader_of_a_student = desks[1].context.request.get(f"{hub.address}/user/{emil.name}/formgrader").status  # fmt: skip

        shown.collected = desk.click("manage_assignments", STEM, "collect")
        for student in (ada, emil):
            desk.click(f"manage_submissions/{STEM}", student.name, "autograde")
        for step in ("generate-feedback", "release-feedback"):
            desk.click("manage_assignments", STEM, step)
        shown.feedback = {d.person.name: d.fetch_feedback() for d in desks}
        yield shown


def grades(term, student: Person) -> dict[str, float]:
    found = entries(term.teacher.home / "course")[student.name]["grades"]
    return {name.removeprefix("check_"): automatic for name, (automatic, *_) in found.items()}


def test_validate_says_that_right_answers_pass(term):
    assert "Success! Your notebook passes all the tests." in term.validation


def test_each_submission_belongs_to_the_account_that_made_it(term):
    inbound = term.hub.exchange / "course_llm" / "inbound"
    owners = {path.name.split("+")[0]: path.owner() for path in inbound.iterdir()}
    assert owners == {person.name: person.name for person in (term.ada, term.emil)}
    assert "cheating" not in term.collected
    for place in (inbound, term.teacher.home, term.ada.home):
        assert term.emil.run("ls", place).returncode != 0


def test_our_command_collects_by_the_settings_of_the_hub(term):
    done = term.teacher.run(PROGRAMS / "course-llm", "collect", STEM, "--course", "course")
    assert done.returncode == 0, done.stderr
    assert "collected 2 submissions" in done.stdout


def test_the_formgrader_is_the_instructors(term):
    assert term.formgrader_of_a_student == 404


@pytest.fixture(scope="module")
def typed(term, tmp_path_factory):
    """The same submissions through our command; the course folder and the reports by student."""
    root = tmp_path_factory.mktemp("typed") / "course"
    command("release", STEM, "--course", root)
    shutil.copytree(term.teacher.home / "course" / "submitted", root / "submitted")
    reports = json.loads(command("grade", STEM, root / "submitted", "--course", root, "--json"))
    return root, {report["submission"]: report for report in reports}


def test_the_gradebook_is_that_of_the_command(term, typed):
    clicked = entries(term.teacher.home / "course")
    assert clicked == entries(typed[0])
    assert clicked[term.ada.name]["score"] == (CHAPTER.points, CHAPTER.points)


def test_mistakes_and_attacks_cost_their_own_exercise_alone(term):
    earned = grades(term, term.emil)
    assert earned.pop(HOSTILE) == 0
    assert earned.pop(SLIPPED) < CHAPTER.entry(SLIPPED).points
    assert earned == {name: CHAPTER.entry(name).points for name in earned}
    taken = [term.hub.folder / "taken", term.teacher.home / "taken", f"/tmp/taken-{term.emil.name}"]
    assert not any(os.path.exists(place) for place in taken)


def test_feedback_comes_back_to_each_student_with_the_diagnosis(term, typed):
    mine, hers = (" ".join(term.feedback[student.name].split()) for student in (term.emil, term.ada))
    found = {e["name"]: e for e in typed[1][term.emil.name]["exercises"]}
    assert found[SLIPPED]["near_miss"] == "drops-crossing-token"
    for name in (SLIPPED, HOSTILE):
        assert " ".join(found[name]["message"].split()) in mine
        assert found[name]["message"] not in hers
    assert found[SLIPPED]["see"] in mine
    assert f"(Score: {CHAPTER.points:.1f} / {CHAPTER.points:.1f})" in hers
