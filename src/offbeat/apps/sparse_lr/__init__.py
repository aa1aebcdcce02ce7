"""Sparse logistic regression with an L1 penalty: data, objective, a solver, delayed block proximal steps."""
