"""`python -m compress`, where another `compress` comes first on PATH."""

from compress.cli import main

main()
