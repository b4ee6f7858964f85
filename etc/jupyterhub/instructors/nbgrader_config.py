# Read by the instructors' servers: where the formgrader finds the course folder, below the instructor's home.
from pathlib import Path

c = get_config()
c.CourseDirectory.root = str(Path.home() / "course")
