"""Who is there and how rounds between them go. Decisions are pure; messages go through a Transport.

Import from the modules: some need PyTorch, which takes seconds, and most do not.
"""
