"""The `serve` command: parse, call, print. A file for each family of subcommands."""
