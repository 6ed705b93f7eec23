"""Runs an engine in a separate process, behind `EngineClient`.

In one process, the engine's thread waits for the interpreter lock while the event loop decodes and
sends tokens, and meanwhile the device idles. Two processes have two locks.

```
 server process                               engine process
 ProcessEngine   -- requests, calls ------->  EngineProcess -> AsyncEngine -> EngineThread
 RemoteAnswer    <----- one message per step  Outbox <------------------------'
```
"""
