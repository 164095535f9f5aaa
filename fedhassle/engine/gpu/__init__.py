"""Many clients at once on one GPU: steps are recorded once per shape of job, then replayed on lanes.

Start with `lanes`; `recording` follows one job through.
"""
