"""What does not keep to the shape yet. Entries go when the code does: `python -m tests.shape` prints what is left."""

TWICE: dict[str, int] = {}
AGAINST_ORDER: set[tuple[str, str]] = set()
