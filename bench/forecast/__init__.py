"""The wing that predicts: memory, collectives, step times, what fits, and which backend to take."""
