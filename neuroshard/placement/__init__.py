"""Which stages each node holds, and which nodes move to other stages. Pure: nodes with the same view agree."""
