"""Writes requirements.txt: every installed package with its version, no addresses."""

import importlib.metadata
from pathlib import Path

HEADER = "# The whole environment, written by `make lock`. pyproject.toml has the ranges.\n"
LEAVE_OUT = {"pip", "course-llm", "wheel"}


def main() -> None:
    """Lists what is installed beside the project."""
    found = {}
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"].lower().replace("_", "-")
        if name not in LEAVE_OUT:
            found[name] = distribution.version.split("+")[0]  # torch's local label names a build, not a version
    lines = [f"{name}=={version}" for name, version in sorted(found.items())]
    Path("requirements.txt").write_text(HEADER + "\n".join(lines) + "\n")
    print(f"locked {len(lines)} packages")


if __name__ == "__main__":
    main()
