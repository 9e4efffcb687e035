"""The `neuroshard` command: parse arguments, call a room below, print, and turn errors into exit codes."""
