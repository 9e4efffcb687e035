"""`neuroshard`, for tests that start it inside a network namespace."""

from neuroshard.cli.main import main

main()
