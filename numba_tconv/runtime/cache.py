"""Compiled kernels (PTX) in ``NUMBA_TCONV_CACHE`` (empty: no cache), else the user's cache directory.

A file's name is a digest of all that the PTX depends on. A damaged file is compiled anew; failing to write warns
once.
"""

import hashlib
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

COMPILERS = ("numba", "numba-cuda", "llvmlite", "nvidia-nvvm", "cuda-toolkit", "numpy")
LAYERS = ("formula", "ptx", "runtime", "kernels", "gradients", "selection")


def directory() -> Path | None:
    """The cache's directory; None: the cache is off."""
    chosen = os.environ.get("NUMBA_TCONV_CACHE")
    if chosen == "":
        return None
    try:
        if chosen:
            return Path(chosen).expanduser()
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "numba_tconv"
    except RuntimeError as error:
        _warn_once(chosen or "~/.cache", str(error))
        return None


@cache
def fingerprint(source: Path = Path(__file__).parents[1]) -> str:
    """A digest of Python's version, the package's sources and the compilers' versions."""
    digest = hashlib.sha256(sys.version.encode())
    for path in sorted(path for layer in LAYERS for path in (source / layer).rglob("*.py")):
        digest.update(f"{path.relative_to(source)}\0".encode() + path.read_bytes())
    for name in COMPILERS:
        with suppress(PackageNotFoundError):
            digest.update(f"{name} {version(name)}".encode())
    return digest.hexdigest()


def ptx(name: str, key: str, cc: tuple, compile: Callable[[], str]) -> str:
    """Kernel ``name``'s PTX for ``key`` and target ``cc``, read from the cache or made by ``compile``."""
    folder = directory()
    if folder is None:
        return compile()
    path = _path(folder, name, key, cc)
    kept = _read(path)
    if kept is not None:
        return kept
    text = compile()
    _write(path, text)
    return text


def writable() -> Path:
    """The directory, created if missing. Raises RuntimeError if the cache is off, OSError if it cannot be written."""
    folder = directory()
    if folder is None:
        is_empty = os.environ.get("NUMBA_TCONV_CACHE") == ""
        why = "NUMBA_TCONV_CACHE is empty" if is_empty else "there is no home directory"
        raise RuntimeError(f"the cache of compiled kernels is off: {why}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise OSError(error.errno, f"cannot write {folder}: {error.strerror}") from error
    return folder


def holds(name: str, key: str, cc: tuple) -> bool:
    """Whether ``ptx`` would find an undamaged file."""
    folder = directory()
    return folder is not None and _read(_path(folder, name, key, cc)) is not None


def _path(folder: Path, name: str, key: str, cc: tuple) -> Path:
    identity = "\n".join([fingerprint(), name, key, repr(cc)])
    return folder / f"{name}-{hashlib.sha256(identity.encode()).hexdigest()[:40]}.ptx"


def _read(path: Path) -> str | None:
    try:
        digest, _, text = path.read_text().partition("\n")
    except (OSError, UnicodeDecodeError):
        return None
    return text if digest == hashlib.sha256(text.encode()).hexdigest() else None


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, beside = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".part")
        try:
            with os.fdopen(handle, "w") as file:
                file.write(hashlib.sha256(text.encode()).hexdigest() + "\n" + text)
            os.replace(beside, path)
        except BaseException:
            Path(beside).unlink(missing_ok=True)
            raise
    except OSError as error:
        _warn_once(str(path.parent), str(error))


@cache
def _warn_once(folder: str, why: str) -> None:
    warnings.warn(f"compiled kernels are not kept in {folder}, so each process compiles them: {why}", stacklevel=2)
