"""What is run: a matrix file becomes cells, and cells become tasks."""
