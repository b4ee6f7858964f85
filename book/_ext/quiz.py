"""Directive `quiz`: questions with one right choice each, explained choice by choice.

The explanations are `details` elements: without script the reader opens them; with script (`course.js`) choosing an
answer opens its own.
"""

import html
import json
import re

import yaml
from docutils import nodes
from docutils.statemachine import StringList
from sphinx.util.docutils import SphinxDirective

KEY = re.compile(r"\s*(?:- )?(?:question|choices|text|why|right):")


class quiz(nodes.General, nodes.Element):
    """All questions of one directive."""


class quiz_question(nodes.General, nodes.Element):
    """One question: its words (`quiz_words`), then its choices."""


class quiz_words(nodes.General, nodes.Element):
    """The words of a question."""


class quiz_choice(nodes.General, nodes.Element):
    """One choice: its words (`quiz_text`) and the explanation (`quiz_why`)."""


class quiz_text(nodes.General, nodes.Element):
    """The words of a choice."""


class quiz_why(nodes.General, nodes.Element):
    """Why a choice is right or wrong."""


def quoted(lines):
    """Puts the words behind a key in quotes, so that a colon, a backtick or a hash in them means nothing to YAML."""
    result = []
    for line in lines:
        found = re.fullmatch(r"(\s*(?:- )?(?:question|text|why): +)([^\s\"'|>].*)", line)
        if found:
            result.append(found.group(1) + json.dumps(found.group(2).strip(), ensure_ascii=False))
        elif result and re.match(r"\s*[^\s-]", line) and not KEY.match(line) and result[-1].endswith('"'):
            # a long text goes on in the next line
            result[-1] = result[-1][:-1] + " " + json.dumps(line.strip(), ensure_ascii=False)[1:]
        else:
            result.append(line)
    return "\n".join(result)


class Quiz(SphinxDirective):
    has_content = True

    def run(self):
        try:
            questions = yaml.safe_load(quoted(self.content))
        except yaml.YAMLError as error:
            raise self.error(f"quiz: {error}") from error
        self.check(questions)
        number = self.env.new_serialno("quiz")
        page = self.env.docname.replace("/", "-")
        node = quiz()
        self.set_source_info(node)
        for i, question in enumerate(questions):
            asked = quiz_question("", name=f"{page}-{number}-{i}")
            asked += self.parsed(quiz_words(), question["question"])
            for j, choice in enumerate(question["choices"]):
                offered = quiz_choice(
                    "", name=asked["name"], value=str(j), right=bool(choice.get("right", False))
                )
                offered += self.parsed(quiz_text(), choice["text"])
                offered += self.parsed(quiz_why("", right=offered["right"]), choice["why"])
                asked += offered
            node += asked
        return [node]

    def check(self, questions):
        if not isinstance(questions, list) or not questions:
            raise self.error("quiz: expected a YAML list of questions")
        for question in questions:
            if not isinstance(question, dict) or set(question) != {"question", "choices"}:
                raise self.error(f"quiz: a question needs `question` and `choices`, got {question!r}")
            choices = question["choices"]
            if not isinstance(choices, list) or len(choices) < 2:
                raise self.error(f"quiz: {question['question']!r} needs two choices at least")
            for choice in choices:
                if not isinstance(choice, dict) or not {"text", "why"} <= set(choice) <= {
                    "text",
                    "why",
                    "right",
                }:
                    raise self.error(
                        f"quiz: a choice needs `text` and `why` (and `right: true`), got {choice!r}"
                    )
            if sum(bool(choice.get("right")) for choice in choices) != 1:
                raise self.error(f"quiz: {question['question']!r} needs exactly one right choice")

    def parsed(self, node, text):
        lines = StringList(str(text).splitlines(), source=self.get_source_info()[0])
        self.state.nested_parse(lines, self.content_offset, node)
        return node


def unwrap_first_paragraph(node):
    """Takes the words out of a lone paragraph, where HTML allows no paragraph."""
    if len(node) == 1 and isinstance(node[0], nodes.paragraph):
        node[:] = node[0].children


def visit_quiz(self, node):
    self.body.append('<div class="quiz">\n')


def depart_quiz(self, node):
    self.body.append('<p class="quiz-score" role="status"></p>\n</div>\n')


def visit_question(self, node):
    self.body.append(f'<fieldset class="quiz-question" aria-labelledby="{node["name"]}">\n')


def depart_question(self, node):
    self.body.append('<p class="quiz-verdict" role="status"></p>\n</fieldset>\n')


def visit_words(self, node):
    unwrap_first_paragraph(node)
    self.body.append(f'<div class="quiz-words" id="{node.parent["name"]}">')


def visit_choice(self, node):
    right = ' data-right="true"' if node["right"] else ""
    self.body.append(f'<div class="quiz-choice"{right}>\n')


def visit_text(self, node):
    unwrap_first_paragraph(node)
    choice = node.parent
    name = html.escape(choice["name"])
    plain = [text for text in node.findall(nodes.Text) if not isinstance(text.parent, nodes.math)]
    # not every reader of pages takes an equation for a name
    said = "" if "".join(plain).strip() else f' aria-label="{html.escape(node.astext())}"'
    self.body.append(f'<label><input type="radio" name="{name}" value="{choice["value"]}"{said}> <span>')


def depart_text(self, node):
    self.body.append("</span></label>\n")


def visit_why(self, node):
    unwrap_first_paragraph(node)
    verdict = "Right." if node["right"] else "Not quite."
    self.body.append(
        f'<details class="quiz-why"><summary>Is it?</summary><div><strong>{verdict}</strong> <span>'
    )


def depart_why(self, node):
    self.body.append("</span></div></details>\n")


def close_div(self, node):
    self.body.append("</div>\n")


def ignore(self, node):
    """Other builders print the words, choices and explanations one after the other."""


def setup(app):
    plain = {builder: (ignore, ignore) for builder in ("latex", "text", "man", "texinfo")}
    app.add_node(quiz, html=(visit_quiz, depart_quiz), **plain)
    app.add_node(quiz_question, html=(visit_question, depart_question), **plain)
    app.add_node(quiz_words, html=(visit_words, close_div), **plain)
    app.add_node(quiz_choice, html=(visit_choice, close_div), **plain)
    app.add_node(quiz_text, html=(visit_text, depart_text), **plain)
    app.add_node(quiz_why, html=(visit_why, depart_why), **plain)
    app.add_directive("quiz", Quiz)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
