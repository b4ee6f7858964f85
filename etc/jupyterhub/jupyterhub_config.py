# A JupyterHub for this course, on one machine with a system account for each person. Put your own names and paths below.
from pathlib import Path

COURSE = "course_llm"
INSTRUCTORS = {"teacher"}
STUDENTS = {"ada", "emil"}
CONFIGURATION = Path("/srv/course_llm/jupyterhub")  # a copy of the folder in which this file lies

c = get_config()

# nbgrader asks the hub who belongs to a course by the names of these two groups.
c.JupyterHub.load_groups = {
    f"formgrade-{COURSE}": {"users": sorted(INSTRUCTORS)},
    f"nbgrader-{COURSE}": {"users": sorted(STUDENTS)},
}
c.JupyterHub.load_roles = [
    {"name": "server", "scopes": ["users:activity!user", "access:servers!server", "read:users:groups!user"]},
]
c.Authenticator.allowed_users = INSTRUCTORS | STUDENTS
c.Spawner.default_url = "/lab"


def configure_by_role(spawner):
    """Instructors and students read the settings of all, and each their own, which turn the formgrader off for students."""
    role = "instructors" if spawner.user.name in INSTRUCTORS else "students"
    spawner.environment["JUPYTER_CONFIG_PATH"] = f"{CONFIGURATION / role}:{CONFIGURATION / 'all'}"


c.Spawner.pre_spawn_hook = configure_by_role
