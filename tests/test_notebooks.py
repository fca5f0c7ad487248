"""Every notebook runs from first to last cell, in a copy, each cell within a minute."""

import ast
import contextlib
import importlib
import inspect
from pathlib import Path

import nbformat
import pytest

from tests.thorough import thorough

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.parametrize("path", thorough(NOTEBOOKS, always=NOTEBOOKS[:1]), ids=lambda path: path.name)
def test_runs(path, tmp_path, monkeypatch):
    from nbclient import NotebookClient  # of which only this process has to wait

    folder = tmp_path / "notebooks"
    folder.mkdir()
    (tmp_path / "plots").symlink_to(ROOT / "plots")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # the package, where it is not installed
    monkeypatch.delenv("NUMBA_ENABLE_CUDASIM", raising=False)  # the notebook decides
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=60, resources={"metadata": {"path": str(folder)}}).execute()
    assert all(cell.execution_count for cell in notebook.cells if cell.cell_type == "code")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_is_committed_as_it_ran(path):
    """Every cell has run, in order, without an error; no output names the machine."""
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    assert not [output for output in outputs if output.get("name") == "stderr"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_what_it_takes_from_the_package_is_there(path):
    """Modules, names imported from them, and attributes of imported modules."""
    code = [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    lines = "\n".join(code).splitlines()
    tree = ast.parse("\n".join(line for line in lines if not line.startswith("%")))
    named = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module.partition(".")[0] in ("numba_tconv", "reference"):
            for name in node.names:
                with contextlib.suppress(ModuleNotFoundError):
                    importlib.import_module(f"{node.module}.{name.name}")
                found = getattr(importlib.import_module(node.module), name.name, None)
                assert found is not None, ast.unparse(node)
                named[name.asname or name.name] = found
    modules = {name: found for name, found in named.items() if inspect.ismodule(found)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            assert hasattr(modules[node.value.id], node.attr), ast.unparse(node)
