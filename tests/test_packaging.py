"""The repository as a whole: declarations, promises to a newcomer, and the imports between modules."""

import ast
import functools
import graphlib
import itertools
import os
import re
import shutil
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from . import links

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "numba_tconv"
PREFIX = "numba_tconv."
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MARKDOWN = ("README.md", "CONTRIBUTING.md", "plots/README.md", "plots/lab-notes.md", "numba_tconv/README.md",
            "numba_tconv/kernels/README.md")  # fmt: skip
FOLDERS = ("numba_tconv", "reference", "tests", "notebooks", "plots", ".ci")

# From the bottom up, as in numba_tconv/README.md. A module imports from its own layer (without a circle) and from those
# above it in this list. "" is numba_tconv/__init__.py.
LAYERS = (
    ("requirements",),
    ("formula", "formula.*"),
    ("ptx", "ptx.*"),
    ("runtime", "runtime.*"),
    ("kernels", "kernels.*"),
    ("gradients", "gradients.*"),
    ("selection", "selection.*"),
    ("torch_api", "torch_api.*"),
    ("",),
    ("lab", "lab.*"),
    ("__main__", "kernelbench"),
)


def committed_files():
    """The text files that are, or will be, in the repository."""
    files = [path for path in ROOT.iterdir() if path.is_file() and path.name != ".git"]  # a file in a git worktree
    files += [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()]
    return [p for p in files if p.suffix not in (".pyc", ".png") and ".ipynb_checkpoints" not in p.parts]


def module_name(path):
    """A module's name within the package: "taps", "kernels.rung", "kernels" and "" for the two __init__.py."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts).removesuffix("__init__").removesuffix(".")


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


@functools.cache
def imported_modules(name):
    """The package's modules that the module ``name`` imports, inside functions too."""
    path = MODULES[name]
    package = ["numba_tconv", *path.relative_to(PACKAGE).parts[:-1]]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *(node.module or "").split(".")]).removesuffix(".")
            # `from x import y`: y is a module of the package x, or a name in the module x.
            found.update(
                f"{source}.{alias.name}" if f"{source}.{alias.name}"[len(PREFIX) :] in MODULES else source
                for alias in node.names
            )
    inside = {full[len(PREFIX) :] for full in found if full == "numba_tconv" or full.startswith("numba_tconv.")}
    return inside - {name}


def layer(name):
    ranks = [rank for rank, patterns in enumerate(LAYERS) if any(fnmatch(name, pattern) for pattern in patterns)]
    assert len(ranks) == 1, f"{name or '__init__'} must be in one layer, is in {len(ranks)}"
    return ranks[0]


def test_imports_point_downwards():
    upwards = [(name, other) for name in MODULES for other in imported_modules(name) if layer(other) > layer(name)]
    assert not upwards


def test_no_import_circle():
    graphlib.TopologicalSorter({name: imported_modules(name) for name in MODULES}).prepare()


def test_the_import_reader_sees_what_is_imported():
    assert {"selection.registry", "kernels.rung", "formula.problem"} <= imported_modules("selection.forward")
    assert {"torch_api.operators", "selection.registry"} <= imported_modules("torch_api.functional")
    assert imported_modules("formula.taps") == set()


def test_the_layers_are_those_of_the_readme():
    """Its table lists them from the bottom up."""
    told = re.findall(r"^\| `(\w+)/` \|", (PACKAGE / "README.md").read_text(), flags=re.MULTILINE)
    assert told == [name for name, *others in LAYERS if others == [f"{name}.*"]]


def test_no_module_hides_one_of_the_library():
    """A Python started in a folder of the package finds that folder's modules first."""
    hiding = {path.stem for path in PACKAGE.rglob("*") if path.suffix == ".py" or path.is_dir()}
    assert not hiding & sys.stdlib_module_names


def test_the_reference_imports_nothing_that_it_judges():
    for path in (ROOT / "reference").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                assert {alias.name for alias in node.names} <= {"math", "numpy"}
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 1


def requirements():
    """Every requirement in pyproject.toml, except those on its own extras."""
    stated = itertools.chain(PROJECT["dependencies"], *PROJECT["optional-dependencies"].values())
    return [r for r in map(Requirement, stated) if r.name != PROJECT["name"]]


def pins():
    lines = (line.partition("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines())
    return {name: version for name, _, version in (line.partition("==") for line in lines if line)}


def test_constraints_are_exact():
    for name, version in pins().items():
        assert re.fullmatch(r"\d+(\.\d+)+", version), f"{name} is not pinned to one version"


@pytest.mark.parametrize("requirement", requirements(), ids=str)
def test_constraints_cover_and_meet_every_requirement(requirement):
    assert requirement.name in pins()
    assert requirement.specifier.contains(pins()[requirement.name])


def make_targets():
    return set(re.findall(r"^([a-z-]+):(?!=)", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))


def test_every_target_is_listed_as_phony_and_in_the_help():
    makefile = (ROOT / "Makefile").read_text()
    phony = set(re.search(r"^\.PHONY: (.*)$", makefile, flags=re.MULTILINE)[1].split())
    documented = set(re.findall(r"^([a-z-]+):.*## ", makefile, flags=re.MULTILINE))
    assert make_targets() == phony == documented


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize("failing", ["", "1", "none"])
def test_both_parts_of_the_tests_run_whatever_fails(tmp_path, failing):
    """``failing``: NUMBA_ENABLE_CUDASIM of the part that fails."""
    python, runs = tmp_path / "python", tmp_path / "runs"
    python.write_text(f'#!/bin/sh\necho part >> "{runs}"\ntest "$NUMBA_ENABLE_CUDASIM" != "{failing}"\n')
    python.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "NUMBA"))}
    command = ["make", "VENV=", f"PYTHON={python}", "test"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True)
    assert runs.read_text().split() == ["part"] * 2
    assert (done.returncode == 0) == (failing == "none")


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", ".ci/run"])
def test_commands_named_to_people_and_machines_exist(name):
    text = (ROOT / name).read_text()
    code = re.findall(r"```.*?```|`[^`]+`", text, flags=re.DOTALL) if name.endswith(".md") else [text]
    named = {target for piece in code for target in re.findall(r"\bmake (?:[A-Z]+=\S* )*([a-z-]+)", piece)}
    assert {"test"} <= named <= make_targets()


def test_the_readme_opens_with_two_commands():
    first = re.search(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)[1]
    assert [line.split("#")[0].strip() for line in first.splitlines()] == ["make demo", "make test"]


@pytest.mark.parametrize("name", MARKDOWN)
def test_what_is_linked_to_exists(name):
    assert links.Markdown(ROOT / name).links
    assert links.broken(ROOT / name) == []


def test_no_path_of_somebodys_machine():
    home = re.compile(r"(?<![\w.])/(home|root|Users|work|tmp)/")
    for path in committed_files():
        assert not home.search(path.read_text()), path.relative_to(ROOT)


def test_files_stay_small():
    for path in committed_files():
        if path.suffix == ".py":
            text = path.read_text()
            lines = len(text.splitlines())
            if lines >= 400:
                imported = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Import | ast.ImportFrom)]
                lines -= sum(n.end_lineno - n.lineno + 1 for n in imported)
            assert lines < 400, path.relative_to(ROOT)


def test_every_gpu_test_is_marked():
    """`make test-gpu` runs marked tests alone."""
    marked = re.compile(r"^pytestmark = \[?\s*pytest\.mark\.gpu\b", re.MULTILINE)
    files = (ROOT / "tests" / "gpu").glob("test_*.py")
    assert not [path.name for path in files if not marked.search(path.read_text())]
