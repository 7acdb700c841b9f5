"""Tools for people who keep notebooks in version control: guards, a normaliser, and a regenerator.

A notebook here is a program with its output beside it, and the output is a test. That only holds if
the file says nothing about the machine it was made on, and if nothing in it can pass unchecked. The
guards say where a file falls short of that, the normaliser mends what needs no thought, and the
regenerator runs a notebook and normalises it, so that doing it twice changes nothing.

Works on any notebook; only `skeleton` is about the lessons of this package.
"""

from contbatch.nbtools.cells import Finding
from contbatch.nbtools.files import NotebookError, find_notebooks, notebook_folder, read, to_text
from contbatch.nbtools.guards import check
from contbatch.nbtools.normalise import normalise
from contbatch.nbtools.skeleton import check_skeleton
from contbatch.nbtools.update import execute, update

__all__ = [
    "Finding",
    "NotebookError",
    "check",
    "check_skeleton",
    "execute",
    "find_notebooks",
    "normalise",
    "notebook_folder",
    "read",
    "to_text",
    "update",
]
