"""Prints the lists of known.py as the source is now."""

from tests.shape import source

twice = {name: count for name, count in sorted(source.classes().items()) if count > 1}
print("TWICE = {")
print("".join(f'    "{name}": {count},\n' for name, count in twice.items()) + "}")
print("AGAINST_ORDER = {")
print("".join(f'    ("{file}", "{part}"),\n' for file, part in sorted(source.against_order())) + "}")
