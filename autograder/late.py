"""A late policy for nbgrader: so much of the points for every day begun, after hours of grace, up to a limit.

In `nbgrader_config.py`:

    c.AssignLatePenalties.plugin_class = "autograder.late.LatePolicy"
    c.LatePolicy.percent_per_day = 10
    c.LatePolicy.grace_hours = 6
    c.LatePolicy.max_percent = 50
"""

import math
from typing import Any

from nbgrader.plugins import BasePlugin
from nbgrader.preprocessors import AssignLatePenalties
from traitlets import Float, TraitError

DAY_S = 24 * 3600


class LatePolicy(BasePlugin):
    """Takes a share of what a late submission has earned. `nbgrader autograde` and `course-llm grade` both ask it."""

    percent_per_day = Float(10.0, min=0.0, max=100.0, help="Percent of the points earned that each day begun costs.").tag(config=True)  # fmt: skip
    grace_hours = Float(0.0, min=0.0, help="Hours after the due date that cost nothing; days are counted from their end.").tag(config=True)  # fmt: skip
    max_percent = Float(100.0, min=0.0, max=100.0, help="The most that lateness costs, in percent of the points earned.").tag(config=True)  # fmt: skip

    def late_submission_penalty(self, student_id: str, score: float, total_seconds_late: float) -> Any:
        """The points to take off, or None when it costs nothing.

        Args:
            score: the points earned.
            total_seconds_late: seconds after the due date, extensions counted.
        """
        late_s = total_seconds_late - 3600 * self.grace_hours
        if late_s <= 0:
            return None
        percent = min(self.max_percent, self.percent_per_day * math.ceil(late_s / DAY_S))
        return score * percent / 100


def check_policy(parent: Any) -> None:
    """Makes the late policy of a configuration once, so that a wrong setting is known before anything is graded.

    Raises:
        ValueError: it cannot be made; the message says which setting.
    """
    try:
        AssignLatePenalties(parent=parent).init_plugin()
    except (TraitError, ImportError, AttributeError) as error:
        raise ValueError(f"the late policy cannot be used: {error}") from None
