"""Names required packages that are missing or unsuitable.

It runs when an import has failed, so it first imports only Python's own modules.
"""

import importlib.metadata
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

OWN = "numba-tconv"
PROJECT = Path(__file__).parent.parent / "pyproject.toml"  # exists in a checkout
THEIRS = ("numba-cuda", "numba", "torch")  # their requirements are checked too


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def misfits() -> list[str]:
    """A line for each missing or unsuitable package, with the command that mends it."""
    lines = []
    for owner, requirement in stated():
        name = re.match(r"[\w.-]+", requirement)[0]
        installed = version(name)
        if installed is None:
            lines.append(f"{name} is not installed, and {owner} needs it: pip install '{requirement}'")
        elif not fits(requirement, installed):
            lines.append(f"{name} is {installed}, and {owner} needs {requirement}: pip install '{requirement}'")
    return list(dict.fromkeys(lines))


def stated() -> Iterator[tuple[str, str]]:
    """Pairs of a package and a requirement that applies here, such as "numpy<2.5"."""
    for owner in (OWN, *THEIRS):
        for line in requirements_of(owner):
            requirement, _, condition = (part.strip() for part in line.partition(";"))
            if not condition or holds(condition):
                yield owner, requirement


def requirements_of(package: str) -> list[str]:
    """Requirements with their conditions; none if the package is not installed."""
    if package == OWN and PROJECT.exists():
        return tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]["dependencies"]
    try:
        return importlib.metadata.requires(package) or []
    except importlib.metadata.PackageNotFoundError:
        return []


def holds(condition: str) -> bool:
    """Whether a condition holds here, without extras."""
    try:
        from packaging.markers import Marker
    except ImportError:  # packaging comes with matplotlib
        return False
    return Marker(condition).evaluate({"extra": ""})


def fits(requirement: str, installed: str) -> bool:
    try:
        from packaging.requirements import Requirement
    except ImportError:
        return True
    return Requirement(requirement).specifier.contains(installed, prereleases=True)
