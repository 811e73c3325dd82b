"""`python -m serve`."""

from serve.cli.main import main

if __name__ == "__main__":  # a process that it spawns reads this file, too
    main()
