"""Around trials: what starts a run, runs its trials in order, and keeps what they hand back."""
