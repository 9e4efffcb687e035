"""Composition root: builds every part of a running node, wires them, watches them and takes them down again."""
