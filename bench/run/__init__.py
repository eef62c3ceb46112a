"""Starts a run, runs its trials in order, and stores their results."""
