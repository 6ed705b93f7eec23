"""Serves several models: a router listens, and a process of its own runs each model.

The router listens, knows the state of each model (`pool`), starts and ends their processes
(`process`), and forwards requests to them (`forward`). Such a process is a server of one model on a
Unix domain socket, so every endpoint works for each model. A process of its own means that loading
a model never holds up the streams of another one, that all its memory is free when it ends, and
that a crash takes down one model (`bench/models.py` has the measurements).

Several processes may serve one model: `replicas` starts them again when they die, and `routing`
chooses the one that answers a request, by what is cached there (`prefixes`).
"""
