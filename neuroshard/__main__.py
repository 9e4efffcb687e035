"""`python -m neuroshard` is the `neuroshard` command."""

from neuroshard.cli.main import main

main()
