"""Checks, before the work of a command, that the file it will write at the end can be written."""

from __future__ import annotations

import os
from pathlib import Path

from prefect_raybatch.errors import ConfigError


def check_writable(option: str, file: Path, makes_folders: bool = False) -> None:
    """Raise `ConfigError` if `file` cannot be written; `option` names it in the message.

    `makes_folders`: the command creates missing folders.
    """
    if file.is_dir():
        raise ConfigError(f"{option}: {file} is a folder. Name a file")
    if file.exists() and not os.access(file, os.R_OK | os.W_OK):
        raise ConfigError(f"{option}: {file} cannot be written. Name another file")
    folder = file.absolute().parent
    if makes_folders:
        folder = next(path for path in file.absolute().parents if path.exists())
    if not folder.exists():
        raise ConfigError(f"{option}: the folder {folder} does not exist. Create it")
    if not folder.is_dir():
        raise ConfigError(f"{option}: {folder} is a file. Name a file in a folder")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"{option}: {folder} cannot be written to. Name another folder")
