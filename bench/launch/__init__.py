"""Starts, watches and ends the process group of one trial, and reports how it ended.

Entry point: ``launcher``.
"""
