"""Builds the tables of a run, judges its trials with gates, and compares its cells."""
