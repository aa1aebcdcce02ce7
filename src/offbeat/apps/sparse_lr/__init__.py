"""Sparse logistic regression with an L1 penalty: data, objective, a solver, and delayed block proximal steps."""
