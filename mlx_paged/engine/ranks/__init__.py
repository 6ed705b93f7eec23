"""Several ranks: a model's layers on several devices, with a process for each.

Every rank has a part of each layer (tensor parallelism), or some of the layers (a pipeline). Rank 0
has the engine. It sends every step as a record to the other ranks, which have nothing but a model
and its pools:

    rank 0    Scheduler ── RanksExecutor ── LeadRunner ──┬── model, pools, sampling
                                              │ records  │ collectives
    rank 1    follow() ───────────────── FollowRunner ───┴── model, pools

- `messages`: the records, as bytes; `adapters` and `media`: their parts about these; `channel`:
  their way between two processes.
- `launch`: finds or starts the processes; `life`: ends all of them when one ends.
- `lead`: what runs on rank 0; `follow`, in a `process` each: what runs on the others.
"""
