"""Writes requirements.lock, requirements-dev.lock and docs/licences.md anew: `make lock`.

    pip resolves pyproject.toml ──▶ names and versions ──▶ the index tells the hashes of their files ──▶ the locks
                                                     └──▶ what their metadata say of their licences ──▶ the list

The locks hold every file that Linux on x86_64 with Python 3.11 to 3.13 may install. torch is not in them: it is
installed first, pinned by constraints.txt, as the build that fits the machine (for a CPU, or for one of several CUDA
versions with libraries of its own), and no one list of hashes fits all of those.
"""

from __future__ import annotations

import argparse
import html
import json
import re
import subprocess
import sys
import tempfile
import tomllib
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)
from packaging.version import InvalidVersion

ROOT = Path(__file__).parents[1]
INDEX = "https://pypi.org/simple"
EXTRAS = {"requirements.lock": ("train",), "requirements-dev.lock": ("train", "postgres", "dev")}
"""What `make install` and `make dev` install."""
APART = {"strop", "torch"}
HEAD = """\
# What `{target}` installs, with hashes, for Linux on x86_64 and Python 3.11 to 3.13. Written by `make lock`.
# torch is not in it: install it first, as the build that fits the machine; see packages/lock.py.
#
#   pip install torch=={torch}
#   pip install --no-deps --require-hashes -r {name}
#   pip install --no-deps -e .
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", help="what `pip install --report` wrote (default: pip is asked)")
    given = parser.parse_args().report
    found = packages(json.loads(Path(given).read_text() if given else resolve()))
    torch = found["torch"]["version"].partition("+")[0]
    hashes = {name: list(files(name, found[name]["version"])) for name in sorted(found.keys() - APART)}
    for file, extras in EXTRAS.items():
        names = sorted(closure(found, extras) - APART)
        target = "make install" if file == "requirements.lock" else "make dev"
        lines = [HEAD.format(target=target, torch=torch, name=file)]
        for name in names:
            each = "".join(f" \\\n    --hash=sha256:{one}" for one in sorted(hashes[name]))
            lines.append(f"{name}=={found[name]['version']}{each}\n")
        (ROOT / file).write_text("".join(lines))
        print(f"{file}: {len(names)} packages")
    (ROOT / "docs" / "licences.md").write_text(licences(found))


def resolve() -> str:
    """What pip would install into an empty environment."""
    extras = ",".join(EXTRAS["requirements-dev.lock"])
    with tempfile.TemporaryDirectory() as place:
        report = Path(place) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
        wanted = ["-c", str(ROOT / "constraints.txt"), "-e", f"{ROOT}[{extras}]"]
        subprocess.run([*command, "--report", str(report), *wanted], check=True)
        return report.read_text()


def packages(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {canonicalize_name(one["metadata"]["name"]): one["metadata"] for one in report["install"]}


def closure(found: dict[str, dict[str, Any]], extras: tuple[str, ...]) -> set[str]:
    """What these extras of ours need, and what that needs."""
    seen: set[tuple[str, str]] = set()
    todo = [("strop", extra) for extra in ("", *extras)]
    while todo:
        name, extra = todo.pop()
        if (name, extra) in seen or name not in found:
            continue
        seen.add((name, extra))
        for line in found[name].get("requires_dist", ()):
            need = Requirement(line)
            if need.marker is None or need.marker.evaluate({"extra": extra}):
                todo += [(canonicalize_name(need.name), one) for one in ("", *need.extras)]
    return {name for name, _ in seen}


def files(name: str, version: str) -> Iterator[str]:
    """Hashes of the files of a version that may be installed; of its source only where there is nothing else."""
    with urllib.request.urlopen(f"{INDEX}/{name}/", timeout=60) as page:
        links = re.findall(r'href="[^"#]*/([^"#/]+)#sha256=([0-9a-f]{64})"', html.unescape(page.read().decode()))
    sources: list[str] = []
    wheels: list[str] = []
    for file, digest in links:
        try:
            if file.endswith(".whl"):
                _, found, _, tags = parse_wheel_filename(file)
                if str(found) == version and any(map(fits, map(str, tags))):
                    wheels.append(digest)
            elif str(parse_sdist_filename(file)[1]) == version:
                sources.append(digest)
        except (InvalidWheelFilename, InvalidSdistFilename, InvalidVersion):
            continue
    if not wheels and not sources:
        sys.exit(f"{INDEX} has no file of {name} {version}: is it another index's?")
    yield from wheels or sources


def fits(tag: str) -> bool:
    """
    >>> fits("cp312-cp312-manylinux_2_28_x86_64"), fits("cp39-abi3-manylinux2014_x86_64"), fits("py311-none-any")
    (True, True, True)
    >>> fits("cp312-cp312-macosx_11_0_arm64"), fits("cp310-cp310-manylinux2014_x86_64")
    (False, False)
    """
    python, abi, platform = tag.split("-")
    here = platform == "any" or (platform.endswith("x86_64") and platform.startswith(("manylinux", "linux")))
    known = re.fullmatch(r"(py|cp)(\d+)", python)
    if known is None:
        return False
    kind, number = known[1], int(known[2])
    if abi == "abi3":  # from this version on
        return here and number <= 311
    return here and number in ((3, 311, 312, 313) if kind == "py" else (311, 312, 313))


def licences(found: dict[str, dict[str, Any]]) -> str:
    """The list as a page. What runs need comes first, what only work on strop needs after it."""
    runs = closure(found, EXTRAS["requirements.lock"])
    every = closure(found, EXTRAS["requirements-dev.lock"])
    ours = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["license"]
    parts = [
        "# Licences\n",
        f"strop is under {ours} (LICENSE). These are the packages that it is installed with, and what their own",
        "metadata say; written by `make lock`, of the same versions as the locks. CUDA builds of torch bring NVIDIA's",
        "libraries, which are under NVIDIA's own licences. None of them is part of strop's own package.",
    ]
    for title, names in {"What runs need": runs, "What tests and linters need": every - runs}.items():
        parts += [f"\n## {title}\n", "| package | version | licence |", "|---|---|---|"]
        for name in sorted(names - {"strop"}):
            version = found[name]["version"].partition("+")[0]
            parts.append(f"| {name} | {version} | {licence(found[name])} |")
    return "\n".join(parts) + "\n"


def licence(about: dict[str, Any]) -> str:
    said = about.get("license_expression")
    if not said:  # which older pips leave out of their reports
        with suppress(PackageNotFoundError):
            said = metadata(about["name"]).get("License-Expression")
    if said:
        return said
    classified = [one.rpartition(" :: ")[2] for one in about.get("classifier", ()) if one.startswith("License ::")]
    if named := [one for one in classified if one != "OSI Approved"]:
        return "; ".join(named).replace("|", "/")
    text = (about.get("license") or "").strip().splitlines()
    return text[0].replace("|", "/")[:80] if text else "not said: see its project"


if __name__ == "__main__":
    main()
