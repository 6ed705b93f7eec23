"""Several ranks: a model's layers on several devices, with a process for each.

Each rank holds a part of every layer (tensor parallelism), or some of the layers (pipeline
parallelism). Rank 0 runs the engine and sends every step as a record to the other ranks, which hold
only a model and its pools:

    rank 0    Scheduler ── RanksExecutor ── LeadRunner ──┬── model, pools, sampling
                                              │ records  │ collectives
    rank 1    follow() ───────────────── FollowRunner ───┴── model, pools

- `messages`: the records as bytes, with `adapters` and `media` for those parts; `channel` carries
  them between two processes.
- `launch` starts the processes or joins running ones; `life` ends all of them when one ends.
- `parallel_groups` and `peers`: the process groups, and sums in memory that their GPUs share.
- `lead` runs on rank 0; `follow` runs on every other rank, each in its own `process`.
"""
