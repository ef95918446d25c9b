"""Estimates from CPU runs, and how good they are: against measured runs and beside other estimators."""
