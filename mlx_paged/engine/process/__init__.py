"""An engine in a process of its own, behind `EngineClient`.

In one process, the engine's thread waits for the interpreter lock while the server's event loop
decodes and sends tokens, and the device waits for the engine. Two processes have two locks.

```
 server's process                             engine's process
 ProcessEngine   -- requests, calls ------->  EngineProcess -> AsyncEngine -> EngineThread
 RemoteAnswer    <------- one message a step  Outbox <------------------------'
```
"""
