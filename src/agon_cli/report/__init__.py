"""A document as files: the page, and its tables as Markdown, CSV and LaTeX. Equal documents give equal bytes."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from agon_cli.document import Document
from agon_cli.errors import DISK_FULL, ResourceError, UsageError
from agon_cli.report import tables
from agon_cli.report.page import page

__all__ = ["page", "write", "write_page"]


def write(folder: Path, document: Document) -> list[Path]:
    """Write page.html, table.md, table.csv and table.tex into a folder; returns their paths. Each is the old one or the
    new one at any moment. Raises UsageError or ResourceError where one cannot be written."""
    texts = {
        "table.md": tables.markdown(document),
        "table.csv": tables.comma_separated(document),
        "table.tex": tables.latex(document),
        "page.html": page(document),
    }
    return [_replace(folder / name, text) for name, text in texts.items()]


def write_page(path: Path, document: Document) -> Path:
    """Write the page alone; returns its path."""
    return _replace(path, page(document))


def _replace(path: Path, text: str) -> Path:
    fresh = path.parent / f".{path.name}.new"
    try:
        with open(fresh, "wb") as file:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, path)
    except OSError as error:
        with suppress(OSError):
            fresh.unlink()
        if error.errno in DISK_FULL:
            raise ResourceError(f"disk full: {path}: {error.strerror}", "free some space and run it again") from error
        raise UsageError(f"{path} cannot be written: {error.strerror}", "choose another file with --out") from error
    return path
