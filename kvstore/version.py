"""Which kvstore this is: the version it was installed as, the commit where it runs from a checkout, how to run more of it."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

_CHECKOUT = Path(__file__).resolve().parents[1]


def module_command(name: str) -> list[str]:
    """Runs a module of this same kvstore. Without -P a folder named kvstore in the current directory would take its place."""
    safe = [] if _CHECKOUT.samefile(".") else ["-P"]
    return [sys.executable, *safe, "-m", name]


@cache
def version() -> str:
    """ "0.1.0"; of the checkout where the package was not installed."""
    import importlib.metadata  # slow to import

    try:
        return importlib.metadata.version("kvstore")
    except importlib.metadata.PackageNotFoundError:
        with (_CHECKOUT / "pyproject.toml").open("rb") as file:
            return str(tomllib.load(file)["project"]["version"])


def described() -> str:
    """ "kvstore 0.1.0 (1a2b3c4)"; without the commit where that is not known, as in an installed wheel."""
    return f"kvstore {version()}" + (f" ({revision()})" if revision() != "unknown" else "")


@cache
def revision() -> str:
    """Short commit of the checkout, "unknown" elsewhere."""
    if not (_CHECKOUT / ".git").exists():
        return "unknown"
    try:
        asked = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=_CHECKOUT, capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return asked.stdout.strip() or "unknown"
