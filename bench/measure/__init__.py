"""Measurement inside a rank: the passes of a trial, the taps and the instruments."""
