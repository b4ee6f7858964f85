"""How a decoder LLM works inside, one module per chapter: see `course_llm.attention` and its siblings."""

__version__ = "0.1.0"
