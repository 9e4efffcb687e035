"""Pipeline of stages: stage server, stage client, driver, routes, calls of microbatches, and the compute thread."""
