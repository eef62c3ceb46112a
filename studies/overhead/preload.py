"""Imported by the process from which ranks without the bench are forked: loads what the backend has preloaded."""

from __future__ import annotations

import os

from bench.backends.base import load

for name in filter(None, os.environ["BENCH_PRELOAD"].split(",")):
    load(name)
