"""Grades the course's exercises: `check` in a notebook, `course-llm grade` for a class."""
