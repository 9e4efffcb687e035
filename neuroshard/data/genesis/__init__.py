"""The Genesis folder format: signed manifest, digest pages and shard files, read without trusting any of them."""
