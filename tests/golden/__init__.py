"""The golden corpus: jobs, and what the package makes of each on three clusters, as files in git.

`jobs` holds the jobs, `world` the tiny inputs and models that they name, `record` what is recorded
of each, and `corpus` the files in cases/.
"""
