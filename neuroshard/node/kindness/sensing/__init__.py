"""Looks at this computer, each thing in a file of its own. What cannot be told is Unknown, with the reason in words."""
