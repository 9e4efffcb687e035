"""The `neuroshard` command: it parses arguments, calls a room below, prints, and turns errors into exit codes."""
