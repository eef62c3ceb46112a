"""The wing that predicts: memory, collectives, bounds of a step's time, what fits, and which backend to take."""
