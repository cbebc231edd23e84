"""Prints the lists of known.py as the source is now."""

from tests.shape import source

twice = {name: count for name, count in sorted(source.classes().items()) if count > 1}
print("TWICE: dict[str, int] = {")
print("".join(f'    "{name}": {count},\n' for name, count in twice.items()) + "}")
against = "".join(f'    ("{file}", "{part}"),\n' for file, part in sorted(source.against_order()))
print("AGAINST_ORDER: set[tuple[str, str]] = " + (f"{{\n{against}}}" if against else "set()"))
