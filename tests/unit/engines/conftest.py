"""A stand-in for vLLM is a program of its own, and no tests."""

collect_ignore = ["standin"]
