"""Serves several models: a router in front of one process per model.

The router tracks the state of each model (`pool`), starts and stops their processes (`process`),
and forwards requests to them (`forward`). Each process is a one-model server on a Unix domain
socket, so every endpoint works for every model. Separate processes mean that loading a model never
stalls another one's streams, that unloading frees all its memory, and that a crash takes down only
one model (measured by `bench/models.py`). A spare process (`spare`) imports ahead of the next load
(measured by `bench/loading.py`).

Several processes may serve one model: `replicas` restarts those that die, and `routing` picks one
for each request, by what it has cached (`prefixes`).
"""
