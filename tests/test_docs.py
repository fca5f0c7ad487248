"""The documentation: no broken links; every name in the API reference has a docstring."""

import doctest
import importlib
import inspect
import re
from functools import cached_property
from pathlib import Path

import pytest

from . import links

ROOT = Path(__file__).parents[1]
MAKEFILE = (ROOT / "Makefile").read_text()
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path.read_text()
    for path in (ROOT / "numba_tconv").rglob("*.py")
}


def words_of(variable):
    """The words of a Makefile variable."""
    value = re.search(rf"^{variable} := (.*)$", MAKEFILE, flags=re.MULTILINE)[1]
    added = re.search(r"\$\(addprefix ([\w.]+),([^)]*)\)", value)
    plain = value.replace(added[0], "").split() if added else value.split()
    return plain + [added[1] + word for word in (added[2].split() if added else [])]


DOCUMENTED = words_of("DOCUMENTED")


def public(module):
    """A module's classes and functions in the reference, by name."""
    names = getattr(module, "__all__", None) or [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    ]
    found = {name: getattr(module, name) for name in names}
    return {name: value for name, value in found.items() if inspect.isclass(value) or inspect.isfunction(value)}


def members(cls):
    """Methods and properties that a class defines for its users."""
    kinds = (property, cached_property, classmethod, staticmethod)
    return {
        name: value
        for name, value in vars(cls).items()
        if not name.startswith("_") and (inspect.isfunction(value) or isinstance(value, kinds))
    }


@pytest.mark.parametrize("name", DOCUMENTED)
def test_public_names_have_docstrings(name):
    module = importlib.import_module(name)
    assert module.__doc__
    shown = public(module)
    assert shown
    for cls in [value for value in shown.values() if inspect.isclass(value)]:
        shown |= {f"{cls.__name__}.{key}": value for key, value in members(cls).items()}
    # A dataclass without a docstring gets its signature for one.
    assert [key for key, value in shown.items() if not value.__doc__ or value.__doc__.startswith(f"{key}(")] == []


@pytest.mark.parametrize("name", sorted(name for name, source in MODULES.items() if ">>> " in source))
def test_examples_in_docstrings_give_what_they_show(name):
    found = doctest.testmod(importlib.import_module(name))
    assert found.attempted
    assert not found.failed


def test_no_default_is_a_path_of_the_machine_that_builds():
    for name in DOCUMENTED:
        for function in filter(inspect.isfunction, public(importlib.import_module(name)).values()):
            defaults = [parameter.default for parameter in inspect.signature(function).parameters.values()]
            assert not any(isinstance(default, Path) for default in defaults), function


# --- the checker of links ---------------------------------------------------------------------------------------------


def test_links_of_markdown(tmp_path):
    (tmp_path / "a file.md").write_text("# Where to look\n\n## Twice `said`\n\n## Twice said\n")
    page = tmp_path / "page.md"
    page.write_text(
        "# The [rungs](#the-rungs)\n[1](a%20file.md#where-to-look) [2](a%20file.md#twice-said-1) [3](a%20file.md)\n"
        "![4](none.png) [5](#rungs) [6](a%20file.md#where) [7](https://example.org/x#y)\n[8]: none.md\n"
        "`[9](none.md)`\n```\n[10](none.md)\n# none\n```\n[11](#none)\n"
    )
    assert links.broken(page) == ["none.png", "#rungs", "a%20file.md#where", "#none", "none.md"]


def test_links_of_pages(tmp_path, capsys):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "other.html").write_text('<a id="there">x</a><a href="../page.html#here">up</a>')
    page = tmp_path / "page.html"
    page.write_text('<p id="here"><a href="#here">1</a><a href="sub/other.html#there">2</a><a href="//x.org/y">3</a>')
    assert links.main(tmp_path) == 0
    page.write_text(page.read_text() + '<a href="#gone">4</a><img src="none.png"><a href="sub/other.html#here">5</a>')
    assert links.broken(page) == ["#gone", "none.png", "sub/other.html#here"]
    assert links.main(tmp_path) == 1
    assert "page.html: #gone" in capsys.readouterr().out


def test_a_directory_without_pages_is_a_mistake(tmp_path):
    assert links.main(tmp_path) == 1
