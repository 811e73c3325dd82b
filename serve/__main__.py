"""`python -m serve`."""

from serve.cli import main

main()
