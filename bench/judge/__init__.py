"""What the tables say: gates that judge trials."""
