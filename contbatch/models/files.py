"""JSON files of a checkpoint folder, with errors of ours for those that are missing or damaged."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from contbatch.errors import CheckpointError


def read_json(path: Path) -> dict[str, Any]:
    """The object that a file holds.

    Raises:
        CheckpointError: it is missing, damaged, or holds something else.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; a checkpoint folder needs it")
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is truncated or damaged: {error}; get the file again") from error
    if not isinstance(fields, dict):
        raise CheckpointError(f"{path} holds a {type(fields).__name__}, not an object; get it again")
    return fields


def read_json_if_there(path: Path) -> dict[str, Any]:
    """Like `read_json`; empty where the file is missing, because it may be."""
    return read_json(path) if path.is_file() else {}


def write_json(path: Path, fields: Mapping[str, Any]) -> None:
    """Write an object for `read_json`."""
    path.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
