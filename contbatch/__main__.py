"""`python -m contbatch` is the `contbatch` command."""

from contbatch.cli import main

main()
