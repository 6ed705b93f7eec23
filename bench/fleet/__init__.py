"""Simulates many replicas of the engine behind a router, from measured step times.

`traffic` has the sessions, `arrivals` their starts, `cache` and `replica` a server, `routing` the
policies, `simulation` the events, `metrics` the results, and `step_times` what a step takes.
"""
