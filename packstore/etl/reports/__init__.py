"""Reports before a job, which write no dataset: doctor, estimate, check, and all of
them.
"""
