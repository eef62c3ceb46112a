"""Audits any training command: which weight each of its micro-batches has in each update."""
