"""Estimates the share of a run's answers that are right, with a 95 % confidence interval.

Right answers are known for golden rows; a judge model assesses a sample of the other answers.
"""
