"""A stage's state on its way from one node to another: who has it, in which chunks it travels, where it lands."""
