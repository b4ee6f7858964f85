"""The package's README names every module, and nothing that is not there."""

import re

from tests.conftest import ROOT

PACKAGE = ROOT / "src" / "course_llm"


def test_readme_names_every_module():
    text = (PACKAGE / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(\w+\.py)`", text.split("## Beside others")[0]))
    assert named == {path.name for path in PACKAGE.glob("*.py")} - {"__init__.py"}


def test_feature_table_is_whole():
    text = (PACKAGE / "README.md").read_text(encoding="utf-8").split("## Beside others")[1]
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len({row.count("|") for row in rows}) == 1
    notes = set(re.findall(r"[¹²³⁴⁵⁶⁷⁸⁹⁰]+", "".join(rows)))
    numbers = {str(note).translate(str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹", "0123456789")) for note in notes}
    assert numbers == set(re.findall(r"^(\d+)\. ", text, re.MULTILINE))
