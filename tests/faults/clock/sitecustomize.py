"""On the path of all processes of a run: the clock on the wall jumps at every look, as seen from Python."""

import itertools
import time

_true = time.time
_signs = itertools.cycle((1, -1))
time.time = lambda: _true() + 86400 * next(_signs)
