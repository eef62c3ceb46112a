"""The wing that audits: who steps the optimizer and when, in loops, plans and configurations."""
