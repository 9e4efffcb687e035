"""The stages that each node hosts, and the moves of nodes to other stages. Pure: nodes with the same view agree."""
