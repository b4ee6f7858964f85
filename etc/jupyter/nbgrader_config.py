# Read by every nbgrader command of this environment: `nbgrader validate` gets a real exit code. A course folder has its own nbgrader_config.py.
from autograder.validate import give_validate_an_exit_code

give_validate_an_exit_code()
