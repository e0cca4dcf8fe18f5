"""The `gear` command: one module a subcommand, each with `add_arguments` and `run`."""
