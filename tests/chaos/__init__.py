"""The fault campaign: real runs, real faults at random moments, an independent checker.

python -m chaos --seed 1 --trials 200        (with tests/ on PYTHONPATH; or `make chaos`)
"""
