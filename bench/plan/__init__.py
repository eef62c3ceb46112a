"""The plan of a run: a matrix file becomes cells, cells become trials, trials become tasks."""
