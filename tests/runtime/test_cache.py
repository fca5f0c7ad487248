"""The disk cache: what is found again, what is compiled anew, and that nothing about the directory can do harm."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from numba_tconv.runtime import cache
from numba_tconv.runtime.kernel import Kernel

CC = (9, 0, "a")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBA_TCONV_CACHE", str(tmp_path / "kernels"))
    cache._warn_once.cache_clear()
    return tmp_path / "kernels"


class Compiler:
    def __init__(self, text="// code\n"):
        self.text, self.calls = text, 0

    def __call__(self):
        self.calls += 1
        return self.text


def test_what_was_compiled_is_found_again():
    first, second = Compiler(), Compiler("// other")
    assert cache.ptx("k", "a", CC, first) == cache.ptx("k", "a", CC, second) == first.text
    assert (first.calls, second.calls) == (1, 0)


@pytest.mark.parametrize("other", [("k2", "a", CC), ("k", "b", CC), ("k", "a", (8, 0))])
def test_another_kernel_configuration_or_gpu_is_another_file(other):
    cache.ptx("k", "a", CC, Compiler())
    assert cache.ptx(*other, Compiler("// other")) == "// other"


def test_another_version_is_another_file(monkeypatch):
    cache.ptx("k", "a", CC, Compiler())
    monkeypatch.setattr(cache, "fingerprint", lambda: "another version")
    assert cache.ptx("k", "a", CC, Compiler("// other")) == "// other"


@pytest.mark.parametrize("damage", [b"", b"nonsense", b"\xff\xfe", None])
def test_a_damaged_file_is_compiled_anew(folder, damage):
    cache.ptx("k", "a", CC, Compiler())
    (path,) = folder.glob("*.ptx")
    path.write_bytes(path.read_bytes()[:-1] if damage is None else damage)
    again = Compiler()
    assert cache.ptx("k", "a", CC, again) == again.text
    assert again.calls == 1
    assert cache.ptx("k", "a", CC, Compiler("// other")) == again.text


def test_a_directory_that_cannot_be_written_costs_one_warning(folder, monkeypatch):
    folder.write_text("a file where the directory should be")
    with pytest.warns(UserWarning, match="are not kept"):
        assert cache.ptx("k", "a", CC, Compiler()) == "// code\n"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cache.ptx("k", "b", CC, Compiler()) == "// code\n"


def test_an_empty_name_turns_it_off(monkeypatch, folder):
    monkeypatch.setenv("NUMBA_TCONV_CACHE", "")
    compiler = Compiler()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache.ptx("k", "a", CC, compiler)
        cache.ptx("k", "a", CC, compiler)
    assert compiler.calls == 2
    assert not folder.exists()


def test_the_home_directory_has_its_short_name(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NUMBA_TCONV_CACHE", "~/kept")
    assert cache.directory() == tmp_path / "kept"


def test_without_a_home_it_is_off(monkeypatch):
    """As of a container's user whom the system does not know."""

    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(cache.Path, "home", no_home)
    monkeypatch.delenv("NUMBA_TCONV_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    with pytest.warns(UserWarning, match=r"are not kept in ~/.cache, .*: Could not determine"):
        assert cache.ptx("k", "a", CC, Compiler()) == "// code\n"
    assert not cache.holds("k", "a", CC)
    with pytest.raises(RuntimeError, match="is off: there is no home directory"):
        cache.writable()


def test_nothing_half_written_is_left_behind(folder):
    class Interrupted(Compiler):
        def __call__(self):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cache.ptx("k", "a", CC, Interrupted())
    cache.ptx("k", "a", CC, Compiler())
    assert [path.suffix for path in folder.iterdir()] == [".ptx"]


def test_processes_share_it(folder):
    # The module alone, by its file: importing the package takes seconds.
    script = f"import runpy; ptx = runpy.run_path({cache.__file__!r})['ptx']"
    script += "; print(len(ptx('k', 'a', (9, 0, 'a'), lambda: 'x' * 300_000)))"
    running = [
        subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=os.environ) for _ in range(4)
    ]
    assert [int(process.communicate()[0]) for process in running] == [300_000] * 4
    assert [path.suffix for path in folder.iterdir()] == [".ptx"]


def test_the_fingerprint_knows_the_source_and_the_compilers(tmp_path, monkeypatch):
    def fingerprint():
        return cache.fingerprint.__wrapped__(tmp_path)

    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "k.py").write_text("one = 1\n")
    seen = [fingerprint()]
    assert fingerprint() == seen[0]
    (tmp_path / "kernels" / "k.py").write_text("one = 2\n")
    seen.append(fingerprint())
    (tmp_path / "runtime").mkdir()
    (tmp_path / "kernels" / "k.py").rename(tmp_path / "runtime" / "k.py")
    seen.append(fingerprint())
    monkeypatch.setattr(cache, "version", lambda name: "another")
    seen.append(fingerprint())
    assert len(set(seen)) == 4


def test_the_fingerprint_knows_which_compilers_are_missing(tmp_path, monkeypatch):
    def versions(missing):
        def version(name):
            if name in missing:
                raise cache.PackageNotFoundError
            return "1.0"

        return version

    seen = set()
    for missing in ((), *((name,) for name in cache.COMPILERS), cache.COMPILERS):
        monkeypatch.setattr(cache, "version", versions(missing))
        seen.add(cache.fingerprint.__wrapped__(tmp_path))
    assert len(seen) == len(cache.COMPILERS) + 2


def test_the_fingerprint_is_that_of_the_package_by_itself():
    assert cache.fingerprint() == cache.fingerprint(Path(cache.__file__).parents[1])


def test_a_folder_that_takes_no_file_is_not_writable(tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBA_TCONV_CACHE", str(tmp_path / "kernels"))
    assert cache.writable() == tmp_path / "kernels"

    def refused(dir):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(cache.tempfile, "TemporaryFile", refused)
    with pytest.raises(PermissionError, match=f"cannot write {tmp_path / 'kernels'}: Permission denied"):
        cache.writable()


def test_what_no_kernel_is_made_of_throws_nothing_away(tmp_path):
    for folder in ("kernels", "lab", "torch_api"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "k.py").write_text("one = 1\n")
    before = cache.fingerprint.__wrapped__(tmp_path)
    (tmp_path / "lab" / "k.py").write_text("caption = 2\n")
    (tmp_path / "torch_api" / "k.py").write_text("caption = 2\n")
    (tmp_path / "__init__.py").write_text("caption = 2\n")
    assert cache.fingerprint.__wrapped__(tmp_path) == before
    (tmp_path / "kernels" / "k.py").write_text("one = 2\n")
    assert cache.fingerprint.__wrapped__(tmp_path) != before


@pytest.mark.parametrize(("key", "compiled"), [("a", 1), ("", 2)])
def test_a_kernel_without_a_key_is_never_cached(folder, monkeypatch, key, compiled):
    compiler = Compiler()
    monkeypatch.setattr(Kernel, "ptx", lambda self, cc: compiler())
    texts = [Kernel("k", None, (), 32, key=key).kept_ptx(CC) for _ in range(2)]
    assert texts == [compiler.text] * 2
    assert (compiler.calls, folder.exists()) == (compiled, bool(key))
