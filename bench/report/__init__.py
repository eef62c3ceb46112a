"""What is shown: the terminal, tables in words, plots."""
